"""Problems for checks on GPUs: inputs that differ by rank, the unfused computation, and the error budget that it sets.

The error against float64 (root mean square, overall and in the worst row, and maximum) may be at most 1.1 times the error of
the unfused computation. The unfused computation is the process group's all_reduce in the message's dtype, then residual add
and norm as Hugging Face models do them.

The group is NCCL's, or gloo's where ranks share GPUs. Gloo's all_reduce is a ring, too: each hop rounds the sum to the
message's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.distributed as dist

from tw_compile import compat
from tw_compile.kernels.collective.codes import round_trip
from tw_compile.kernels.collective.fields import LAYER_NORM, RMS_NORM
from tw_compile.kernels.collective.reference import quantised as by_made_scales
from tw_compile.kernels.collective.spec import (
    FP8,
    FP8_MAX,
    NormSpec,
    Request,
    ResidualOut,
    row_range,
    rows_per_rank,
    scales_of,
)
from tw_compile.kernels.collective.wires import Wire
from tw_compile.kernels.epilogues import EPILOGUES
from tw_compile.kernels.registry import load

EPS = 1e-6
ERROR_RATIO = 1.1
BF16 = torch.bfloat16
LEAST_SCALE = 1 / (FP8_MAX * 512)
LEAST_AMAX = 1e-10
SCALE_GROUP = 128

Scales = Literal["", "token", "group"]
"""What has its own float8 scale, computed from the values: each token, or each group of 128 columns; empty: nothing."""


@dataclass
class Context:
    """What a check gets.

    ``expect`` records a failure and goes on. If it raised, the other ranks would wait in a collective. ``counts`` go into the
    report of the run, beside the outcome. ``shortened_by``: see :meth:`calls`.
    """

    rank: int
    world_size: int
    device: torch.device
    group_name: str
    failures: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    shortened_by: int = 1

    def expect(self, condition: bool, message: str) -> None:
        if not condition and message not in self.failures:
            self.failures.append(message)

    def calls(self, count: int) -> int:
        """The number of calls to make in a check that should make very many: ``count`` divided by ``shortened_by``."""
        return count // self.shortened_by

    def generator(self, *seed: int) -> torch.Generator:
        """A generator that gives all ranks the same random numbers for equal seeds."""
        return torch.Generator(self.device).manual_seed(sum(part * 7919**i for i, part in enumerate(seed)) % 2**31)


@dataclass(frozen=True)
class Form:
    """A form of the operator. ``weight``: none, plain (float32 product), offset (Gemma), cast (Hugging Face Llama)."""

    dtype: torch.dtype = BF16
    residual: str = "full"
    out: ResidualOut = "replicated"
    bias: bool = False
    weight: str = "cast"
    weight_dtype: torch.dtype | None = None
    residual_dtype: torch.dtype | None = None
    hidden_scale: float | None = None  # float8 output
    scales: Scales = ""
    epilogue: str = RMS_NORM
    norm_bias: bool = False

    def norm(self, hidden_size: int | None = None) -> NormSpec:
        """The norm that the operator is asked for. ``hidden_size`` is required if scales are computed from the results."""
        cast = self.dtype if self.weight == "cast" else None
        offset = 1.0 if self.weight == "offset" else 0.0
        hidden_dtype = FP8 if self.quantises else self.dtype
        kept = self.residual_dtype or self.dtype
        norm = NormSpec(EPS, offset, cast, hidden_dtype, kept, epilogue=self.epilogue)
        if not self.scales:
            return norm
        assert hidden_size is not None, "scales of tokens are made of all columns"
        return made_scales(norm, self.scales, hidden_size)

    @property
    def quantises(self) -> bool:
        """Whether results are float8."""
        return self.hidden_scale is not None or bool(self.scales)


def made_scales(norm: NormSpec, scales: Scales, hidden_size: int) -> NormSpec:
    """``norm`` with float8 results and scales computed from these results, as vLLM does per token or group of 128 columns."""
    columns, least = (hidden_size, LEAST_SCALE) if scales == "token" else (SCALE_GROUP, LEAST_AMAX / FP8_MAX)
    return replace(norm, hidden_dtype=FP8, scale_columns=columns, min_scale=least, divides_by_scale=True)


@dataclass
class Problem:
    """Inputs of one call on this rank. ``residual`` has all rows; :meth:`request` takes this rank's rows for sharded forms."""

    form: Form
    x: torch.Tensor
    residual: torch.Tensor
    bias: torch.Tensor
    weight: torch.Tensor
    norm_bias: torch.Tensor

    def request(self, ctx: Context, group_name: str | None = None, slot: int = 0) -> Request:
        form, residual = self.form, None
        name = group_name or ctx.group_name
        if form.residual == "full":
            residual = self.residual
        elif form.residual == "sharded":
            group = compat.resolve_process_group(name)
            tokens, hidden_size = self.x.shape
            begin, end = row_range(tokens, group.size(), group.rank())
            residual = self.residual.new_full((rows_per_rank(tokens, group.size()), hidden_size), float("nan"))
            residual[: end - begin] = self.residual[begin:end]
        return Request(
            self.x,
            residual,
            self.bias if form.bias else None,
            None if form.weight == "none" else self.weight,
            form.norm(self.x.shape[1]),
            form.residual == "sharded",
            form.out,
            name,
            slot,
            None if form.hidden_scale is None else self.x.new_tensor([form.hidden_scale], dtype=torch.float32),
            norm_bias=self.norm_bias if form.norm_bias else None,
        )

    def rows(self, ctx: Context) -> slice:
        """Which rows of ``h`` ``residual_out`` holds on this rank."""
        tokens = len(self.x)
        shard = row_range(tokens, ctx.world_size, ctx.rank)
        return slice(*{"none": (0, 0), "sharded": shard, "replicated": (0, tokens)}[self.form.out])

    def written(self, ctx: Context, residual: torch.Tensor) -> torch.Tensor:
        """``residual_out`` without the rows of a shard past the last token, which nobody writes."""
        rows = self.rows(ctx)
        return residual[: rows.stop - rows.start]

    def dequantised(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` times its scales, in float32; unchanged where it has none."""
        return dequantised(hidden, self.form)


def make_problem(ctx: Context, tokens: int, hidden_size: int, form: Form, seed: int = 0) -> Problem:
    """Partial sums that differ by rank (also in scale); everything else equal on all ranks."""
    shared = ctx.generator(tokens, hidden_size, seed)
    own = ctx.generator(tokens, hidden_size, seed, ctx.rank + 1)
    weight_dtype, residual_dtype = form.weight_dtype or form.dtype, form.residual_dtype or form.dtype

    def normal(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=ctx.device).to(dtype)

    return Problem(
        form,
        normal(own, form.dtype, tokens, hidden_size) * (0.5 + ctx.rank),
        normal(shared, residual_dtype, tokens, hidden_size),
        normal(shared, form.dtype, hidden_size),
        normal(shared, weight_dtype, hidden_size),
        normal(shared, weight_dtype, hidden_size),
    )


def exact(ctx: Context, problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """``(hidden, h)`` in float64."""
    form, total = problem.form, problem.x.double()
    dist.all_reduce(total)
    norm = NormSpec(
        EPS, problem.request(ctx).norm.weight_offset, None, torch.float64, torch.float64, epilogue=form.epilogue
    )
    return _add_norm(ctx, problem, total, norm)


def _add_norm(ctx: Context, problem: Problem, total: torch.Tensor, norm: NormSpec) -> Results:
    """``(hidden, h)`` of the sums ``total [tokens, hidden]`` by the epilogue's reference."""
    request = problem.request(ctx)
    residual = problem.residual if problem.form.residual != "none" else None
    operands = (total, residual, request.bias, request.weight, norm, None, request.norm_bias)
    results: Results = load(EPILOGUES[norm.epilogue].reference)(*operands)
    return results


def unfused(ctx: Context, problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """``(hidden, h)`` by all_reduce and eager operators, each of which rounds to its dtype; float8 is quantised last."""
    hidden, h = _unfused(ctx, problem)
    return quantised(hidden, problem.form), h


def dequantised(hidden: torch.Tensor, form: Form) -> torch.Tensor:
    """``hidden`` of a call of that form times its scales, in float32; unchanged where it has none."""
    if form.scales:
        columns = form.norm(hidden.shape[1]).scale_columns
        return hidden.float() * scales_of(hidden, columns).repeat_interleave(columns, 1)
    return hidden if form.hidden_scale is None else hidden.float() * form.hidden_scale


def quantised(hidden: torch.Tensor, form: Form) -> torch.Tensor:
    """``hidden`` as saturated float8, as separate quantisation operators compute it; unchanged if ``form`` has no float8."""
    if form.scales:
        return by_made_scales(hidden, form.norm(hidden.shape[1]))
    if form.hidden_scale is None:
        return hidden
    scale = form.hidden_scale
    return (
        (hidden.float() * hidden.new_tensor(scale, dtype=torch.float32).reciprocal()).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    )


def of_exact(want: torch.Tensor, form: Form) -> torch.Tensor | None:
    """What exact values ``want [tokens, hidden]`` are worth after they were float8; None if ``form`` has no float8."""
    return dequantised(quantised(want.float(), form), form) if form.quantises else None


def _unfused(ctx: Context, problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    form, h = problem.form, problem.x.clone()
    dist.all_reduce(h)
    request = problem.request(ctx)
    norm = request.norm
    if request.bias is not None:
        h = h + request.bias
    if form.residual != "none":
        h = (problem.residual + h).to(norm.residual_dtype)
    y = h.float()
    if form.epilogue == LAYER_NORM:
        y = y - y.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)
    if request.weight is not None and form.weight == "cast":
        y = (request.weight * y.to(form.dtype)).to(form.dtype)
    elif request.weight is not None:
        y = y * (norm.weight_offset + request.weight.float())
    if request.norm_bias is not None:
        y = y + request.norm_bias
    return y.to(form.dtype), h


def in_codes(ctx: Context, problem: Problem, wire: Wire) -> Results:
    """``(hidden, h)`` as ranks get them by ``wire``, in torch; for results that are not float8.

    The owner of a row adds its own partial sum exactly, not in codes. The sums are float32.
    """
    own = slice(*row_range(len(problem.x), ctx.world_size, ctx.rank))
    total = round_trip(problem.x, wire.sums).to(torch.float32, copy=True)
    total[own] = problem.x[own].float()
    dist.all_reduce(total)
    hidden, h = _add_norm(ctx, problem, total, problem.form.norm())
    return round_trip(hidden, wire.results).to(hidden.dtype), h


Results = tuple[torch.Tensor, torch.Tensor]
"""``(hidden, residual_out)``, or for all rows ``(hidden, h)``."""


def expect_right(
    ctx: Context,
    problem: Problem,
    results: Results,
    label: str,
    want: Results | None = None,
    base: Results | None = None,
) -> None:
    """Expect ``results`` of a call to be within the error budget, and to have equal bits on all ranks.

    ``want`` and ``base`` are :func:`exact` and :func:`unfused`, which are computed where they are not given.
    """
    (hidden, residual), form = results, problem.form
    want_hidden, want_h = want or exact(ctx, problem)
    base_hidden, base_h = base or unfused(ctx, problem)
    expect_within_budget(
        ctx,
        f"hidden {label}",
        problem.dequantised(hidden),
        problem.dequantised(base_hidden),
        want_hidden,
        at_best=of_exact(want_hidden, form),
        ulps=ulps_of_norm(hidden.dtype),
    )
    expect_same_on_all_ranks(ctx, f"hidden {label}", hidden)
    if form.out == "none":
        ctx.expect(residual.shape == (0, hidden.shape[1]), f"residual {label}: {tuple(residual.shape)}")
        return
    rows = problem.rows(ctx)
    expect_within_budget(ctx, f"residual {label}", problem.written(ctx, residual), base_h[rows], want_h[rows])
    if form.out == "replicated":
        expect_same_on_all_ranks(ctx, f"residual {label}", residual)


def ulps_of_norm(dtype: torch.dtype) -> int:
    """By how many ulps the worst element of a norm in ``dtype`` may be off, beyond the unfused error.

    In float32 all steps round to the result's own type, and ``rsqrtf`` alone may be off by 2. By chance the unfused error is
    smaller than that.
    """
    return 2 if dtype == torch.float32 else 1


def expect_within_budget(
    ctx: Context,
    name: str,
    got: torch.Tensor,
    base: torch.Tensor,
    want: torch.Tensor,
    *,
    budget: str = "unfused",
    at_best: torch.Tensor | None = None,
    ulps: int = 1,
) -> None:
    """Expect the error of ``got`` against ``want`` (float64) to be at most ``ERROR_RATIO`` times that of ``base``.

    This holds for the root mean square overall and of the worst row, and for the worst element. There is a slack of 4 float32
    ulps for the root mean squares, and of ``ulps`` ulps of the result's dtype for the element. ``budget`` is what the message
    calls ``base``.

    ``at_best``: float8 values of ``want`` itself. The worst element is one of few that lie in the middle between two codes. By
    chance ``base`` may have a smaller error there than exact values have as float8. So the element is allowed either error.
    """
    if want.numel() == 0:
        return
    ctx.expect(bool(got.isfinite().all()), f"{name}: not finite")
    rows, base_rows = ((value.double() - want).square().mean(-1).sqrt() for value in (got, base))
    slack = 4 * torch.finfo(torch.float32).eps * float(want.square().mean().sqrt())
    for what, error, base_error in (
        ("rms", rows.square().mean().sqrt(), base_rows.square().mean().sqrt()),
        ("worst row's rms", rows.max(), base_rows.max()),
    ):
        within = float(error) <= ERROR_RATIO * float(base_error) + slack
        ctx.expect(within, f"{name}: {what} error {float(error):.3e}, {budget} {float(base_error):.3e}")
    known = (got, base) if at_best is None else (got, base, at_best)
    top, *allowed = (float((value.double() - want).abs().max()) for value in known)
    base_top = max(allowed)
    slack = ulps * torch.finfo(got.dtype).eps * float(want.abs().max())
    ctx.expect(top <= ERROR_RATIO * base_top + slack, f"{name}: max error {top:.3e}, {budget} {base_top:.3e}")


def expect_same_on_all_ranks(ctx: Context, name: str, tensor: torch.Tensor) -> None:
    bits = tensor.contiguous().view(torch.uint8)
    other = bits.clone()
    dist.broadcast(other, 0)
    ctx.expect(torch.equal(other, bits), f"{name}: differs from rank 0")
