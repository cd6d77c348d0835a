"""What a call brings into the L2 cache while its message is under way: the weights that the next matmul reads.

A message of few tokens has few rows, so most SMs have nothing to do until it has travelled, and the memory is idle. A call can
be given tensors (``prefetch``) and a number of bytes (``prefetch_bytes``). Its kernel is then launched with more CTAs than
there are rows, and these ask for the first so many bytes of the tensors, one after the other. They don't wait for what they
asked for, read none of it and write nothing: no result depends on them.

Kernels that can't do it leave it, as calls of more than :data:`MOST_TOKENS` tokens and calls beside other work do.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, c_int32, c_uint32, c_uint64
from typing import Any

import torch

MOST_TOKENS = 128
"""Longer messages have rows for all SMs. On two H100 those of 256 tokens lost up to 2% where two-shot served them."""
MOST_WEIGHT_BYTES = 32 * 2**20
"""A matmul with more weights is left to read them all by itself.

On two H100 a matmul of 25 MB took 2 to 5% less with 4 MiB prefetched, its call included; one of 117 MB took up to 1% more
(``benchmarks/kernel-notes.md``, section 7).
"""
MOST_TENSORS = 4
LINE = 16
"""In bytes: what is asked for begins and ends at multiples of it."""
PIECE = 4096
"""In bytes: what a warp asks for at a time. Fewer CTAs are launched than there are pieces."""
_MOST_BYTES = 2**31


class Prefetched(Structure):
    """``Prefetched`` of prefetch.cuh."""

    _fields_ = [
        ("begin", c_uint64 * MOST_TENSORS),
        ("bytes", c_uint32 * MOST_TENSORS),
        ("row_ctas", c_int32),
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


def shares(sizes: Sequence[int], budget: int) -> list[int]:
    """What of each tensor of ``sizes`` bytes is asked for, in whole lines: in their order, until the budget is used up."""
    found = []
    for size in sizes:
        found.append(min(size, budget) // LINE * LINE)
        budget -= found[-1]
    return found


def form_of_prefetch(prefetch: Sequence[torch.Tensor] | None) -> tuple[Any, ...]:
    """What calls of one form have in common of these tensors."""
    return tuple((tensor.device, tensor.nbytes, is_dense(tensor)) for tensor in prefetch or ())


def prefetched(prefetch: Sequence[torch.Tensor], budget: int, row_ctas: int, free_ctas: int) -> tuple[Prefetched, int]:
    """The parameters of a launch of ``row_ctas`` CTAs with rows, and how many CTAs it has with those that prefetch.

    At most ``free_ctas`` more. The addresses are left to be filled in.
    """
    found = shares([tensor.nbytes for tensor in prefetch], budget)
    pieces = sum(-(-nbytes // PIECE) for nbytes in found)
    more = max(0, min(free_ctas, pieces))
    if not more:
        found = []
    sizes = (c_uint32 * MOST_TENSORS)(*found)
    return Prefetched(bytes=sizes, row_ctas=row_ctas), row_ctas + more
