"""What happens to one reduced row: bias, residual, norm. All Triton kernels that finish a row share this code."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tw_compile.kernels.collective.spec import FP8_MAX

_FP8_MAX = tl.constexpr(FP8_MAX)
_TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def triton_dtype(dtype: torch.dtype | None) -> tl.dtype | None:
    """The Triton dtype of ``dtype``; None stays None."""
    if dtype is None:
        return None
    if dtype not in _TRITON_DTYPES:
        raise TypeError(f"expected one of {', '.join(map(str, _TRITON_DTYPES))}, got {dtype}")
    return _TRITON_DTYPES[dtype]


def launch_shape(hidden_size: int) -> tuple[int, int]:
    """``(BLOCK, num_warps)`` for one row per program: 16 elements per thread if the limits on warps allow it."""
    block = triton.next_power_of_2(hidden_size)
    return block, min(max(block // 512, 4), 32)


@triton.jit
def add_row(total, values, row, columns, mask):
    """``total + values[row's columns]`` in float32; ``values`` points at the row's first element, or is None."""
    if values is None:
        return total
    else:
        return total + tl.load(values + row + columns, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def normalise_row(
    h,
    weight,
    columns,
    mask,
    eps,
    weight_offset,
    HIDDEN: tl.constexpr,
    CAST_BEFORE_WEIGHT: tl.constexpr,
):
    """RMSNorm of ``h``, float32 ``[BLOCK]``, times the weight (:class:`NormSpec`); float32. ``h`` is 0 where ``mask`` is false.

    The rounding steps are those of ``reference.add_rms_norm``. Only the order of the sum over the row differs.
    """
    y = h * tl.rsqrt(tl.sum(h * h) / HIDDEN + eps)
    return _weigh_row(y, weight, columns, mask, weight_offset, CAST_BEFORE_WEIGHT)


@triton.jit
def layer_normalise_row(
    h,
    weight,
    columns,
    mask,
    eps,
    weight_offset,
    HIDDEN: tl.constexpr,
    CAST_BEFORE_WEIGHT: tl.constexpr,
):
    """As :func:`normalise_row`, for LayerNorm. The rounding steps are those of ``reference.add_layer_norm``."""
    centred = tl.where(mask, h - tl.sum(h) / HIDDEN, 0.0)
    y = centred * tl.rsqrt(tl.sum(centred * centred) / HIDDEN + eps)
    return _weigh_row(y, weight, columns, mask, weight_offset, CAST_BEFORE_WEIGHT)


@triton.jit
def _weigh_row(y, weight, columns, mask, weight_offset, CAST_BEFORE_WEIGHT: tl.constexpr):
    """The normalised ``y`` times the weight, if there is one; float32."""
    if weight is not None:
        w = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
        y = y * (w + weight_offset) if CAST_BEFORE_WEIGHT is None else y.to(CAST_BEFORE_WEIGHT).to(tl.float32) * w
    return y


@triton.jit
def to_hidden(y, dtype: tl.constexpr, hidden_scale):
    """``y`` (float32) rounded to ``dtype``; quantised with the scale at ``hidden_scale`` unless that is None."""
    if hidden_scale is None:
        return y.to(dtype)
    else:
        # div_rn rounds correctly, "/" on GPUs only approximates. The result must equal that of a separate quantisation.
        y = y * tl.div_rn(1.0, tl.load(hidden_scale))
        return tl.clamp(y, -_FP8_MAX, _FP8_MAX, propagate_nan=tl.PropagateNan.ALL).to(dtype)


@triton.jit
def quantise_row(
    y,
    scales,
    min_scale,
    dtype: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    DIVIDES_BY_SCALE: tl.constexpr,
):
    """Quantise ``y`` (float32 ``[BLOCK]``, 0 behind the row) by scales that are computed from it and stored at ``scales``.

    See :class:`NormSpec`. The rounding steps are those of ``reference.quantised``. Returns the codes.
    """
    if SCALE_COLUMNS == HIDDEN:
        scale = tl.maximum(tl.div_rn(tl.max(tl.abs(y)), _FP8_MAX), min_scale)
        tl.store(scales, scale)
        by = tl.zeros_like(y) + scale
    else:
        GROUPS: tl.constexpr = BLOCK // SCALE_COLUMNS
        groups = tl.arange(0, GROUPS)
        amax = tl.max(tl.abs(tl.reshape(y, (GROUPS, SCALE_COLUMNS))), axis=1)
        scale = tl.maximum(tl.div_rn(amax, tl.zeros_like(amax) + _FP8_MAX), min_scale)
        tl.store(scales + groups, scale, mask=groups < HIDDEN // SCALE_COLUMNS)
        by = tl.reshape(tl.broadcast_to(scale[:, None], (GROUPS, SCALE_COLUMNS)), (BLOCK,))
    scaled = tl.div_rn(y, by) if DIVIDES_BY_SCALE else y * tl.div_rn(tl.zeros_like(by) + 1.0, by)
    return tl.clamp(scaled, -_FP8_MAX, _FP8_MAX, propagate_nan=tl.PropagateNan.ALL).to(dtype)
