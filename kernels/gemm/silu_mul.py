"""``silu(gate) * up`` as one Triton kernel. It follows two GEMMs that are not computed as one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def silu_mul_kernel(gate, up, out, columns, gate_stride, up_stride, BLOCK: tl.constexpr):
    """``BLOCK`` columns of one row per program. ``gate``, ``up`` [rows, columns] with these row strides, ``out`` contiguous."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    x = tl.load(gate + row * gate_stride + column, mask=mask).to(tl.float32)
    y = tl.load(up + row * up_stride + column, mask=mask).to(tl.float32)
    tl.store(out + row * columns + column, (x / (1.0 + tl.exp(-x)) * y).to(out.dtype.element_ty), mask=mask)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` as contiguous ``[rows, columns]``, computed in float32. Columns of both operands have stride 1."""
    if not gate.is_cuda:
        return F.silu(gate) * up
    rows, columns = gate.shape
    out = gate.new_empty(rows, columns)
    if rows:
        grid = (rows, triton.cdiv(columns, _BLOCK))
        silu_mul_kernel[grid](gate, up, out, columns, gate.stride(0), up.stride(0), BLOCK=_BLOCK, num_warps=4)
    return out
