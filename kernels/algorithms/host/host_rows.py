"""Launches of ``host_rows.cu``: one-shot and two-shot through host memory, for medium and large messages."""

from __future__ import annotations

from ctypes import Structure, c_int32, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tw_compile.kernels.algorithms.row_kernel import RowKernel
from tw_compile.kernels.collective.cuda_variant import (
    HOPPER,
    LAST_FIELDS,
    LOADS_AND_STORES,
    POINTER_FIELDS,
    VECTOR,
    address,
    numbers_of,
    result_bytes,
    result_vector_bytes,
    statistics_bytes,
    travelling_bytes,
    vector_bytes,
)
from tw_compile.kernels.collective.side_stream import cluster_size
from tw_compile.kernels.collective.slot import HOST_MAX_CTAS as MAX_CTAS
from tw_compile.kernels.collective.slot import OUTBOX, GroupState, Slot
from tw_compile.kernels.collective.spec import FP8, Request
from tw_compile.kernels.collective.wires import EXACT, WIRES

WORKERS = 512
"""Threads of a CTA that move rows, unless one row needs more threads."""
MOST_RING = 12
MOST_AHEAD_BYTES = 128 * 1024
"""The most bytes of partial sums that a CTA sends ahead, but for one turn if two are loaded at a time. What it sends before
others can read it makes a call longer."""
MOST_RING_BYTES = 256 * 1024
"""The most bytes of partial sums in a ring. If turns are long, a ring has fewer turns, but at least two."""
_HALVES = 2
_WIDE_GROUP = 128
"""Columns of groups so wide that a warp, with 256 columns, has less than a sector of 32 bytes of their words."""
_LONG_CODED_BYTES = 2**23
_LONG_CODED_CLUSTER = 8
"""The most CTAs of a cluster of a call beside other work whose rows travel in codes, from this message size on. Two such calls
are under way at a time. We believe that in pairs they take twice the SMs that GEMMs leave, and that a large cluster waits until
a call or a GEMM ends. With calls of 16 MiB layers took 6% more in pairs, with calls of 4 MiB 2% less
(``benchmarks/host-memory-notes.md``, "Codes beside compute")."""
COUNTERS_BYTES = MAX_CTAS * 64
_ALIGNMENT = 128


class HostRowsParams(Structure):
    """``HostRowsParams`` of host_rows.cu."""

    _fields_ = [
        *POINTER_FIELDS,
        *((name, c_void_p) for name in ("outboxes", "state", "status")),
        ("half_bytes", c_uint64),
        *((name, c_int32) for name in ("rank", "tokens")),
        *LAST_FIELDS,
    ]


def outbox_bytes(shape: Shape) -> int:
    """Bytes of a rank's outbox for calls of that shape."""
    return COUNTERS_BYTES + MAX_CTAS * _HALVES * shape.half_bytes


def half_bytes(capacity: int) -> int:
    """Bytes of each half of a CTA's part of an outbox of ``capacity`` bytes."""
    return (capacity - COUNTERS_BYTES) // (MAX_CTAS * _HALVES) // _ALIGNMENT * _ALIGNMENT


def stage_budget(capability: tuple[int, int]) -> int:
    """Bytes of shared memory for rows that are on their way; 0 if threads can't load to shared memory asynchronously.

    Every device has at least 3 KiB more for what else a CTA keeps there.
    """
    if capability < (8, 0):
        return 0
    return (192 if capability[0] in (9, 10) else 96) * 1024


@dataclass(frozen=True)
class Gathered:
    """Words of groups of a row of partial sums and of a row of results that gather in shared memory; 0 where they do not.

    ``sums`` and ``results`` gather when they are loaded, and ``sums_leaving`` and ``results_leaving`` before they are stored.
    """

    sums: int = 0
    results: int = 0
    sums_leaving: int = 0
    results_leaving: int = 0


@dataclass(frozen=True)
class Shape:
    """How a CTA handles rows, in the terms of host_rows.cu.

    ``half_bytes``: bytes of an outbox that one CTA needs per call. ``stage_bytes``: how many of the ``shared_bytes`` are for
    rows that are on their way.
    """

    threads: int
    groups: int
    ring: int
    ahead: int
    depth: int
    behind: int
    result_ring: int
    gathered: Gathered
    shared_bytes: int
    stage_bytes: int
    half_bytes: int

    @property
    def block(self) -> int:
        """Threads of a CTA: the threads that move rows, the announcer's warp and the listener's warp."""
        return self.threads * self.groups + 64

    def defines(self) -> dict[str, int | str]:
        """The definitions of host_rows.cu that belong to the shape."""
        return {
            "THREADS": self.threads,
            "GROUPS": self.groups,
            "RING": self.ring,
            "AHEAD": self.ahead,
            "DEPTH": self.depth,
            "BEHIND": self.behind,
            "RESULT_RING": self.result_ring,
            "SUM_WORDS": self.gathered.sums,
            "RESULT_WORDS": self.gathered.results,
            "SUMS_LEAVING": self.gathered.sums_leaving,
            "RESULTS_LEAVING": self.gathered.results_leaving,
            "SHARED_BYTES": self.shared_bytes,
            "MAX_CTAS": MAX_CTAS,
        }


def shape_for(request: Request, world_size: int, one_shot: bool, budget: int) -> Shape:
    """The shape for messages like the request. ``budget`` is the :func:`stage_budget` of the device."""
    hidden_size, coded = request.x.shape[1], request.wire != EXACT
    vectors = hidden_size // VECTOR
    each = max(-(-vectors // WORKERS), 1)
    # Two vectors a thread are more rows a turn, and fewer turns. With more ranks a turn is long enough without, and two turns
    # of exact rows are loaded at a time.
    loaded = 1
    if each < 2 <= vectors // 32:
        each, loaded = (2, 1) if world_size == 2 else (1, 1 if coded else 2)
    threads = -(-vectors // (32 * each)) * 32
    groups = max(1, WORKERS // threads)
    row_bytes = travelling_bytes(hidden_size, request.x.dtype, WIRES[request.wire].sums)
    turn_bytes = (1 if one_shot else world_size - 1) * groups * row_bytes
    ring = min(max(MOST_RING_BYTES // turn_bytes, 2), MOST_RING)
    # With fewer turns ahead the bus idles. More turns fill it with bytes that nobody can read yet, which loads wait behind.
    most_ahead = min(4 if one_shot or coded else 5, MOST_AHEAD_BYTES // turn_bytes) + loaded - 1
    ahead = max(1, min(most_ahead, ring - 1))
    for depth in range(min(loaded, ahead), -1, -1):
        behind, result_ring = (0, 1) if one_shot else (ahead // 2 + 2, depth + ahead + 2)
        shape = shape_of(request, world_size, one_shot, threads, groups, ring, ahead, depth, behind, result_ring)
        if shape.stage_bytes <= budget:
            break
    return shape


def shape_of(
    request: Request,
    world_size: int,
    one_shot: bool,
    threads: int,
    groups: int,
    ring: int,
    ahead: int,
    depth: int,
    behind: int,
    result_ring: int,
) -> Shape:
    """The shape with these numbers; its memory sizes are computed here."""
    hidden_size, norm, wire = request.x.shape[1], request.norm, WIRES[request.wire]
    peers, each = world_size - 1, -(-hidden_size // VECTOR // threads)
    row_bytes = travelling_bytes(hidden_size, request.x.dtype, wire.sums)
    turn_bytes = (1 if one_shot else peers) * groups * row_bytes
    gathered = _gathered_words(request) if depth else Gathered()
    computed_bytes, staged = 0, vector_bytes(request.x.dtype, wire.sums) // (2 if gathered.sums else 1)
    if not one_shot:
        computed_bytes = _aligned(result_bytes(request), 16)
        staged += result_vector_bytes(request) // (2 if gathered.results else 1)
        if request.residual_out == "replicated":
            computed_bytes += hidden_size * norm.residual_dtype.itemsize
            staged += vector_bytes(norm.residual_dtype, None)
    words = 4 * groups * peers * (gathered.sums + gathered.results)
    stage_bytes = depth * _aligned(peers * each * groups * threads * staged + words, 16)
    stage_bytes += _aligned(2 * 4 * groups * (peers * gathered.sums_leaving + gathered.results_leaving), _ALIGNMENT)
    statistics = statistics_bytes(request, groups, threads // 32)
    shared_bytes = _aligned(16 + 24 * world_size + statistics, _ALIGNMENT) + stage_bytes
    half_bytes = _aligned(ring * turn_bytes + result_ring * groups * computed_bytes, _ALIGNMENT)
    return Shape(
        threads, groups, ring, ahead, depth, behind, result_ring, gathered, shared_bytes, stage_bytes, half_bytes
    )


def _gathered_words(request: Request) -> Gathered:
    """Which words gather. Those of narrow groups do not before they leave: one warp would have to store hundreds of a row.

    Where words gather, fewer transactions take the bus, but a turn has one more barrier. That pays where a call has SMs enough.
    Beside other work it does not: layers of 4096 tokens took 1994 us with it and 1763 without
    (``benchmarks/host-memory-notes.md``, "Codes beside compute").
    """
    hidden_size, norm, wire = request.x.shape[1], request.norm, WIRES[request.wire]
    if wire.sums is None or request.overlap_sms:
        return Gathered()
    of_result = norm.scale_columns or (wire.results.group if wire.results and norm.hidden_dtype != FP8 else 0)
    loaded = [hidden_size // group if group else 0 for group in (wire.sums.group, of_result)]
    leaving = [words if words <= hidden_size // _WIDE_GROUP else 0 for words in loaded]
    return Gathered(*loaded, *leaving)


def _aligned(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment


class HostRows(RowKernel):
    """Rows travel through rings in host memory. Larger messages need no larger rings. There is one CTA per SM."""

    source = Path(__file__).with_name("host_rows.cu")
    params = HostRowsParams
    most_sms = MAX_CTAS
    min_capability = LOADS_AND_STORES
    wires = True

    def __init__(self, one_shot: bool, max_sms: int = 8) -> None:
        super().__init__("host_one_shot" if one_shot else "host_two_shot", one_shot, max_sms)

    def needs(self, request: Request, world_size: int) -> dict[str, int]:
        """See :class:`Algorithm`.

        Beside other work two ranks use both forms, by the size of the message. A slot has room for both at once: growing is
        collective, and impossible in a capture.
        """
        both = world_size == 2 and request.overlap_sms > 0 and request.wire == EXACT
        forms = (True, False) if both else (self._one_shot,)
        return {OUTBOX: max(outbox_bytes(self._shape(request, world_size, one_shot)) for one_shot in forms)}

    def defines(self, request: Request, state: GroupState) -> dict[str, int | str]:
        """See :class:`RowKernel`."""
        return {"ONE_SHOT": int(self._one_shot), **self._own_shape(request, state).defines()}

    def options(self, request: Request, state: GroupState) -> dict[str, Any]:
        """See :class:`RowKernel`."""
        shape = self._own_shape(request, state)
        return {
            "block": shape.block,
            "shared_bytes": shape.shared_bytes,
            "cluster": self._cluster(request, state),
            **self.stream_options(request, state),
        }

    def _cluster(self, request: Request, state: GroupState) -> int:
        """CTAs of a cluster: may be more than one beside other work (``side_stream.py``) on devices that have clusters."""
        if not request.overlap_sms or torch.cuda.get_device_capability(state.device) < HOPPER:
            return 1
        ctas = self._ctas(request, state)
        if request.wire == EXACT or request.x.nbytes < _LONG_CODED_BYTES:
            return cluster_size(ctas, state.device)
        return cluster_size(ctas, state.device, _LONG_CODED_CLUSTER)

    def _ctas(self, request: Request, state: GroupState) -> int:
        groups = self._own_shape(request, state).groups
        turns = -(-self.local_rows(request.x.shape[0], state.world_size) // groups)
        return min(turns, request.limited(self._max_sms))

    def launches(self, request: Request, state: GroupState, slot: Slot) -> list[tuple[Structure, int]]:
        """See :class:`RowKernel`."""
        outbox = slot.buffers[OUTBOX]
        params = HostRowsParams(
            outboxes=address(outbox.table),
            state=address(outbox.state),
            status=address(slot.status),
            half_bytes=half_bytes(outbox.capacity),
            rank=state.rank,
            tokens=request.x.shape[0],
            **numbers_of(request.norm),
        )
        return [(params, self._ctas(request, state))]

    def _own_shape(self, request: Request, state: GroupState) -> Shape:
        return self._shape(request, state.world_size, self._one_shot)

    def _shape(self, request: Request, world_size: int, one_shot: bool) -> Shape:
        capability = torch.cuda.get_device_capability(request.x.device)
        return shape_for(request, world_size, one_shot, stage_budget(capability))
