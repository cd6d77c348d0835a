"""Launches of ``stream.cu``: two-shot, rows streamed through shared memory by bulk copies, for large messages."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from ctypes import Structure, c_int32, c_void_p
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from tw_compile.kernels.collective.algorithm import Algorithm
from tw_compile.kernels.collective.call import Call, allocators
from tw_compile.kernels.collective.cuda_variant import (
    NUMBER_FIELDS,
    POINTER_FIELDS,
    VECTOR,
    address,
    aligned,
    headers_of,
    numbers_of,
    row_defines,
    row_obstacle,
    variant_of,
)
from tw_compile.kernels.collective.side_stream import cluster_size
from tw_compile.kernels.collective.slot import GroupState, Slot
from tw_compile.kernels.collective.spec import Request, operands_of, rows_per_rank
from tw_compile.kernels.collective.transport import Started
from tw_compile.kernels.runtime.barrier import MAX_CTAS
from tw_compile.kernels.runtime.launch import Kernel, prepare
from tw_compile.kernels.runtime.program import FULL_SHARED_BYTES, FULL_SHARED_MAJORS, Program, arch_of

_HEADER_BYTES = 2048  # an upper bound of `Shared` in stream.cu, which checks it
_BULK_BYTES = 16
_ROW_ALIGNMENT = 128
_VECTORS_PER_THREAD = 4  # what registers can hold of a sum, a residual and a weight
_CTA_THREADS = 512  # of all groups together, as far as one row's group is not larger
_MAX_GROUPS = 8
_LEAST_THREADS = _CTA_THREADS // _MAX_GROUPS
_MAX_STAGES = 32
_ENOUGH_STAGES = {3: 8, 2: 2}  # by results
_MAX_BLOCK = 1024


class StreamParams(Structure):
    """``StreamParams`` of stream.cu."""

    _fields_ = [
        *POINTER_FIELDS,
        *((name, c_void_p) for name in ("x_table", "hidden_table", "residual_table", "pads", "epochs", "status")),
        *((name, c_int32) for name in ("rank", "tokens")),
        *NUMBER_FIELDS,
    ]


@dataclass(frozen=True)
class Shape:
    """How a CTA is laid out.

    ``threads``: of one group; ``stages``: rows of one rank that fit in a group's ring; ``results``: rows that a group has
    normalised and that are not copied yet.
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

    ``residual_itemsize``: of the new residual, 0 for none; ``collected_itemsize``: of the widest rows that are copied back
    from peers, 0 for none.
    """
    threads = max(_LEAST_THREADS, _threads(hidden_size, _VECTORS_PER_THREAD))
    groups = max(1, min(_MAX_GROUPS, _CTA_THREADS // threads))
    result = _aligned(hidden_size * hidden_itemsize) + _aligned(hidden_size * residual_itemsize)
    stage = _aligned(hidden_size * max(x_itemsize, collected_itemsize))
    while groups > 1 and _stages(groups, 1, result, stage) < 2:
        groups -= 1
    results = 1
    if groups == 1:
        # It has the CTA to itself, and writes its next result while two others are copied if enough rows are under way.
        fewer = (_threads(hidden_size, each) for each in range(2, _VECTORS_PER_THREAD))
        threads = next((more for more in fewer if threads <= more <= _CTA_THREADS), threads)
        results = next((n for n in (3, 2) if _stages(1, n, result, stage) >= _ENOUGH_STAGES[n]), 1)
    return Shape(threads, groups, _stages(groups, results, result, stage), results)


def _threads(hidden_size: int, vectors: int) -> int:
    """Whole warps that hold a row, ``vectors`` vectors each."""
    return -(-hidden_size // (VECTOR * vectors * 32)) * 32


def _stages(groups: int, results: int, result: int, stage: int) -> int:
    """Stages of each group's ring beside the groups' results; all in bytes."""
    room = FULL_SHARED_BYTES - _HEADER_BYTES - groups * results * result
    return min(_MAX_STAGES, room // stage) // groups


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ROW_ALIGNMENT) * _ROW_ALIGNMENT


class Stream(Algorithm):
    """At most ``max_sms`` CTAs, one an SM.

    Results are ordinary tensors, or the slot's own memory where the request lets them (``results_in_slot``): peers write there
    directly, and nothing is copied afterwards.
    """

    name = "stream"

    def __init__(self, max_sms: int = 16) -> None:
        if not 1 <= max_sms <= MAX_CTAS:
            raise ValueError(f"max_sms: expected 1 to {MAX_CTAS}, got {max_sms}")
        self._max_sms = max_sms
        self._kernels: dict[Hashable, tuple[Kernel, Shape]] = {}

    def obstacle(self, request: Request, state: GroupState) -> str | None:
        obstacle = row_obstacle(request)
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

    def sms(self, tokens: int, world_size: int) -> int:
        return min(rows_per_rank(tokens, world_size), self._max_sms)

    def needs(self, request: Request, world_size: int) -> dict[str, int]:
        norm, elements = request.norm, request.x.numel()
        needs = {"x": request.x.nbytes, "hidden": elements * norm.hidden_dtype.itemsize}
        if request.residual_out == "replicated":
            needs["residual"] = elements * norm.residual_dtype.itemsize
        return needs

    def prepare(self, request: Request, state: GroupState, spin_limit: int) -> None:
        if self.obstacle(request, state) is None:
            for staged in (False, True):
                self._kernel(request, state, spin_limit, staged)

    def launch(self, request: Request, state: GroupState, slot: Slot, spin_limit: int) -> Started:
        request = aligned(request)
        call = self._call(request, state, slot, spin_limit)
        stream = torch.cuda.current_stream(state.device).cuda_stream
        return Started(*call.enqueue(operands_of(request), request.outputs, stream), call=call)

    def _call(self, request: Request, state: GroupState, slot: Slot, spin_limit: int) -> Call:
        x = request.x
        staged = x.data_ptr() != slot.buffers["x"].tensor.data_ptr()
        kernel, shape = self._kernel(request, state, spin_limit, staged)
        params = StreamParams(
            x_table=address(slot.buffers["x"].table),
            hidden_table=address(slot.buffers["hidden"].table),
            residual_table=address(slot.buffers["residual"].table) if request.residual_out == "replicated" else None,
            pads=address(slot.pads.table),
            epochs=address(slot.epochs),
            status=address(slot.status),
            rank=state.rank,
            tokens=x.shape[0],
            **numbers_of(request.norm),
        )
        ctas = request.limited(self.sms(x.shape[0], state.world_size))
        options = {
            "block": shape.block,
            "shared_bytes": FULL_SHARED_BYTES,
            "cluster": cluster_size(ctas, state.device) if request.overlap_sms else 1,
            "programmatic": not request.overlap_sms,
            "beside": request.overlap_sms > 0,
        }
        return Call(kernel, [(params, ctas)], options, *self._allocators(request, state, slot))

    def outputs(self, request: Request, state: GroupState, slot: Slot) -> tuple[torch.Tensor, torch.Tensor]:
        if request.outputs is not None:
            return request.outputs
        hidden, residual_out = self._allocators(request, state, slot)
        return hidden(), residual_out()

    def _allocators(
        self, request: Request, state: GroupState, slot: Slot
    ) -> tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]:
        hidden, residual_out = allocators(request, request.residual_rows(state.world_size))
        if request.results_in_slot:
            norm, shape = request.norm, tuple(request.x.shape)
            hidden = partial(slot.buffers["hidden"].view(shape, norm.hidden_dtype).view, shape)
            if request.residual_out == "replicated":
                residual_out = partial(slot.buffers["residual"].view(shape, norm.residual_dtype).view, shape)
        return hidden, residual_out

    def _shape(self, request: Request) -> Shape:
        hidden, collected = request.norm.hidden_dtype.itemsize, 0
        residual = 0 if request.residual_out == "none" else request.norm.residual_dtype.itemsize
        if not request.results_in_slot:
            collected = max(hidden, residual) if request.residual_out == "replicated" else hidden
        return shape_for(request.x.shape[1], request.x.element_size(), hidden, residual, collected)

    def _kernel(self, request: Request, state: GroupState, spin_limit: int, staged: bool) -> tuple[Kernel, Shape]:
        key = (variant_of(request), staged, state.world_size, state.device)
        if key not in self._kernels:
            self._kernels[key] = self._prepare(request, state, spin_limit, staged)
        return self._kernels[key]

    def _prepare(self, request: Request, state: GroupState, spin_limit: int, staged: bool) -> tuple[Kernel, Shape]:
        shape = self._shape(request)
        defines = row_defines(request, state.world_size, spin_limit)
        defines |= shape.defines() | {
            "STAGED": int(staged),
            "PULL": int(not request.results_in_slot),
            "SHARED_BYTES": FULL_SHARED_BYTES,
        }
        arch = arch_of(torch.cuda.get_device_capability(state.device))
        source = Path(__file__).with_name("stream.cu")
        program = Program(source, StreamParams, arch, tuple(defines.items()), headers_of(request))
        return prepare(program, state.device.index), shape
