"""Prefetching: a call brings the weights that the next matmul reads into the L2 cache while its message is under way.

A message of few tokens has few rows. So most SMs have nothing to do until it has travelled, and the memory is idle. A call can
be given tensors (``prefetch``) and a number of bytes (``prefetch_bytes``). Its kernel is then launched with more CTAs than
there are rows. The additional CTAs request the first ``prefetch_bytes`` bytes of the tensors, one tensor after the other. They
don't wait for the data, read none of it and write nothing, so no result depends on them.

Kernels that can't prefetch ignore the tensors. So do calls of more than :data:`MOST_TOKENS` tokens and calls beside other work.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, c_int32, c_uint32, c_uint64
from typing import Any

import torch

MOST_TOKENS = 64
"""Longer messages have rows for all SMs. On two H100 a call of 128 tokens of 4096 and the matmul behind it took 4% longer, and
of 256 tokens up to 2% where two-shot served them."""
MOST_WEIGHT_BYTES = 32 * 2**20
"""For a matmul with more bytes of weights nothing is prefetched.

On two H100 a matmul with 25 MB of weights and its call together took 2 to 5% less time with 4 MiB prefetched. A matmul with
117 MB took up to 1% more (``benchmarks/kernel-notes.md``, section 7).
"""
MOST_TENSORS = 4
LINE = 16
"""In bytes. A prefetched range begins and ends at multiples of it."""
PIECE = 4096
"""Bytes that a warp requests at a time. At most as many prefetching CTAs are launched as there are pieces."""
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
    """Whether the tensor's elements fill the memory between its first and its last element, by rows or by columns."""
    return tensor.is_contiguous() or (tensor.dim() > 1 and tensor.mT.is_contiguous())


def shares(sizes: Sequence[int], budget: int) -> list[int]:
    """How many bytes of each tensor of ``sizes`` bytes to prefetch, in whole lines: in order, until the budget is used up."""
    found = []
    for size in sizes:
        found.append(min(size, budget) // LINE * LINE)
        budget -= found[-1]
    return found


def form_of_prefetch(prefetch: Sequence[torch.Tensor] | None) -> tuple[Any, ...]:
    """The properties of these tensors that are equal for all calls of one form."""
    return tuple((tensor.device, tensor.nbytes, is_dense(tensor)) for tensor in prefetch or ())


def prefetched(
    prefetch: Sequence[torch.Tensor], budget: int, row_ctas: int, free_ctas: int, cluster: int = 1
) -> tuple[Prefetched, int]:
    """The prefetch parameters of a launch of ``row_ctas`` CTAs with rows, and its number of CTAs with those that prefetch.

    At most ``free_ctas`` CTAs prefetch, in whole clusters of ``cluster``. The addresses are not filled in yet.
    """
    found = shares([tensor.nbytes for tensor in prefetch], budget)
    pieces = sum(-(-nbytes // PIECE) for nbytes in found)
    more = min(max(free_ctas, 0) // cluster, -(-pieces // cluster)) * cluster
    if not more:
        found = []
    sizes = (c_uint32 * MOST_TENSORS)(*found)
    return Prefetched(bytes=sizes, row_ctas=row_ctas), row_ctas + more
