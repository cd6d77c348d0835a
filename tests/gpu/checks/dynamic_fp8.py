"""Checks of float8 results whose scales are made of them: against their definition, on all ranks alike, in all ways to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from gpu.checks.overlap import make_gemms
from gpu.checks.stress import capture, count_differences, new_counter
from gpu.checks.transports import subject
from gpu.checks.wires import sum_of_owners
from tw_compile.harness.problems import (
    ERROR_RATIO,
    Context,
    Form,
    Problem,
    Results,
    exact,
    expect_same_on_all_ranks,
    expect_within_budget,
    make_problem,
    unfused,
)
from tw_compile.kernels.algorithms import ALGORITHMS as REGISTRY
from tw_compile.kernels.collective.reference import add_rms_norm
from tw_compile.kernels.collective.spec import Request, scales_of

MAKING_SCALES = [
    entry for entry in REGISTRY if entry.checked and (entry.scales or any(line.scales for line in entry.benchmarked))
]
"""Forced ways make scales, too. They are not tried where nobody asks for them."""
KERNELS = tuple(entry.checked[0].name for entry in MAKING_SCALES)
WHOLE_ONLY = frozenset(entry.checked[0].name for entry in MAKING_SCALES if entry.needs_whole_residual)
"""They serve no call with a shard of the residual that was not theirs."""
HIDDEN_SIZES = (1024, 4096, 8192)
TOKENS = (1, 2, 3, 33, 127, 1025)
FORMS = {
    "token": Form(bias=True, scales="token"),
    "group": Form(bias=True, scales="group"),
    "token_sharded": Form(residual="sharded", out="sharded", residual_dtype=torch.float32, scales="token"),
    "group_sharded": Form(residual="sharded", out="sharded", residual_dtype=torch.float32, scales="group"),
    "token_fp16": Form(torch.float16, residual="none", out="none", weight="plain", scales="token"),
    "group_fp32": Form(torch.float32, weight="plain", scales="group"),
}
_SCALE_ERROR = 4e-6
"""Of a scale, which the root of a sum over the row goes into, whose order is another."""
_MOST_OTHER_CODES = 0.01
"""Of a call's elements: those so near to the middle of two codes that the same makes others of them."""
_HALF_STEP = 16
"""Of the largest codes, 256 to 448, which are 32 apart."""
_IN_TURN = Form(bias=True), Form(hidden_scale=0.02), FORMS["token"], FORMS["group"]


def forms_of(kernel: str) -> list[str]:
    return [name for name, form in FORMS.items() if kernel not in WHOLE_ONLY or form.residual != "sharded"]


def dynamic_fp8_form(ctx: Context, kernel: str, form: Form) -> None:
    """Codes and scales, the new residual, equal bits on all ranks and of a second run."""
    for hidden_size in HIDDEN_SIZES:
        for tokens in TOKENS:
            problem = make_problem(ctx, tokens, hidden_size, form)
            _with_small_rows(ctx, problem)
            request = problem.request(ctx)
            first, second = (subject(kernel).call(ctx, request) for _ in range(2))
            label = f"[{tokens}, {hidden_size}]"
            _expect_right(ctx, problem, request, first, label)
            left, right = (_whole(results, problem) for results in (first, second))
            same = torch.equal(left[0], right[0])
            same = same and torch.equal(*(problem.written(ctx, each[1]) for each in (left, right)))
            ctx.expect(same, f"{label}: second run differs")


def dynamic_fp8_in_turn(ctx: Context, kernel: str) -> None:
    """Calls with scales made, with one given and with none follow each other on one slot, in sizes of all kinds."""
    for turn in range(ctx.calls(200)):
        form, tokens = _IN_TURN[turn % len(_IN_TURN)], TOKENS[turn * 5 % len(TOKENS)]
        problem = make_problem(ctx, tokens, 4096, form, turn)
        request = problem.request(ctx)
        results = subject(kernel).call(ctx, request)
        if form.scales:
            _expect_right(ctx, problem, request, results, f"[{tokens}, 4096] in turn {turn}")
        expect_same_on_all_ranks(ctx, f"hidden of turn {turn}", results[0])


def dynamic_fp8_captured(ctx: Context, kernel: str) -> None:
    """Replays with other inputs equal eager calls bit by bit."""
    used, wrong = subject(kernel), new_counter(ctx)
    for form in (FORMS["token"], FORMS["group"]):
        problems = [make_problem(ctx, 65, 4096, form, seed) for seed in range(3)]
        want = [_whole(used.call(ctx, problem.request(ctx)), problem) for problem in problems]
        static = make_problem(ctx, 65, 4096, form, 5)
        request = static.request(ctx)
        used.call(ctx, request)
        graph, captured = capture(lambda request=request: [used.start(ctx, request) for _ in range(3)])  # type: ignore[misc]
        for iteration in range(12):
            problem, wanted = problems[iteration % 3], want[iteration % 3]
            for name in ("x", "residual", "bias", "weight"):
                getattr(static, name).copy_(getattr(problem, name))
            graph.replay()
            for results in captured:
                count_differences(wrong, _whole(results, static), wanted)
                for written in (*results, scales_of(results[0], _columns(static))):  # what the next replay has to write
                    written.view(torch.uint8).fill_(0xFF)
    ctx.expect(int(wrong) == 0, f"{int(wrong)} wrong elements")


def dynamic_fp8_beside(ctx: Context, kernel: str) -> None:
    """Through the operators, and beside matmuls on the current stream: the same bits as alone."""
    used, gemms, wrong = subject(kernel), make_gemms(ctx), new_counter(ctx)
    bf16 = ("token", "group", "token_sharded", "group_sharded")
    for form in (FORMS[name] for name in forms_of(kernel) if name in bf16):
        for tokens in (1, 33, 1025):
            problem = make_problem(ctx, tokens, 4096, form, 3)
            request = problem.request(ctx)
            alone = _whole(used.call(ctx, request), problem)
            for sms in (2, 8):
                results = _whole(used.call(ctx, replace(request, overlap_sms=sms), beside=gemms), problem)
                for got, want in ((results[0], alone[0]), [problem.written(ctx, each[1]) for each in (results, alone)]):
                    wrong.add_((got.view(torch.uint8) != want.view(torch.uint8)).sum())
    ctx.expect(int(wrong) == 0, f"{int(wrong)} bytes differ from calls alone")
    ctx.expect(int(gemms.wrong) == 0, f"{int(gemms.wrong)} wrong elements of matmuls beside calls")


def dynamic_fp8_not_finite(ctx: Context, kernel: str) -> None:
    """NaN and infinities stay in their rows; other rows, and the next call, are right."""
    for form in (Form(residual="none", scales="token"), Form(residual="none", scales="group")):
        problem = make_problem(ctx, 9, 2048, form, 4)
        if ctx.rank == 0:
            problem.x[1, 700], problem.x[4, 5], problem.x[7, 2047] = float("nan"), float("inf"), -float("inf")
        results = subject(kernel).call(ctx, problem.request(ctx))
        values = problem.dequantised(results[0])
        expect_same_on_all_ranks(ctx, "codes", results[0])
        bad, good = [1, 4, 7], [0, 2, 3, 5, 6, 8]
        ctx.expect(bool(values[bad].isnan().any(1).all()), "what is not finite became finite")
        ctx.expect(bool(values[good].isfinite().all()), "it has spread to other rows")
        after = make_problem(ctx, 9, 2048, form, 5)
        request = after.request(ctx)
        _expect_right(ctx, after, request, subject(kernel).call(ctx, request), "after them")


def nccl_dynamic_fp8_forms(ctx: Context) -> None:
    """The same by NCCL, which adds up in the message's dtype, and the kernel behind it: within the error budget."""
    for form in FORMS.values():
        for tokens in TOKENS:
            problem = make_problem(ctx, tokens, 4096, form)
            hidden, residual = subject("nccl").call(ctx, problem.request(ctx))
            label = f"[{tokens}, 4096], {form.scales}, {form.residual} to {form.out}"
            expect_same_on_all_ranks(ctx, f"codes {label}", hidden)
            _expect_near(ctx, problem, (hidden, residual), label)
            expect_same_on_all_ranks(ctx, f"scales {label}", scales_of(hidden, _columns(problem)))
            largest = hidden.float().unflatten(-1, (-1, _columns(problem))).abs().amax(-1)
            ctx.expect(bool((largest == 448).all()), f"codes {label}: the largest are {float(largest.min())}")


OF_EVERY_KERNEL: tuple[Callable[..., None], ...] = (
    dynamic_fp8_in_turn,
    dynamic_fp8_captured,
    dynamic_fp8_not_finite,
)


def _with_small_rows(ctx: Context, problem: Problem) -> None:
    """Rows of very different sizes, one of which is all zeros."""
    sizes = 10.0 ** -(torch.arange(len(problem.x), device=ctx.device) % 6).unsqueeze(-1)
    problem.x.copy_(problem.x.float() * sizes)
    problem.residual.copy_(problem.residual.float() * sizes)
    problem.x[-1], problem.residual[-1] = 0, 0


def _columns(problem: Problem) -> int:
    return problem.form.norm(problem.x.shape[1]).scale_columns


def _whole(results: Results, problem: Problem) -> Results:
    """Copies, with the scales as further columns of the codes."""
    hidden, residual = results
    scales = scales_of(hidden, _columns(problem)).contiguous()
    return torch.cat((hidden.view(torch.uint8), scales.view(torch.uint8)), 1), residual.clone()


def _expect_right(ctx: Context, problem: Problem, request: Request, results: Results, label: str) -> None:
    hidden, _ = results
    norm, columns = request.norm, request.norm.scale_columns
    scales = scales_of(hidden, columns)
    expect_same_on_all_ranks(ctx, f"codes {label}", hidden)
    expect_same_on_all_ranks(ctx, f"scales {label}", scales)
    h = sum_of_owners(ctx, problem, request)
    # The values that the scales are made of, in float32.
    plain = replace(norm, hidden_dtype=torch.float32, scale_columns=0)
    values, _ = add_rms_norm(h, None, None, request.weight, plain)
    largest = values.unflatten(-1, (-1, columns)).abs().amax(-1)
    want = (largest.double() / 448).clamp_min(float(torch.tensor(norm.min_scale)))
    apart = float(((scales.double() - want).abs() / want).max())
    # What is rounded before the weight may be rounded to the neighbour.
    most = _SCALE_ERROR if norm.cast_before_weight is None else torch.finfo(norm.cast_before_weight).eps
    ctx.expect(apart <= most, f"scales {label}: {apart:.1e} from those of the rows")
    exactly = want == float(torch.tensor(norm.min_scale))
    ctx.expect(bool((scales[exactly] == want[exactly].float()).all()), f"scales {label}: the least is another")
    by = scales.repeat_interleave(columns, 1)
    codes = (values / by).clamp(-448, 448).to(hidden.dtype)
    others = float((hidden.float() != codes.float()).float().mean())
    ctx.expect(others <= _MOST_OTHER_CODES, f"codes {label}: {others:.1%} differ")
    _expect_near(ctx, problem, results, label)


def _expect_near(ctx: Context, problem: Problem, results: Results, label: str) -> None:
    """Within the error budget as a whole, and each element within half a step of its codes.

    The worst element's error is half a step in the unfused way, too, but of which one is chance.
    """
    hidden, residual = results
    columns = _columns(problem)
    scales = scales_of(hidden, columns)
    ctx.expect(bool(scales.isfinite().all()), f"scales {label}: not finite")
    (want, want_h), (base, base_h) = exact(ctx, problem), unfused(ctx, problem)
    error, base_error = (problem.dequantised(each).double() - want for each in (hidden, base))
    rms, base_rms = (float(each.square().mean().sqrt()) for each in (error, base_error))
    slack = float(torch.finfo(torch.float32).eps * want.square().mean().sqrt())
    ctx.expect(rms <= ERROR_RATIO * base_rms + slack, f"hidden {label}: rms error {rms:.3e}, unfused {base_rms:.3e}")
    rounded = torch.finfo(torch.bfloat16).eps * want.abs().unflatten(-1, (-1, columns)).amax(-1)
    most = (_HALF_STEP * scales.double() + 2 * rounded).repeat_interleave(columns, 1)
    ctx.expect(bool((error.abs() <= most).all()), f"hidden {label}: further than half a step from the exact values")
    if problem.form.out != "none":
        rows = problem.rows(ctx)
        expect_within_budget(ctx, f"residual {label}", problem.written(ctx, residual), base_h[rows], want_h[rows])
