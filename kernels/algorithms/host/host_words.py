"""Launches of ``host_words.cu``: one-shot through host memory, for small messages."""

from __future__ import annotations

from ctypes import Structure, c_int32, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tw_compile.kernels.algorithms.row_kernel import RowKernel
from tw_compile.kernels.collective.cuda_variant import (
    LAST_FIELDS,
    LOADS_AND_STORES,
    POINTER_FIELDS,
    VECTOR,
    address,
    numbers_of,
    statistics_bytes,
)
from tw_compile.kernels.collective.prefetch import Prefetched
from tw_compile.kernels.collective.slot import WORDS, GroupState, Slot
from tw_compile.kernels.collective.spec import Request
from tw_compile.kernels.collective.transport import Started
from tw_compile.kernels.runtime.program import Program

_PARTS = 2
_LINE_BYTES = 16
"""A line of an outbox. 12 of its bytes are data, the others the name of the call, twice."""
NAMES = 2**16 - 1
"""Calls have so many names, one after the other. 0 is no name. The number is odd, because two parts take turns."""
_MOST_REGISTERS = 64
"""The vectors that a thread receives at a time take no more. The lines that they come in take up to half as many again."""
_SHORT_BYTES = 16 * 1024
"""Up to this size of a message, more threads save more time than lines cost that are one third empty."""


class HostWordsParams(Structure):
    """``HostWordsParams`` of host_words.cu."""

    _fields_ = [
        *POINTER_FIELDS,
        *((name, c_void_p) for name in ("outboxes", "state", "status")),
        ("part_bytes", c_uint64),
        *((name, c_int32) for name in ("erased", "rank", "tokens")),
        *LAST_FIELDS,
        ("prefetch", Prefetched),
    ]


@dataclass(frozen=True)
class Shape:
    """How a CTA handles a row: its ``threads``, and how many vectors of 8 elements each receives ``at_once``.

    Three vectors of 16-bit elements fill four lines.
    """

    threads: int
    at_once: int
    row_bytes: int

    def defines(self) -> dict[str, int | str]:
        """The definitions of host_words.cu that belong to the shape."""
        return {"THREADS": self.threads, "AT_ONCE": self.at_once, "NAMES": NAMES}


def shape_for(hidden_size: int, element_bytes: int, world_size: int, at_once: int) -> Shape:
    """The shape for rows of that size, with at most ``at_once`` vectors at a time.

    Registers limit what a thread may receive at a time, because it comes from all peers at once.
    """
    vectors, pieces = hidden_size // VECTOR, element_bytes * VECTOR // 4
    at_once = max(1, min(at_once, _MOST_REGISTERS // (pieces * world_size)))
    each = max(at_once, -(-vectors // (1024 if world_size <= 4 else 512)))
    return shape_of(hidden_size, element_bytes, -(-vectors // (32 * each)) * 32, at_once)


def shape_of(hidden_size: int, element_bytes: int, threads: int, at_once: int) -> Shape:
    """The shape with these numbers; the size of a row is computed here."""
    vectors, pieces = hidden_size // VECTOR, element_bytes * VECTOR // 4
    full_sets, others = divmod(vectors, threads * at_once)
    # Of the last set all threads have as many vectors, and some have one more; a line begins in one of its vectors.
    each, more = divmod(others, threads)
    of_all, of_some = (-(-count * pieces // 3) for count in (each, each + 1))
    lines = (full_sets * -(-at_once * pieces // 3) + of_all) * threads + (of_some - of_all) * more
    return Shape(threads, at_once, lines * _LINE_BYTES)


def erased_lines(part_bytes: int, names: int = NAMES) -> int:
    """How many lines of a part each of its calls erases, so that all are before a quarter of the names has been used."""
    return -(-part_bytes // _LINE_BYTES // (names // 4))


class _Words(RowKernel):
    """host_words.cu with threads that receive at most ``at_once`` vectors at a time."""

    source = Path(__file__).with_name("host_words.cu")
    params = HostWordsParams
    most_sms = 128
    min_capability = LOADS_AND_STORES
    prefetches = True

    def __init__(self, max_sms: int, at_once: int) -> None:
        super().__init__("host_words", True, max_sms)
        self._at_once = at_once

    def needs(self, request: Request, world_size: int) -> dict[str, int]:
        """See :class:`Algorithm`."""
        return {WORDS: _PARTS * request.x.shape[0] * self._shape(request, world_size).row_bytes}

    def _shape(self, request: Request, world_size: int) -> Shape:
        return shape_for(request.x.shape[1], request.x.element_size(), world_size, self._at_once)

    def defines(self, request: Request, state: GroupState) -> dict[str, int | str]:
        """See :class:`RowKernel`."""
        return self._shape(request, state.world_size).defines()

    def options(self, request: Request, state: GroupState) -> dict[str, Any]:
        """See :class:`RowKernel`."""
        threads = self._shape(request, state.world_size).threads
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
            erased=erased_lines(words.capacity // _PARTS),
            rank=state.rank,
            tokens=request.x.shape[0],
            **numbers_of(request.norm),
        )
        launches: list[tuple[Structure, int]] = [(params, min(request.x.shape[0], request.limited(self._max_sms)))]
        return self.with_prefetch(request, state, launches, 1)


class HostWords(_Words):
    """Each rank writes its rows to host memory once, in words that show that they have arrived. There is one CTA per SM."""

    def __init__(self, max_sms: int = 32) -> None:
        super().__init__(max_sms, 3)
        self._short = _Words(max_sms, 1)

    def needs(self, request: Request, world_size: int) -> dict[str, int]:
        """See :class:`Algorithm`."""
        return max(super().needs(request, world_size), self._short.needs(request, world_size), key=lambda it: it[WORDS])

    def prepare(self, request: Request, state: GroupState, spin_limit: int) -> None:
        """See :class:`Algorithm`."""
        super().prepare(request, state, spin_limit)
        self._short.prepare(request, state, spin_limit)

    def programs(self, request: Request, state: GroupState, spin_limit: int) -> list[Program]:
        """See :class:`Algorithm`."""
        return [
            *super().programs(request, state, spin_limit),
            *self._short.programs(request, state, spin_limit),
        ]

    def launch(self, request: Request, state: GroupState, slot: Slot, spin_limit: int) -> Started:
        """See :class:`Algorithm`."""
        if request.x.nbytes <= _SHORT_BYTES:
            return self._short.launch(request, state, slot, spin_limit)
        return super().launch(request, state, slot, spin_limit)
