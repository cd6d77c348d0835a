"""Checks of what a transport computes: against float64, in all forms, and what it refuses or leaves to another."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from gpu.checks.transports import ALGORITHMS, finished, new_memory_is_nan, subject
from tw_compile import compat
from tw_compile.environment import PEER_ACCESS
from tw_compile.harness.problems import (
    BF16,
    EPS,
    Context,
    Form,
    Results,
    exact,
    expect_right,
    expect_same_on_all_ranks,
    expect_within_budget,
    make_problem,
    unfused,
)
from tw_compile.kernels.algorithms import ALGORITHMS as ALL_ALGORITHMS
from tw_compile.kernels.collective import ops
from tw_compile.kernels.collective.host_memory import HostMemory
from tw_compile.kernels.collective.peer_access import SWITCHED_OFF
from tw_compile.kernels.collective.spec import ResidualOut
from tw_compile.kernels.collective.transport import get_transport
from tw_compile.kernels.collective.transports import TRANSPORTS
from tw_compile.kernels.transports.host import HostTransport
from tw_compile.kernels.transports.p2p import P2PTransport

TOKENS = (1, 2, 3, 5, 63, 64, 1000, 1025, 4096)

FORMS = {
    "first_norm": Form(residual="none", out="sharded"),
    "sharded": Form(residual="sharded", out="sharded"),
    "to_sharded": Form(out="sharded", bias=True),
    "from_sharded": Form(residual="sharded", out="replicated"),
    "last_norm": Form(residual="sharded", out="none", weight="plain"),
    "gemma": Form(weight="offset", out="sharded"),
    "no_weight": Form(weight="none", out="none", bias=True),
    "fp16": Form(torch.float16, bias=True),
    "fp32": Form(torch.float32, residual="sharded", out="sharded", weight="plain"),
    "fp32_replicated": Form(torch.float32, weight="plain"),
    "fp8": Form(residual="sharded", out="sharded", weight="plain", hidden_scale=0.02),
    "fp8_replicated": Form(hidden_scale=0.02),
    "fp32_residual": Form(weight="plain", weight_dtype=torch.float32, residual_dtype=torch.float32, bias=True),
}


def accuracy(ctx: Context, transport: str, tokens: int, hidden_size: int, form: Form) -> None:
    """Error budget, equal bits on all ranks, equal bits on a second run."""
    label = f"[{tokens}, {hidden_size}]"
    problem = make_problem(ctx, tokens, hidden_size, form)
    request = problem.request(ctx)
    first, second = (subject(transport).call(ctx, request) for _ in range(2))
    expect_right(ctx, problem, first, label)
    if transport in TRANSPORTS and not TRANSPORTS[transport].repeatable:
        return
    for name, left, right in zip(("hidden", "residual"), first, second, strict=True):
        rows = slice(None) if name == "hidden" else slice(len(problem.written(ctx, left)))
        equal = torch.equal(left[rows].view(torch.uint8), right[rows].view(torch.uint8))
        ctx.expect(equal, f"{name} {label}: second run differs")


def accuracy_of_hidden_size(
    ctx: Context, transport: str, hidden_size: int, tokens: tuple[int, ...] = TOKENS, form: Form | None = None
) -> None:
    for count in tokens:
        accuracy(ctx, transport, count, hidden_size, form or Form())


def accuracy_of_form(ctx: Context, transport: str, form: Form, hidden_sizes: tuple[int, ...]) -> None:
    for hidden_size in hidden_sizes:
        accuracy_of_hidden_size(ctx, transport, hidden_size, (1, 5, 63, 1025), form)


def chain_of_sharded_residuals(ctx: Context, transport: str, hidden_size: int = 4096) -> None:
    """Three calls as three sites of a model: the residual that each leaves, of which a rank has its rows, is the next one's.

    One-shot needs all rows of the residual, and finds them in what its call before returned.
    """
    outs: tuple[ResidualOut, ...] = ("replicated", "none")
    for tokens in (1, 5, 64, 300):
        for begin, dtype, out in zip(("none", "full"), (torch.float32, BF16), outs, strict=True):
            forms = (
                Form(residual=begin, out="sharded", residual_dtype=dtype),
                Form(residual="sharded", out="sharded", residual_dtype=dtype),
                Form(residual="sharded", out=out, residual_dtype=dtype, weight="plain"),
            )
            _expect_chain(ctx, transport, tokens, hidden_size, forms)


def _expect_chain(ctx: Context, transport: str, tokens: int, hidden_size: int, forms: tuple[Form, ...]) -> None:
    problems = [make_problem(ctx, tokens, hidden_size, form, site) for site, form in enumerate(forms)]
    results: list[Results] = []
    for problem in problems:
        request = problem.request(ctx)
        if results:
            request = replace(request, residual=results[-1][1])
        results.append(subject(transport).call(ctx, request))
    want: Results | None = None
    base: Results | None = None
    for site, (problem, result) in enumerate(zip(problems, results, strict=True)):
        want = exact(ctx, problem if want is None else replace(problem, residual=want[1]))
        base = unfused(ctx, problem if base is None else replace(problem, residual=base[1]))
        expect_right(ctx, problem, result, f"[{tokens}, {hidden_size}] of site {site}", want, base)


def plain_shard_makes_one_shot_fall_back(ctx: Context) -> None:
    """Without all rows of the residual a call is done two-shot, with right results; a chain after it is served again."""
    used = subject("push_one_shot")
    problem = make_problem(ctx, 65, 4096, Form(residual="sharded", out="sharded"))
    request = problem.request(ctx)
    launches = used.algorithm.launches
    with new_memory_is_nan():
        started = used.transport.start(request)
    ctx.expect(used.algorithm.launches == launches, "one-shot served a call without all rows of the residual")
    ctx.expect(started.finish is None, f"NCCL served the call: {used.state(request).obstacle}")
    results = finished(started)
    expect_right(ctx, problem, results, "fallback")
    with new_memory_is_nan():
        after = finished(used.transport.start(replace(request, residual=results[1])))
    ctx.expect(used.algorithm.launches == launches, "one-shot took a residual that two-shot made for a whole one")
    want = exact(ctx, replace(problem, residual=exact(ctx, problem)[1]))
    base = unfused(ctx, replace(problem, residual=unfused(ctx, problem)[1]))
    expect_right(ctx, problem, after, "second fallback", want, base)
    forms = Form(out="sharded"), Form(residual="sharded", out="none")
    _expect_chain(ctx, used.name, 65, 4096, forms)


def values_that_are_not_finite(ctx: Context, transport: str, hidden_size: int = 1024) -> None:
    """NaN, infinities and negative zeros in a few elements, by rank: they come out where they must, all else is right.

    So is an ordinary call right after it, which must find nothing that it left behind.
    Negative zeros include the word that marks what has not arrived in a push (a zero and a negative one, in 16 bits).
    """
    forms = (
        Form(weight="plain"),
        Form(out="sharded", residual_dtype=torch.float32),
        Form(torch.float16, weight="plain"),
        Form(torch.float32, weight="plain"),
        Form(weight="plain", hidden_scale=100.0),  # so large that most results are zeros, of both signs
    )
    last = ctx.world_size - 1
    for form in forms:
        problem = make_problem(ctx, 9, hidden_size, form, 11)
        x, label = problem.x, f"{form.dtype}, {form.norm().hidden_dtype}, {form.norm().residual_dtype}"
        own = slice(32 * ctx.rank, 32 * ctx.rank + 32)
        for row, columns in ((0, slice(None)), (slice(1, 8), own)):
            x[row, columns] = 0.0
            x[row, columns][..., 1::2] = -0.0
        problem.residual[0] = -0.0
        x[1, 500] = float("nan") if ctx.rank == 0 else 1.0
        x[2, 501] = float("inf") if ctx.rank == last else 1.0
        x[3, 502] = float("-inf") if ctx.rank == last else float("inf")
        x[4, 503] = float("nan")
        x[5, 504] = float("-inf")
        ordinary = make_problem(ctx, 9, hidden_size, form)
        requests = [each.request(ctx) for each in (problem, ordinary)]
        (hidden, residual), after = (subject(transport).call(ctx, request) for request in requests)
        expect_right(ctx, ordinary, after, f"after them, {label}")
        expect_same_on_all_ranks(ctx, f"hidden, {label}", hidden)
        if form.out == "replicated":
            expect_same_on_all_ranks(ctx, f"residual, {label}", residual)
        want, base = exact(ctx, problem), unfused(ctx, problem)
        values, base_values = problem.dequantised(hidden), problem.dequantised(base[0])
        ctx.expect(bool(values[[1, 3, 4]].isnan().all()), f"hidden, {label}: a NaN is not in all of its row")
        _expect_like(ctx, f"hidden, {label}", values, base_values, want[0])
        rows = problem.rows(ctx)
        _expect_like(ctx, f"residual, {label}", problem.written(ctx, residual), base[1][rows], want[1][rows])


def _expect_like(ctx: Context, name: str, got: torch.Tensor, base: torch.Tensor, want: torch.Tensor) -> None:
    """NaN and infinities are those of ``want``; all else is within the budget."""
    ctx.expect(torch.equal(got.isnan(), want.isnan()), f"{name}: NaNs are not where they must be")
    infinite = want.isinf()
    same = torch.equal(got.isinf(), infinite) and torch.equal(got[infinite].double(), want[infinite])
    ctx.expect(same, f"{name}: infinities are not where they must be")
    finite = want.isfinite()
    expect_within_budget(ctx, name, *(value.masked_fill(~finite, 0.0) for value in (got, base, want)))


def new_memory_holds_nan(ctx: Context) -> None:
    """The other checks would see rows that a kernel forgot."""
    with new_memory_is_nan():
        for dtype in (BF16, torch.float32, torch.float8_e4m3fn):
            memory = torch.empty(64, device=ctx.device).new_empty((1000, 64), dtype=dtype)
            ctx.expect(bool(memory.float().isnan().all()), f"new memory of {dtype} is not full of NaNs")


def through_the_operators(ctx: Context) -> None:
    """The same kernel is behind both. Another one may add up a norm's squares in another order, so its bits may differ."""
    problem = make_problem(ctx, 63, 4096, Form())
    want = finished(get_transport("p2p").start(problem.request(ctx)))
    keep = [problem.x, problem.residual, problem.weight]
    hidden, residual = ops.start(
        *(problem.x, problem.residual, None, problem.weight),
        *(EPS, 0.0, BF16, BF16, BF16, False, "replicated", ctx.group_name, "p2p", 0),
    )
    ops.wait_(hidden, residual, keep, ctx.group_name, 0)
    ctx.expect(torch.equal(hidden, want[0]) and torch.equal(residual, want[1]), "operators differ from the transport")
    transport = get_transport("p2p")
    assert isinstance(transport, P2PTransport)
    obstacle = transport.states[ctx.group_name, ctx.device].obstacle
    ctx.expect(obstacle is None, f"fell back to NCCL: {obstacle}")


def without_peer_access_host_memory_serves(ctx: Context) -> None:
    """A group that leaves peers alone sends messages of all sizes through host memory, by all kernels of its table."""
    group = dist.new_group(range(ctx.world_size))
    name = compat.group_name(group)
    before = os.environ.get(PEER_ACCESS)
    os.environ[PEER_ACCESS] = "0"
    try:
        transport, served = P2PTransport(), set()
        for tokens in (1, 5, 16, 65, 300, 1025, 16, 1):
            for form in (Form(), Form(residual="none", out="sharded"), Form(residual="sharded", out="sharded")):
                for overlap_sms in (0, 4):
                    problem = make_problem(ctx, tokens, 4096, form)
                    request = replace(problem.request(ctx, group_name=name), overlap_sms=overlap_sms)
                    with new_memory_is_nan():
                        results = finished(transport.start(request))
                    expect_right(ctx, problem, results, f"[{tokens}, 4096] beside {overlap_sms} SMs, {form.residual}")
                    host = get_transport("host")
                    assert isinstance(host, HostTransport)
                    state = host.states[name, ctx.device]
                    ctx.expect(state.obstacle is None, f"host memory: {state.obstacle}")
                    served.add(state.selector.choose(request, state).name)
        obstacle = transport.states[name, ctx.device].obstacle
        ctx.expect(obstacle is not None and SWITCHED_OFF in obstacle, f"peers were used: {obstacle}")
        names = {entry.name for entry in ALL_ALGORITHMS if entry.transport == "host"}
        wanted = names if ctx.world_size == 2 else names - {"host_one_shot"}
        ctx.expect(served == wanted, f"served by {sorted(served)}, expected {sorted(wanted)}")
    finally:
        if before is None:
            del os.environ[PEER_ACCESS]
        else:
            os.environ[PEER_ACCESS] = before


def host_memory_without_room_in_dev_shm(ctx: Context) -> None:
    """Ranks that find no /dev/shm share files without a name: words, one-shot and two-shot give the same bits as with one."""
    problems = [make_problem(ctx, tokens, 4096, Form()) for tokens in (1, 65, 1025)]
    for name in (entry.name for entry in ALL_ALGORITHMS if entry.transport == "host"):
        with_files, without = (TRANSPORTS["host"].make(ALL_ALGORITHMS[name].make()) for _ in range(2))
        assert isinstance(without, HostTransport)
        without.memory = HostMemory(Path("/dev/shm/nowhere"))
        for problem in problems:
            request = problem.request(ctx)
            want, got = (finished(transport.start(request)) for transport in (with_files, without))
            label = f"{name}, {len(problem.x)} tokens"
            expect_right(ctx, problem, got, label)
            ctx.expect(torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]), f"{label}: other bits")
        obstacle = without.states[ctx.group_name, ctx.device].obstacle
        ctx.expect(obstacle is None, f"{name}: {obstacle}")
        torch.cuda.synchronize()
        dist.barrier()  # no rank frees its buffers while another still writes to them


def empty_message(ctx: Context) -> None:
    outs: tuple[ResidualOut, ...] = ("none", "sharded", "replicated")
    for name in ALGORITHMS:
        for out in outs:
            request = make_problem(ctx, 0, 4096, Form(out=out)).request(ctx)
            hidden, residual = finished(subject(name).transport.start(request))
            ctx.expect(hidden.shape == (0, 4096) and residual.shape == (0, 4096), f"{name}, {out}: {hidden.shape}")


def unsupported_messages_are_refused(ctx: Context) -> None:
    for hidden_size, dtype in ((4096, torch.float64), (4097, BF16), (40000, BF16)):
        request = make_problem(ctx, 4, hidden_size, Form(dtype)).request(ctx)
        try:
            subject("p2p").transport.start(request)
            ctx.expect(False, f"{hidden_size} x {dtype} was accepted")
        except RuntimeError as error:
            ctx.expect("supported" in str(error), f"{hidden_size} x {dtype}: {error}")
