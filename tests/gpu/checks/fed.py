"""Checks of GEMMs that are fed: bits as behind the wait, in all ways to run; and that such calls are fed indeed.

What a fed GEMM must give are the bits of our GEMM behind ``wait_``, whose rows come from push's two-shot and are held against
float64 by other checks.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.distributed as dist

from gpu.checks.stress import FIRST_SITE, capture, new_counter
from tw_compile import compat
from tw_compile.environment import SPIN_LIMIT
from tw_compile.harness.problems import Context, Form, Problem, make_problem
from tw_compile.kernels.algorithms.push.push import Push
from tw_compile.kernels.collective import ops
from tw_compile.kernels.collective.fed_mm import fed_gated_mm, fed_joint_mm
from tw_compile.kernels.collective.transport import Transport, get_transport, instances
from tw_compile.kernels.gemm.by_rows import gated_mm_by_rows, joint_mm_by_rows
from tw_compile.kernels.gemm.mm_leaving_sms import gated_mm_leaving_sms, joint_mm_leaving_sms
from tw_compile.kernels.transports.p2p import P2PTransport

COLUMNS = {"plain": (1800, 264, 256), "single": (1800,), "biased": (1536, 512), "gated": (1800, 1800)}
"""Of the matrices of each form."""
TRANSPORT = "p2p"
SIZES = (
    (1, 1024), (2, 1024), (63, 1024), (128, 4096), (129, 4096), (255, 2048), (257, 4096), (511, 8192), (640, 4096),
    (1025, 8192), (1536, 1024)
)  # fmt: skip
_SHARDED = Form(residual="sharded", out="sharded", residual_dtype=torch.float32)


@dataclass
class Site:
    """A call and the GEMMs behind it.

    ``want``: products of the GEMM behind the wait, and the rows of the residual. ``want_unfed``: the same where the operators
    feed nothing. GEMMs of few rows split their depth then, which gives other bits.
    """

    problem: Problem
    form: str
    matrices: list[torch.Tensor]
    biases: list[torch.Tensor]
    want: list[torch.Tensor]
    want_unfed: list[torch.Tensor]


def make_site(
    ctx: Context, tokens: int, hidden_size: int, form: str, of_call: Form = FIRST_SITE, seed: int = 0
) -> Site:
    problem = make_problem(ctx, tokens, hidden_size, of_call, seed)
    generator = ctx.generator(tokens, hidden_size, seed)
    shapes = [(columns, hidden_size) for columns in COLUMNS[form]]
    matrices = [
        torch.randn(shape, generator=generator, device=ctx.device).div(hidden_size**0.5).bfloat16().t()
        for shape in shapes
    ]
    biases = [torch.randn(len(one.t()), generator=generator, device=ctx.device).bfloat16() for one in matrices]
    site = Site(problem, form, matrices, biases if form == "biased" else [], [], [])
    hidden, residual = _finished(unfed(), problem, ctx)
    if form == "gated":
        products = [gated_mm_leaving_sms(hidden, *matrices, 0)]
        unfed_products = [gated_mm_by_rows(hidden, *matrices, [0])]
    else:
        products = joint_mm_leaving_sms(hidden, matrices, site.biases, 0)
        unfed_products = joint_mm_by_rows(hidden, matrices, site.biases, [0])
    rows = problem.written(ctx, residual)
    site.want, site.want_unfed = [*products, rows], [*unfed_products, rows]
    torch.cuda.synchronize()
    return site


@cache
def unfed() -> Transport:
    """By push's two-shot."""
    return P2PTransport("p2p", Push(one_shot=False))


def _finished(transport: Transport, problem: Problem, ctx: Context) -> tuple[torch.Tensor, torch.Tensor]:
    started = transport.start(problem.request(ctx))
    if started.finish is not None:
        started.finish()
    return started.hidden, started.residual


def run_fed(ctx: Context, site: Site, feed_from: int = 1, slot: int = 0) -> list[torch.Tensor]:
    """The same by the operators; our kernel computes what is not fed, too."""
    request, turns = site.problem.request(ctx), [0]
    norm = request.norm
    hidden, residual = ops.start(
        request.x,
        request.residual,
        request.bias,
        request.weight,
        norm.eps,
        norm.weight_offset,
        norm.cast_before_weight,
        norm.hidden_dtype,
        norm.residual_dtype,
        request.residual_sharded,
        request.residual_out,
        ctx.group_name,
        TRANSPORT,
        slot,
        feed_from=feed_from,
    )
    expect_fed(ctx, slot, 0 < feed_from <= len(request.x))
    if site.form == "gated":
        products = [fed_gated_mm(hidden, *site.matrices, turns, ctx.group_name, slot)]
    else:
        products = fed_joint_mm(hidden, site.matrices, site.biases, turns, ctx.group_name, slot)
    ops.wait_(hidden, residual, [], ctx.group_name, slot)
    return [*products, site.problem.written(ctx, residual)]


def expect_fed(ctx: Context, slot: int, wanted: bool) -> None:
    fed = ops.in_flight[ctx.group_name, slot].fed is not None
    ctx.expect(fed == wanted, f"fed: {fed}, expected {wanted}")


def _count(wrong: torch.Tensor, found: list[torch.Tensor], site: Site, fed: bool = True) -> None:
    """Elements that differ, counted on the device, without a host wait."""
    for got, want in zip(found, site.want if fed else site.want_unfed, strict=True):
        wrong.add_((got != want).sum())


def fed_gemms_give_the_same_bits(ctx: Context) -> None:
    """All forms at sizes whose rows lie in blocks of several ranks, and in low tiles."""
    for tokens, hidden_size in SIZES:
        for form in COLUMNS:
            for of_call in (FIRST_SITE, _SHARDED):
                site, wrong = make_site(ctx, tokens, hidden_size, form, of_call), new_counter(ctx)
                _count(wrong, run_fed(ctx, site), site)
                label = f"[{tokens}, {hidden_size}], {form}, residual {of_call.residual}"
                ctx.expect(int(wrong) == 0, f"{label}: {int(wrong)} wrong elements")


def fed_and_other_calls_in_turn(ctx: Context) -> None:
    """On one slot, of several sizes, back to back, with ranks that lag: rows or flags of other calls would show."""
    sites = [
        make_site(ctx, tokens, hidden_size, form, seed=index)
        for index, (tokens, hidden_size, form) in enumerate(
            [
                (1025, 4096, "gated"),
                (1, 1024, "plain"),
                (300, 4096, "biased"),
                (640, 2048, "single"),
                (512, 4096, "plain"),
            ]
        )
    ]
    order, skew, wrong = random.Random(0), random.Random(ctx.rank), new_counter(ctx)
    for _ in range(ctx.calls(200)):
        if skew.random() < 0.3:
            compat.delay_stream(skew.randrange(400_000))
        burst = [(order.choice(sites), order.random() < 0.8) for _ in range(5)]
        found = [run_fed(ctx, site, feed_from=1 if fed else 0) for site, fed in burst]
        for results, (site, fed) in zip(found, burst, strict=True):
            _count(wrong, results, site, fed)
    ctx.expect(int(wrong) == 0, f"{int(wrong)} wrong elements")


def fed_ten_thousand_calls(ctx: Context) -> None:
    """Eight calls at a time, no host wait. Fewer where ranks share GPUs."""
    sites = [make_site(ctx, tokens, 1024, "plain", seed=tokens) for tokens in (1, 200, 5, 257, 2, 64, 384, 130)]
    wrong = new_counter(ctx)
    for _ in range(ctx.calls(10_000) // len(sites)):
        for site, results in [(site, run_fed(ctx, site)) for site in sites]:
            _count(wrong, results, site)
    ctx.expect(int(wrong) == 0, f"{int(wrong)} wrong elements")


def fed_captured_and_replayed(ctx: Context) -> None:
    """Replays, each with calls of another size between them, give the same bits; ranks lag."""
    site, other, wrong = make_site(ctx, 640, 4096, "gated"), make_site(ctx, 257, 4096, "plain"), new_counter(ctx)
    run_fed(ctx, site)
    kept: list[list[torch.Tensor]] = []

    def enqueue() -> list[tuple[torch.Tensor, torch.Tensor]]:
        kept[:] = [run_fed(ctx, site) for _ in range(3)]
        return []

    graph, _ = capture(enqueue)
    skew = random.Random(ctx.rank)
    for _ in range(30):
        compat.delay_stream(skew.randrange(400_000))
        for results in kept:
            for result in results[:-1]:
                result.fill_(torch.nan)
        graph.replay()
        for results in kept:
            _count(wrong, results, site)
        _count(wrong, run_fed(ctx, other), other)
    ctx.expect(int(wrong) == 0, f"{int(wrong)} wrong elements")


def fed_call_that_no_gemm_reads(ctx: Context) -> None:
    """Its result is complete behind the wait all the same."""
    site = make_site(ctx, 300, 4096, "plain")
    hidden, _ = _finished(unfed(), site.problem, ctx)
    started = get_transport(TRANSPORT).start(replace(site.problem.request(ctx), feed_from=1))
    ops.in_flight[ctx.group_name, 0] = started
    expect_fed(ctx, 0, True)
    del ops.in_flight[ctx.group_name, 0]
    if started.finish is not None:
        started.finish()
    ctx.expect(torch.equal(started.hidden, hidden), "other rows than those of a call that is not fed")


def fed_lost_peer_is_reported(ctx: Context) -> None:
    """With TW_COMPILE_SPIN_LIMIT, a rank that does not launch is named by the others instead of hanging them."""
    os.environ[SPIN_LIMIT] = "200000"
    usual = instances.get("p2p")
    try:
        lost = instances["p2p"] = P2PTransport("p2p")
    finally:
        del os.environ[SPIN_LIMIT]
    try:
        site = make_site(ctx, 512, 1024, "plain")
        # Ranks compile for different times and may give up on each other: on a slot that is not used again.
        run_fed(ctx, site, slot=1)
        torch.cuda.synchronize()
        dist.barrier()
        lost.states[ctx.group_name, ctx.device].slots[1].status.zero_()
        wrong = new_counter(ctx)
        _count(wrong, run_fed(ctx, site), site)
        ctx.expect(int(wrong) == 0, f"{int(wrong)} wrong elements with all ranks")
        lost.check()
        dist.barrier()
        if ctx.rank != 0:
            run_fed(ctx, site)
            try:
                lost.check()
                message = "nothing was reported"
            except RuntimeError as error:
                message = str(error)
            ctx.expect("waiting for rank 0" in message, message)
        dist.barrier()  # no rank frees its buffers while another still writes to them
    finally:
        if usual is None:
            del instances["p2p"]
        else:
            instances["p2p"] = usual


ALONE: tuple[Callable[[Context], None], ...] = (
    fed_gemms_give_the_same_bits,
    fed_and_other_calls_in_turn,
    fed_ten_thousand_calls,
    fed_captured_and_replayed,
    fed_call_that_no_gemm_reads,
    fed_lost_peer_is_reported,
)
