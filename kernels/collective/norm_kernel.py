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
    hidden,
    h_out,
    hidden_scale,
    eps,
    weight_offset,
    scale,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    CAST_BEFORE_WEIGHT: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """One row a program. ``reduced``, ``residual``, ``hidden``, ``h_out``: ``[rows, HIDDEN]``; None where absent.

    ``hidden_scale``: float32 ``[1]``, or None. ``NORMALISE``: the epilogue's row code, as ``row.normalise_row``.
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
    tl.store(hidden + row + columns, to_hidden(y, hidden.dtype.element_ty, hidden_scale), mask=mask)


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
) -> None:
    """An epilogue's reference for contiguous ``reduced [rows, hidden_size]``, written to ``hidden`` and ``h``.

    Both are contiguous ``[rows, hidden_size]``, or more rows, of which the first are written. ``h`` None is not kept.
    ``row_code`` is the epilogue's, as ``row.normalise_row``.
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
        hidden,
        h,
        hidden_scale,
        norm.eps,
        norm.weight_offset,
        norm.scale,
        HIDDEN=hidden_size,
        BLOCK=block,
        CAST_BEFORE_WEIGHT=triton_dtype(norm.cast_before_weight),
        NORMALISE=row_code,
        num_warps=num_warps,
    )


add_rms_norm_cuda = partial(_add_norm, normalise_row)
"""For :func:`reference.add_rms_norm`."""
add_layer_norm_cuda = partial(_add_norm, layer_normalise_row)
"""For :func:`reference.add_layer_norm`."""
