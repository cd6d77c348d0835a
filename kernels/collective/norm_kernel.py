"""Residual add + norm of rows that are already reduced, as one local Triton kernel (the tail of the NCCL transport)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from tw_compile.kernels.collective.row import (
    add_row,
    launch_shape,
    layer_normalise_row,
    normalise_row,
    quantise_row,
    to_hidden,
    triton_dtype,
)
from tw_compile.kernels.collective.spec import NormSpec


@triton.jit
def add_norm_kernel(
    reduced,
    residual,
    bias,
    weight,
    norm_bias,
    hidden,
    h_out,
    hidden_scale,
    scales,
    eps,
    weight_offset,
    scale,
    min_scale,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    CAST_BEFORE_WEIGHT: tl.constexpr,
    NORMALISE: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    DIVIDES_BY_SCALE: tl.constexpr,
):
    """One row per program. ``reduced``, ``residual``, ``hidden``, ``h_out``: ``[rows, HIDDEN]``; None where absent.

    ``hidden_scale``: float32 ``[1]``, or None. ``scales``: float32 ``[rows, HIDDEN / SCALE_COLUMNS]``, or None.
    ``NORMALISE``: the epilogue's row code, such as ``row.normalise_row``.
    """
    columns = tl.arange(0, BLOCK)
    mask = columns < HIDDEN
    row = tl.program_id(0).to(tl.int64) * HIDDEN
    h = tl.load(reduced + row + columns, mask=mask, other=0.0).to(tl.float32)
    h = add_row(h * scale, bias, 0, columns, mask)
    h = add_row(h, residual, row, columns, mask)
    if h_out is not None:
        tl.store(h_out + row + columns, h.to(h_out.dtype.element_ty), mask=mask)
    y = NORMALISE(h, weight, columns, mask, eps, weight_offset, HIDDEN, CAST_BEFORE_WEIGHT)
    y = add_row(y, norm_bias, 0, columns, mask)
    dtype = hidden.dtype.element_ty
    if scales is None:
        tl.store(hidden + row + columns, to_hidden(y, dtype, hidden_scale), mask=mask)
    else:
        of_row = scales + tl.program_id(0).to(tl.int64) * (HIDDEN // SCALE_COLUMNS)
        codes = quantise_row(y, of_row, min_scale, dtype, HIDDEN, BLOCK, SCALE_COLUMNS, DIVIDES_BY_SCALE)
        tl.store(hidden + row + columns, codes, mask=mask)


def _add_norm(
    row_code: Any,
    reduced: torch.Tensor,
    residual: torch.Tensor | None,
    bias: torch.Tensor | None,
    weight: torch.Tensor | None,
    norm: NormSpec,
    hidden: torch.Tensor,
    h: torch.Tensor | None,
    hidden_scale: torch.Tensor | None,
    norm_bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> None:
    """Compute what an epilogue's reference defines for contiguous ``reduced [rows, hidden_size]``. Writes ``hidden`` and ``h``.

    Both are contiguous ``[rows, hidden_size]``, or have more rows, of which only the first ``rows`` are written. If ``h`` is
    None, the sums are not kept. ``scales`` gets the scales that are computed from the rows; it may have more rows, too.
    ``row_code`` is the epilogue's row code, such as ``row.normalise_row``.
    """
    rows, hidden_size = reduced.shape
    if rows == 0:
        return
    block, num_warps = launch_shape(hidden_size)
    add_norm_kernel[(rows,)](
        reduced,
        residual,
        bias,
        weight,
        norm_bias,
        hidden,
        h,
        hidden_scale,
        scales,
        norm.eps,
        norm.weight_offset,
        norm.scale,
        norm.min_scale,
        HIDDEN=hidden_size,
        BLOCK=block,
        CAST_BEFORE_WEIGHT=triton_dtype(norm.cast_before_weight),
        NORMALISE=row_code,
        SCALE_COLUMNS=norm.scale_columns,
        DIVIDES_BY_SCALE=norm.divides_by_scale,
        num_warps=num_warps,
    )


add_rms_norm_cuda = partial(_add_norm, normalise_row)
"""The kernel for :func:`reference.add_rms_norm`."""
add_layer_norm_cuda = partial(_add_norm, layer_normalise_row)
"""The kernel for :func:`reference.add_layer_norm`."""
