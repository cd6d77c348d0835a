"""Launches of ``stream.cu``: two-shot, rows streamed through shared memory by bulk copies, for large messages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from tw_compile.kernels.algorithms.barrier_kernel import BarrierKernel, BarrierParams
from tw_compile.kernels.collective.cuda_variant import VECTOR, row_obstacle
from tw_compile.kernels.collective.slot import GroupState
from tw_compile.kernels.collective.spec import Request
from tw_compile.kernels.runtime.program import FULL_SHARED_BYTES, FULL_SHARED_MAJORS

_HEADER_BYTES = 2048  # an upper bound of `Shared` in stream.cu, which checks it
_BULK_BYTES = 16
_ROW_ALIGNMENT = 128
_VECTORS_PER_THREAD = 4  # registers can hold this many vectors of a sum, a residual and a weight
_CTA_THREADS = 512  # of all groups together, unless the group of one row is larger
_MAX_GROUPS = 8
_LEAST_THREADS = _CTA_THREADS // _MAX_GROUPS
_MAX_STAGES = 32
_ENOUGH_STAGES = {3: 8, 2: 2}  # stages that a ring must have at least, by the number of results
_MAX_BLOCK = 1024


class StreamParams(BarrierParams):
    """``StreamParams`` of stream.cu."""


@dataclass(frozen=True)
class Shape:
    """How a CTA is laid out.

    ``threads``: threads of one group. ``stages``: rows of one rank that fit in a group's ring. ``results``: normalised rows of
    a group that may wait to be copied.
    """

    threads: int
    groups: int
    stages: int
    results: int = 1

    @property
    def block(self) -> int:
        return self.groups * self.threads + 64

    def defines(self) -> dict[str, int | str]:
        """The definitions of stream.cu."""
        return {"THREADS": self.threads, "GROUPS": self.groups, "STAGES": self.stages, "RESULTS": self.results}


def shape_for(
    hidden_size: int, x_itemsize: int, hidden_itemsize: int, residual_itemsize: int, collected_itemsize: int
) -> Shape:
    """The CTA for rows of ``hidden_size``.

    ``residual_itemsize``: item size of the new residual; 0 without one. ``collected_itemsize``: item size of the widest rows
    that are copied back from peers; 0 without any.
    """
    threads = max(_LEAST_THREADS, _threads(hidden_size, _VECTORS_PER_THREAD))
    groups = max(1, min(_MAX_GROUPS, _CTA_THREADS // threads))
    result = _aligned(hidden_size * hidden_itemsize) + _aligned(hidden_size * residual_itemsize)
    stage = _aligned(hidden_size * max(x_itemsize, collected_itemsize))
    while groups > 1 and _stages(groups, 1, result, stage) < 2:
        groups -= 1
    results = 1
    if groups == 1:
        # The group has the CTA to itself. If enough rows are under way, it writes its next result while two others are copied.
        fewer = (_threads(hidden_size, each) for each in range(2, _VECTORS_PER_THREAD))
        threads = next((more for more in fewer if threads <= more <= _CTA_THREADS), threads)
        results = next((n for n in (3, 2) if _stages(1, n, result, stage) >= _ENOUGH_STAGES[n]), 1)
    return Shape(threads, groups, _stages(groups, results, result, stage), results)


def _threads(hidden_size: int, vectors: int) -> int:
    """Threads, in whole warps, that hold a row with ``vectors`` vectors per thread."""
    return -(-hidden_size // (VECTOR * vectors * 32)) * 32


def _stages(groups: int, results: int, result: int, stage: int) -> int:
    """How many stages of ``stage`` bytes each group's ring has, beside ``results`` results of ``result`` bytes per group."""
    room = FULL_SHARED_BYTES - _HEADER_BYTES - groups * results * result
    return min(_MAX_STAGES, room // stage) // groups


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ROW_ALIGNMENT) * _ROW_ALIGNMENT


class Stream(BarrierKernel):
    """Two-shot with bulk copies, on at most ``max_sms`` CTAs, one per SM."""

    name = "stream"
    source = Path(__file__).with_name("stream.cu")
    params = StreamParams

    def __init__(self, max_sms: int = 16) -> None:
        super().__init__(max_sms)

    def obstacle(self, request: Request, state: GroupState) -> str | None:
        """See :class:`Algorithm`."""
        obstacle = row_obstacle(request, scales=True)
        if obstacle is not None:
            return obstacle
        hidden_size = request.x.shape[1]
        row_bytes = hidden_size * request.norm.hidden_dtype.itemsize
        if row_bytes % _BULK_BYTES:
            return f"a row of {row_bytes} bytes is not a multiple of {_BULK_BYTES} bytes"
        major, minor = torch.cuda.get_device_capability(request.x.device)
        if major not in FULL_SHARED_MAJORS:
            return (
                f"compute capability {major}.{minor} has less than {FULL_SHARED_BYTES} bytes of shared memory for a CTA"
            )
        shape = self._shape(request)
        if shape.stages < 2 or shape.block > _MAX_BLOCK:
            return f"rows of {hidden_size} x {request.x.dtype} are too long for one CTA"
        return None

    def defines(self, request: Request, state: GroupState) -> dict[str, int | str]:
        """See :class:`BarrierKernel`."""
        return self._shape(request).defines() | {"SHARED_BYTES": FULL_SHARED_BYTES}

    def cta(self, request: Request) -> dict[str, int]:
        """See :class:`BarrierKernel`."""
        return {"block": self._shape(request).block, "shared_bytes": FULL_SHARED_BYTES}

    def _shape(self, request: Request) -> Shape:
        hidden, collected = request.norm.hidden_dtype.itemsize, 0
        residual = 0 if request.residual_out == "none" else request.norm.residual_dtype.itemsize
        if not request.results_in_slot:
            collected = max(hidden, residual) if request.residual_out == "replicated" else hidden
        return shape_for(request.x.shape[1], request.x.element_size(), hidden, residual, collected)
