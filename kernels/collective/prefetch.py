"""What a call brings into the L2 cache while its message is under way: the weights that the next matmul reads.

A message of few tokens has few rows, so most SMs have nothing to do until it has travelled, and the memory is idle. A call can
be given tensors (``prefetch``) and a number of bytes (``prefetch_bytes``). Its kernel is then launched with more CTAs than
there are rows, and these ask for so many bytes of the tensors, in pieces that are spread evenly over all of them. They don't
wait for what they asked for, read none of it and write nothing: no result depends on them.

Kernels that can't do it leave it, as calls of more than :data:`MOST_TOKENS` tokens and calls beside other work do.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, c_int32, c_uint32, c_uint64
from typing import Any

import torch

MOST_TOKENS = 256
"""Longer messages have rows for all SMs, and what they move themselves is more than L2 holds beside."""
MOST_TENSORS = 4
LINE = 16
"""In bytes: what is asked for begins and ends at multiples of it."""
PIECE = 1024
"""In bytes: what lies together of what is asked for; ``PREFETCH_PIECE`` of prefetch.cuh. There is a CTA for each at most."""
_STEP = 128
"""In bytes: a period is an odd multiple of it. Pieces of rows of 2^n bytes then begin at all columns, and not at a few."""
_MOST_BYTES = 2**31


class Prefetched(Structure):
    """``Prefetched`` of prefetch.cuh."""

    _fields_ = [
        ("begin", c_uint64 * MOST_TENSORS),
        ("bytes", c_uint32 * MOST_TENSORS),
        ("row_ctas", c_int32),
        ("period", c_uint32),
    ]


def check_prefetch(prefetch: Sequence[torch.Tensor] | None, prefetch_bytes: int, device: torch.device) -> None:
    """ValueError unless these are tensors whose memory a kernel on ``device`` can ask for."""
    if not 0 <= prefetch_bytes < _MOST_BYTES:
        raise ValueError(f"prefetch_bytes: expected 0 to {_MOST_BYTES - 1}, got {prefetch_bytes}")
    tensors = prefetch or ()
    if len(tensors) > MOST_TENSORS:
        raise ValueError(f"prefetch: expected at most {MOST_TENSORS} tensors, got {len(tensors)}")
    for index, tensor in enumerate(tensors):
        if tensor.device != device:
            raise ValueError(f"prefetch[{index}]: expected a tensor on {device}, as x is, got one on {tensor.device}")
        if not is_dense(tensor):
            raise ValueError(
                f"prefetch[{index}]: expected rows or columns one behind the other, "
                f"got shape {list(tensor.shape)} with strides {list(tensor.stride())}"
            )


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements are all that lies between its first and its last one, by rows or by columns."""
    return tensor.is_contiguous() or (tensor.dim() > 1 and tensor.mT.is_contiguous())


def period_of(nbytes: int, budget: int) -> int:
    """Bytes from one piece to the next, so that pieces of tensors of ``nbytes`` bytes together are about ``budget`` bytes.

    0 where there is nothing to ask for, :data:`PIECE` where all of it is.
    """
    if nbytes <= budget:
        return PIECE if nbytes else 0
    pieces = budget // PIECE
    return 0 if not pieces else min((nbytes // (pieces * _STEP) | 1) * _STEP, _MOST_BYTES - _STEP)


def form_of_prefetch(prefetch: Sequence[torch.Tensor] | None) -> tuple[Any, ...]:
    """What calls of one form have in common of these tensors."""
    return tuple((tensor.device, tensor.nbytes, is_dense(tensor)) for tensor in prefetch or ())


def prefetched(prefetch: Sequence[torch.Tensor], budget: int, row_ctas: int, free_ctas: int) -> tuple[Prefetched, int]:
    """The parameters of a launch of ``row_ctas`` CTAs with rows, and how many CTAs it has with those that prefetch.

    At most ``free_ctas`` more. The addresses are left to be filled in.
    """
    sizes = [min(tensor.nbytes // LINE * LINE, _MOST_BYTES) for tensor in prefetch]
    period = period_of(sum(sizes), budget)
    pieces = sum(-(-nbytes // period) for nbytes in sizes) if period else 0
    more = max(0, min(free_ctas, pieces))
    if not more:
        sizes, period = [], PIECE
    return Prefetched(bytes=(c_uint32 * MOST_TENSORS)(*sizes), row_ctas=row_ctas, period=period), row_ctas + more
