"""Launches of ``push.cu``: one-shot and two-shot without barriers, for small and medium messages."""

from __future__ import annotations

from ctypes import Structure, c_int32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from tw_compile.kernels.algorithms.push.entries import CLUSTERS
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
    statistics_bytes,
    travelling_bytes,
)
from tw_compile.kernels.collective.prefetch import Prefetched
from tw_compile.kernels.collective.side_stream import cluster_size
from tw_compile.kernels.collective.slot import INBOX, GroupState, Slot
from tw_compile.kernels.collective.spec import Request
from tw_compile.kernels.collective.wires import WIRES

PARTS = 3
MOST_INBOX_BYTES = 256 * 2**20
_PART_ALIGNMENT = 128
MOST_SHARED_COLUMNS = 32 * 32 * VECTOR
"""Of a row that a cluster shares: 32 warps have a vector in each lane, and a lane for each warp adds up what they find."""


class PushParams(Structure):
    """``PushParams`` of push.cu."""

    _fields_ = [
        *POINTER_FIELDS,
        *((name, c_void_p) for name in ("inboxes", "state", "status")),
        ("part_bytes", c_uint64),
        *((name, c_int32) for name in ("rank", "tokens", "begin", "end")),
        *LAST_FIELDS,
        ("prefetch", Prefetched),
    ]


def part_bytes(capacity: int) -> int:
    """Bytes of each of the three parts of an inbox of ``capacity`` bytes."""
    return capacity // PARTS // _PART_ALIGNMENT * _PART_ALIGNMENT


def threads_for(hidden_size: int, world_size: int, cluster: int = 1) -> int:
    """Threads of each of the ``cluster`` CTAs that hold a row. Each thread holds one vector of it, if CTAs can have so many.

    A thread also holds a vector from each peer. With many peers, half as many threads get twice the registers.
    """
    vectors = hidden_size // VECTOR
    each = -(-vectors // (cluster * _max_threads(world_size)))
    return -(-vectors // (32 * cluster * each)) * 32


def shared_bytes_for(request: Request, threads: int, cluster: int) -> int:
    """Dynamic shared memory of a CTA of ``threads`` threads: a row's statistics, and a cluster's mbarriers before them."""
    mbarriers = 3 if request.norm.scale_columns else 2
    return (8 * mbarriers if cluster > 1 else 0) + statistics_bytes(request, 1, cluster * threads // 32)


def ctas_per_sm(threads: int, world_size: int) -> int:
    """How many CTAs share an SM: two at most, for short rows."""
    return min(2, _max_threads(world_size) // threads)


def _max_threads(world_size: int) -> int:
    return 1024 if world_size <= 4 else 512


class Push(RowKernel):
    """Rows go to the peers' inboxes, and their words show by themselves that they have arrived.

    A launch has CTAs for at most ``max_sms`` SMs. Calls on one slot need only one resident CTA. If calls on several slots
    overlap, all CTAs of all but one of these calls must be resident, on every rank (``kernels/runtime/barrier.py``). Choose
    ``max_sms`` for that. Messages that would need more than :data:`MOST_INBOX_BYTES` take several launches.

    With ``cluster`` above 1, clusters of so many CTAs (:data:`entries.CLUSTERS`) share rows, which travel as they are. Then a
    whole cluster must be resident.
    """

    source = Path(__file__).with_name("push.cu")
    params: type[Structure] = PushParams
    most_sms = 128
    min_capability = LOADS_AND_STORES
    wires = True
    prefetches = True

    def __init__(self, one_shot: bool, max_sms: int = 128, cluster: int = 1) -> None:
        name = "push_one_shot" if one_shot else "push_two_shot"
        super().__init__(name if cluster == 1 else f"{name}_{CLUSTERS[cluster]}", one_shot, max_sms)
        self._cluster = cluster
        self.wires = cluster == 1
        if cluster > 1:
            self.min_capability = HOPPER

    def obstacle(self, request: Request, state: GroupState) -> str | None:
        """See :class:`Algorithm`."""
        if self._one_shot and request.overlap_sms:
            return "one-shot is for messages that are over before others could run beside them"
        return super().obstacle(request, state)

    def _row_obstacle(self, request: Request) -> str | None:
        if self._cluster > 1 and request.x.shape[1] > MOST_SHARED_COLUMNS:
            return f"clusters share rows of up to {MOST_SHARED_COLUMNS} columns"
        if self._cluster > 1 and cluster_size(self._cluster, request.x.device) == 1:
            return "the device is too small for clusters"
        return super()._row_obstacle(request)

    def needs(self, request: Request, world_size: int) -> dict[str, int]:
        """See :class:`Algorithm`."""
        rows, row_bytes = self.rows_of_a_launch(request, world_size), self._row_bytes(request, world_size)
        return {INBOX: PARTS * (rows * row_bytes + _PART_ALIGNMENT)}

    def rows_of_a_launch(self, request: Request, world_size: int) -> int:
        """Local rows that the largest of the call's launches exchanges. All launches have about the same size."""
        rows = self.local_rows(request.x.shape[0], world_size)
        most = max(1, (MOST_INBOX_BYTES // PARTS - _PART_ALIGNMENT) // self._row_bytes(request, world_size))
        return -(-rows // -(-rows // most))

    def _row_bytes(self, request: Request, world_size: int) -> int:
        """Bytes that each local row takes in a part of an inbox."""
        hidden_size, norm, wire = request.x.shape[1], request.norm, WIRES[request.wire]
        row_bytes = travelling_bytes(hidden_size, request.x.dtype, wire.sums)
        if not self._one_shot:
            row_bytes += self._returned_bytes(request)
            if request.residual_out == "replicated":
                row_bytes += hidden_size * norm.residual_dtype.itemsize
        return (world_size - 1) * row_bytes

    def _returned_bytes(self, request: Request) -> int:
        """Bytes of :meth:`_row_bytes` that a normalised row takes, for each peer."""
        return result_bytes(request)

    def defines(self, request: Request, state: GroupState) -> dict[str, int | str]:
        """See :class:`RowKernel`."""
        threads = self._threads(request, state)
        ctas = ctas_per_sm(threads, state.world_size)
        shape = {"THREADS": threads, "CTAS_PER_SM": ctas, "CLUSTER": self._cluster}
        return {"ONE_SHOT": int(self._one_shot), "FED": 0, **shape}

    def options(self, request: Request, state: GroupState) -> dict[str, Any]:
        """See :class:`RowKernel`."""
        threads = self._threads(request, state)
        return {
            "block": threads,
            "shared_bytes": shared_bytes_for(request, threads, self._cluster),
            **({} if self._cluster == 1 else {"cluster": self._cluster}),
            **self.stream_options(request, state),
        }

    def _threads(self, request: Request, state: GroupState) -> int:
        return threads_for(request.x.shape[1], state.world_size, self._cluster)

    def launches(self, request: Request, state: GroupState, slot: Slot) -> list[tuple[Structure, int]]:
        """See :class:`RowKernel`."""
        tokens, inbox = request.x.shape[0], slot.buffers[INBOX]
        assert inbox.state is not None
        rows, most = self.local_rows(tokens, state.world_size), self.rows_of_a_launch(request, state.world_size)
        ctas_each = ctas_per_sm(self._threads(request, state), state.world_size)
        clusters = max(1, request.limited(self._max_sms) * ctas_each // self._cluster)
        launches: list[tuple[Structure, int]] = []
        for begin in range(0, rows, most):
            end = min(begin + most, rows)
            params = self.params(
                inboxes=address(inbox.table),
                state=address(inbox.state),
                status=address(slot.status),
                part_bytes=part_bytes(inbox.capacity),
                rank=state.rank,
                tokens=tokens,
                begin=begin,
                end=end,
                **numbers_of(request.norm),
                **self._more_params(slot),
            )
            launches.append((params, self._cluster * min(end - begin, clusters)))
        return self.with_prefetch(request, state, launches, ctas_each, self._cluster)

    def _more_params(self, slot: Slot) -> dict[str, Any]:
        """Additional parameters that only a subclass's ``params`` have."""
        return {}
