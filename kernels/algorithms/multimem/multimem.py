"""Launches of ``multimem.cu``: two-shot by NVLink multicast, where the switch adds up rows and hands them to all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tw_compile.kernels.algorithms.barrier_kernel import BarrierKernel, BarrierParams
from tw_compile.kernels.collective.cuda_variant import VECTOR, row_obstacle
from tw_compile.kernels.collective.slot import GroupState
from tw_compile.kernels.collective.spec import Request
from tw_compile.kernels.epilogues import EPILOGUES

ACCESS_BYTES = 16
"""Bytes of one multicast access; rows are multiples of it."""

_CTA_THREADS = 512  # of all groups together, unless the group of one row is larger
_MAX_GROUPS = 8
_VECTORS_PER_THREAD = 2
_VECTORS_OF_LONG_ROWS = 4
_BYTES_AHEAD = 32 * 1024
"""Bytes of sums that a CTA has in flight: with them 16 CTAs fill a link if the switch takes some 2 us."""
_MOST_DEPTH = 4
_WORDS_AHEAD = 48
"""How many registers of a thread may hold data that is on its way, if the thread has 128 registers."""


class MultimemParams(BarrierParams):
    """``MultimemParams`` of multimem.cu."""


@dataclass(frozen=True)
class Shape:
    """How a CTA is laid out. ``threads``: threads of one group; ``depth``: how many rows of a group are on their way."""

    threads: int
    groups: int
    depth: int

    @property
    def block(self) -> int:
        return self.groups * self.threads

    def defines(self) -> dict[str, int | str]:
        """The definitions of multimem.cu."""
        return {"THREADS": self.threads, "GROUPS": self.groups, "DEPTH": self.depth}


def shape_for(hidden_size: int, x_itemsize: int, residual_itemsize: int) -> Shape:
    """The CTA for rows of ``hidden_size``. ``residual_itemsize``: item size of the residual that is read; 0 without one."""
    vectors = hidden_size // VECTOR
    each = _VECTORS_PER_THREAD if vectors <= _CTA_THREADS * _VECTORS_PER_THREAD else _VECTORS_OF_LONG_ROWS
    threads = -(-vectors // (32 * each)) * 32
    groups = max(1, min(_MAX_GROUPS, _CTA_THREADS // threads))
    words = each * VECTOR * (x_itemsize + residual_itemsize) // 4  # registers of a thread, per row
    enough = -(-_BYTES_AHEAD // (groups * hidden_size * x_itemsize))
    return Shape(threads, groups, max(1, min(enough, _WORDS_AHEAD // words, _MOST_DEPTH)))


class Multimem(BarrierKernel):
    """Two-shot by multicast on at most ``max_sms`` CTAs, one per SM, for groups whose buffers all have multicast addresses.

    ``emulated``, for tests: run on any group, with loads from peers and stores to them in place of the switch's instructions.
    """

    name = "multimem"
    source = Path(__file__).with_name("multimem.cu")
    params = MultimemParams

    def __init__(self, max_sms: int = 16, emulated: bool = False) -> None:
        super().__init__(max_sms)
        self._emulated = emulated

    def obstacle(self, request: Request, state: GroupState) -> str | None:
        """See :class:`Algorithm`."""
        if not (self._emulated or state.multimem):
            return "the group has no multicast addresses"
        obstacle = row_obstacle(request)
        if obstacle is not None:
            return obstacle
        row_bytes = request.x.shape[1] * request.norm.hidden_dtype.itemsize
        if row_bytes % ACCESS_BYTES:
            return f"a row of {row_bytes} bytes is not a multiple of {ACCESS_BYTES} bytes"
        return None

    def defines(self, request: Request, state: GroupState) -> dict[str, int | str]:
        """See :class:`BarrierKernel`."""
        return self._shape(request).defines() | {"EMULATED_MULTICAST": int(self._emulated)}

    def cta(self, request: Request) -> dict[str, int]:
        """See :class:`BarrierKernel`. Shared memory has statistics of the warps, of two rows of each group."""
        shape = self._shape(request)
        statistics = EPILOGUES[request.norm.epilogue].statistics_bytes
        return {"block": shape.block, "shared_bytes": 2 * shape.block // 32 * statistics}

    def _shape(self, request: Request) -> Shape:
        residual = 0 if request.residual is None else request.residual.element_size()
        return shape_for(request.x.shape[1], request.x.element_size(), residual)
