"""Launches of ``host_words.cu``: one-shot through host memory, for small messages."""

from __future__ import annotations

from ctypes import Structure, c_int32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from tw_compile.kernels.algorithms.row_kernel import RowKernel
from tw_compile.kernels.collective.cuda_variant import (
    HOST_KERNELS,
    LAST_FIELDS,
    POINTER_FIELDS,
    VECTOR,
    address,
    numbers_of,
    statistics_bytes,
)
from tw_compile.kernels.collective.prefetch import Prefetched
from tw_compile.kernels.collective.slot import WORDS, GroupState, Slot
from tw_compile.kernels.collective.spec import Request

_PARTS = 2
_WORDS = 2
"""An element takes this many times its own size, because half of each word is the number of the call."""


class HostWordsParams(Structure):
    """``HostWordsParams`` of host_words.cu."""

    _fields_ = [
        *POINTER_FIELDS,
        *((name, c_void_p) for name in ("outboxes", "state", "status")),
        ("part_bytes", c_uint64),
        *((name, c_int32) for name in ("rank", "tokens")),
        *LAST_FIELDS,
        ("prefetch", Prefetched),
    ]


def threads_for(hidden_size: int, world_size: int) -> int:
    """Threads of a CTA, which holds one row. Each thread holds one vector, if registers for all peers' vectors allow it."""
    most = 1024 if world_size <= 4 else 512
    vectors = hidden_size // VECTOR
    each = -(-vectors // most)
    return -(-vectors // (32 * each)) * 32


class HostWords(RowKernel):
    """Each rank writes its rows to host memory once, in words that show that they have arrived. There is one CTA per SM."""

    source = Path(__file__).with_name("host_words.cu")
    params = HostWordsParams
    most_sms = 128
    min_capability = HOST_KERNELS
    prefetches = True

    def __init__(self, max_sms: int = 128) -> None:
        super().__init__("host_words", True, max_sms)

    def needs(self, request: Request, world_size: int) -> dict[str, int]:
        """See :class:`Algorithm`."""
        return {WORDS: _PARTS * _WORDS * request.x.nbytes}

    def defines(self, request: Request, state: GroupState) -> dict[str, int | str]:
        """See :class:`RowKernel`."""
        return {"THREADS": threads_for(request.x.shape[1], state.world_size)}

    def options(self, request: Request, state: GroupState) -> dict[str, Any]:
        """See :class:`RowKernel`."""
        threads = threads_for(request.x.shape[1], state.world_size)
        return {
            "block": threads,
            "shared_bytes": statistics_bytes(request, 1, threads // 32),
            **self.stream_options(request, state),
        }

    def launches(self, request: Request, state: GroupState, slot: Slot) -> list[tuple[Structure, int]]:
        """See :class:`RowKernel`."""
        words = slot.buffers[WORDS]
        params = HostWordsParams(
            outboxes=address(words.table),
            state=address(words.state),
            status=address(slot.status),
            part_bytes=words.capacity // _PARTS,
            rank=state.rank,
            tokens=request.x.shape[0],
            **numbers_of(request.norm),
        )
        launches: list[tuple[Structure, int]] = [(params, min(request.x.shape[0], request.limited(self._max_sms)))]
        return self.with_prefetch(request, state, launches, 1)
