"""What a call must have given."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from emulator.memory import bits
from tw_compile.kernels.collective.spec import row_range

if TYPE_CHECKING:
    from emulator.kernels import Call

FP8 = torch.float8_e4m3fn


def check(call: Call) -> None:
    """All ranks have equal bits, every element was written, and is what float64 says but for the roundings of the types.

    With a wire it is what was expected to the bit.
    """
    world_size, first = len(call.ranks), call.ranks[0]
    norm = first.request.norm
    compare = equal if call.to_the_bit else close
    for rank, own in enumerate(call.ranks):
        given = [tensor for tensor in own.inputs().values() if tensor is not None]
        for now, before in zip(given, own.given, strict=True):
            assert torch.equal(bits(now), bits(before)), f"rank {rank} has written to what it was given"
        assert torch.equal(bits(own.results), bits(first.results)), f"rank {rank} has other bits than rank 0"
        if own.request.residual_out == "replicated":
            assert torch.equal(bits(own.residual_out), bits(first.residual_out)), f"rank {rank}: another residual"
        if own.request.residual_out != "none":
            begin, end = row_range(call.tokens, world_size, rank)
            rows = slice(begin, end) if own.request.residual_out == "sharded" else slice(0, call.tokens)
            compare(own.residual_out[: rows.stop - rows.start].double(), call.h[rows], norm.residual_dtype)
    rounded = norm.hidden_dtype if norm.hidden_dtype == FP8 else norm.cast_before_weight or norm.hidden_dtype
    want = call.hidden
    if call.scales is not None and call.to_the_bit:
        assert torch.equal(first.scales, call.scales), "other scales than those of the rows"
    elif call.scales is not None:
        torch.testing.assert_close(first.scales, call.scales, rtol=1e-5, atol=0.0)
        by = first.scales.double().repeat_interleave(norm.scale_columns, 1)
        want = (want / by).clamp(-448, 448)
    if norm.cast_before_weight is not None and first.request.norm_bias is not None:
        before = call.hidden - first.request.norm_bias.double()  # what is rounded may be larger than the result
        close(first.hidden.double(), call.hidden, rounded, before)
    else:
        compare(first.hidden.double(), want, rounded)


def equal(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """The same numbers, whatever the signs of zeros. NaN is NaN."""
    wrong = ~((got == want) | (got.isnan() & want.isnan()))
    assert not wrong.any(), f"{int(wrong.sum())} elements of {wrong.numel()}, first at {wrong.nonzero()[0].tolist()}"


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, before: torch.Tensor | None = None) -> None:
    """Within the rounding of ``dtype``, twice where a value is rounded twice; float32 sums err by less. NaN is NaN.

    ``before``: what was rounded first, where something is added to it before it is rounded again.
    """
    eps = torch.finfo(dtype).eps if dtype != FP8 else 0.125
    largest = want.abs() if before is None else torch.maximum(want.abs(), before.abs())
    tolerance = (1.01 * eps * largest).clamp_min(2**-9 if dtype == FP8 else 1e-5)
    right = ((got - want).abs() <= tolerance) | (got == want) | (got.isnan() & want.isnan())
    wrong = ~right
    assert not wrong.any(), f"{int(wrong.sum())} elements of {wrong.numel()}, first at {wrong.nonzero()[0].tolist()}"
