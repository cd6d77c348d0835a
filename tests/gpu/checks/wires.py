"""Checks of calls whose rows travel in codes: against the definition of the codes, on all ranks alike, in all ways to run."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from gpu.checks.overlap import make_gemms
from gpu.checks.stress import capture, count_differences, new_counter
from gpu.checks.transports import ALGORITHMS, TRANSPORT_OF, Counting, finished, subject
from tw_compile.environment import SPIN_LIMIT
from tw_compile.harness.problems import Context, Form, Problem, Results, expect_same_on_all_ranks, make_problem
from tw_compile.kernels.algorithms import ALGORITHMS as REGISTRY
from tw_compile.kernels.collective.codes import round_trip
from tw_compile.kernels.collective.reference import add_rms_norm
from tw_compile.kernels.collective.spec import FP8, Request, row_range
from tw_compile.kernels.collective.transports import TRANSPORTS
from tw_compile.kernels.collective.wires import EXACT, WIRES, Codes

KERNELS = tuple(entry.checked[0].name for entry in REGISTRY if entry.wires)
IN_CODES = tuple(name for name in WIRES if name != EXACT)
HIDDEN_SIZES = (2048, 4096, 8192)
TOKENS = (1, 2, 3, 33, 127, 1025)
_FORMS = (
    Form(residual="sharded", out="sharded", residual_dtype=torch.float32),
    Form(bias=True),
    Form(torch.float16, residual="none", out="sharded", residual_dtype=torch.float32),
    Form(torch.float16, weight="plain"),
    Form(hidden_scale=0.02),
)
_MOST_OTHER_ELEMENTS = 0.05
"""Of normalised rows: where the sum over the row rounds differently, an element may have another code, or its group another
scale."""


def wire_forms(ctx: Context, kernel: str, wire: str, hidden_size: int) -> None:
    """The new residual is exact to the bit, the normalised row within half a code; a second run has the same bits."""
    for tokens in TOKENS:
        for form in _FORMS:
            problem = make_problem(ctx, tokens, hidden_size, form)
            request = replace(problem.request(ctx), wire=wire)
            first, second = (subject(kernel).call(ctx, request) for _ in range(2))
            label = f"[{tokens}, {hidden_size}], {form.dtype}, {form.residual} to {form.out}"
            _expect_right(ctx, problem, request, first, label)
            same = _same(first[0], second[0]) and _same(*(problem.written(ctx, each[1]) for each in (first, second)))
            ctx.expect(same, f"{label}: second run differs")


def wire_captured(ctx: Context, kernel: str, wire: str) -> None:
    """Replays with other inputs, and calls of other sizes and with exact rows between them, equal eager calls bit by bit."""
    used, wrong = subject(kernel), new_counter(ctx)
    problems = [make_problem(ctx, 65, 4096, Form(), seed) for seed in range(3)]
    want = [used.call(ctx, replace(problem.request(ctx), wire=wire)) for problem in problems]
    static = make_problem(ctx, 65, 4096, Form(), 5)
    request = replace(static.request(ctx), wire=wire)
    used.call(ctx, request)
    graph, captured = capture(lambda: [used.start(ctx, request) for _ in range(3)])
    for iteration in range(12):
        problem, wanted = problems[iteration % 3], want[iteration % 3]
        for to, values in zip(
            (static.x, static.residual, static.weight), (problem.x, problem.residual, problem.weight), strict=True
        ):
            to.copy_(values)
        graph.replay()
        for results in captured:
            count_differences(wrong, results, wanted)
        other = make_problem(ctx, 1 + 7 * iteration, 4096, Form(), 9).request(ctx)
        used.call(ctx, other if iteration % 2 else replace(other, wire=wire))
    ctx.expect(int(wrong) == 0, f"{int(wrong)} wrong elements")


def wire_beside(ctx: Context, kernel: str, wire: str) -> None:
    """Beside matmuls on the current stream: the same bits as alone, and the matmuls are right."""
    used, gemms, wrong = subject(kernel), make_gemms(ctx), new_counter(ctx)
    for form in (Form(), Form(residual="sharded", out="sharded"), Form(torch.float16, bias=True)):
        for tokens in (1, 33, 1025):
            problem = make_problem(ctx, tokens, 4096, form, 3)
            request = replace(problem.request(ctx), wire=wire)
            alone = used.call(ctx, request)
            for sms in (2, 8):
                results = used.call(ctx, replace(request, overlap_sms=sms), beside=gemms)
                for got, want in ((results[0], alone[0]), [problem.written(ctx, each[1]) for each in (results, alone)]):
                    wrong.add_((got.view(torch.uint8) != want.view(torch.uint8)).sum())
    ctx.expect(int(wrong) == 0, f"{int(wrong)} bytes differ from calls alone")
    ctx.expect(int(gemms.wrong) == 0, f"{int(gemms.wrong)} wrong elements of matmuls beside calls")


def wire_not_finite(ctx: Context, kernel: str, wire: str) -> None:
    """NaN and infinities make all of their row's groups NaN, or the row; other rows, and the next call, are right."""
    problem = make_problem(ctx, 9, 2048, Form(residual="none"), 4)
    if ctx.rank == 0:
        problem.x[1, 700], problem.x[4, 5], problem.x[7, 2047] = float("nan"), float("inf"), -float("inf")
    problem.x[2], problem.x[3] = 0.0, -0.0
    hidden, residual = subject(kernel).call(ctx, replace(problem.request(ctx), wire=wire))
    expect_same_on_all_ranks(ctx, "hidden", hidden)
    expect_same_on_all_ranks(ctx, "residual", residual)
    bad, good = [1, 4, 7], [0, 2, 3, 5, 6, 8]
    ctx.expect(bool(hidden[bad].isnan().any(1).all()), "what is not finite became finite")
    ctx.expect(bool(hidden[good].isfinite().all() and residual[good].isfinite().all()), "it has spread to other rows")
    after = make_problem(ctx, 9, 2048, Form(residual="none"), 5)
    request = replace(after.request(ctx), wire=wire)
    _expect_right(ctx, after, request, subject(kernel).call(ctx, request), "after them")


def wire_of_every_width(ctx: Context, kernel: str, wire: str) -> None:
    """Groups of all widths that bfloat16 has from 2^-20 to 2^20: the kernel divides in its own way, to the same codes."""
    width = torch.arange(107 << 7, 147 << 7, device=ctx.device, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    group = max(codes.group for codes in (WIRES[wire].sums, WIRES[wire].results) if codes is not None)
    rows = width.numel() * group // 4096
    problem = make_problem(ctx, rows, 4096, Form(residual="none", out="sharded", residual_dtype=torch.float32), 6)
    shares = torch.rand(width.numel(), group, device=ctx.device, generator=ctx.generator(6, ctx.rank))
    shares[:, 0], shares[:, 1] = 0.0, 1.0
    problem.x.copy_((shares * width.float().unsqueeze(1)).reshape(rows, 4096))
    request = replace(problem.request(ctx), wire=wire)
    _, residual = subject(kernel).call(ctx, request)
    got = problem.written(ctx, residual)
    wrong = int((got != sum_of_owners(ctx, problem, request)[problem.rows(ctx)]).sum())
    ctx.expect(wrong == 0, f"{wrong} elements of the sum are others")


def wire_lost_peer(ctx: Context, kernel: str, wire: str) -> None:
    """With TW_COMPILE_SPIN_LIMIT, a rank that does not launch is named by the others instead of hanging them."""
    algorithm = Counting(ALGORITHMS[kernel]())
    os.environ[SPIN_LIMIT] = "200000"
    try:
        lost = TRANSPORTS[TRANSPORT_OF[kernel]].make(algorithm)
    finally:
        del os.environ[SPIN_LIMIT]
    problem = make_problem(ctx, 64, 1024, Form())
    # Ranks compile for different times and may give up on each other: on a slot that is not used again.
    lost.start(replace(problem.request(ctx, slot=1), wire=wire))
    torch.cuda.synchronize()
    dist.barrier()
    request = replace(problem.request(ctx), wire=wire)
    _expect_right(ctx, problem, request, finished(lost.start(request)), "with all ranks")
    ctx.expect(algorithm.launches == 2, f"{kernel} did not serve the calls")
    lost.states[ctx.group_name, ctx.device].slots[1].status.zero_()
    lost.check()
    dist.barrier()
    if ctx.rank != 0:
        lost.start(request)
        try:
            lost.check()
            message = "nothing was reported"
        except RuntimeError as error:
            message = str(error)
        ctx.expect("waiting for rank 0" in message, message)
    dist.barrier()  # no rank frees its buffers while another still writes to them


OF_EVERY_WIRE: tuple[Callable[..., None], ...] = (
    wire_captured,
    wire_beside,
    wire_not_finite,
    wire_of_every_width,
    wire_lost_peer,
)


def _expect_right(ctx: Context, problem: Problem, request: Request, results: Results, label: str) -> None:
    hidden, residual = results
    h, norm, wire = sum_of_owners(ctx, problem, request), request.norm, WIRES[request.wire]
    expect_same_on_all_ranks(ctx, f"hidden {label}", hidden)
    if request.residual_out != "none":
        got, want = problem.written(ctx, residual), h[problem.rows(ctx)].to(norm.residual_dtype)
        ctx.expect(bool((got == want).all()), f"residual {label}: {int((got != want).sum())} other elements")
        if request.residual_out == "replicated":
            expect_same_on_all_ranks(ctx, f"residual {label}", residual)
    arguments = (h, None, None, request.weight, norm, request.hidden_scale)
    eager, _ = add_rms_norm(*arguments)
    codes = None if norm.hidden_dtype == FP8 else wire.results
    wanted = round_trip(eager, codes).to(norm.hidden_dtype)
    others = float((hidden.float() != wanted.float()).float().mean())
    ctx.expect(others <= _MOST_OTHER_ELEMENTS, f"hidden {label}: {others:.1%} of the elements differ")
    if codes is None:
        return
    exact, _ = add_rms_norm(
        h.double(), None, None, request.weight, replace(norm, hidden_dtype=torch.float64, cast_before_weight=None)
    )
    error = (hidden.double() - exact).abs() - _most_error(exact, codes, torch.finfo(norm.hidden_dtype).eps)
    ctx.expect(
        bool((error <= 0).all()), f"hidden {label}: further than half a code from the exact row by {error.max()}"
    )


def _most_error(exact: torch.Tensor, codes: Codes, eps: float) -> torch.Tensor:
    """Half a step of the codes, whose scale and offset are of bfloat16, and the roundings of the row before and after."""
    groups = exact.reshape(len(exact), -1, codes.group)
    low, high, largest = groups.amin(-1), groups.amax(-1), groups.abs().amax(-1)
    step = (high - low + (2**-7 + 4 * eps) * largest) / codes.levels * (1 + 2**-7)
    return (0.5 * step + 2.5 * eps * largest).repeat_interleave(codes.group, 1)


def sum_of_owners(ctx: Context, problem: Problem, request: Request) -> torch.Tensor:
    """``h [tokens, hidden]`` in float32, as owners add it: their own part is exact, those of others were in codes."""
    x = problem.x.float()
    parts = x.new_zeros(ctx.world_size, *x.shape)
    parts[ctx.rank] = x
    finite = bool(x.isfinite().all())
    assert finite, "sums of zeros and what is not finite are not what was there"
    dist.all_reduce(parts)
    sums = WIRES[request.wire].sums
    coded = [round_trip(part.to(problem.x.dtype), sums).float() for part in parts]
    h = torch.zeros_like(x)
    for owner in range(ctx.world_size):
        rows = slice(*row_range(len(x), ctx.world_size, owner))
        for source in range(ctx.world_size):
            h[rows] += (parts if source == owner else coded)[source][rows]
    if request.bias is not None:
        h += request.bias.float()
    if problem.form.residual != "none":
        h += problem.residual.float()
    return h


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
