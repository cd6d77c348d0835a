"""Base of the CUDA C++ kernels whose ranks meet in barriers: two-shot over the slot's own memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable
from ctypes import Structure, c_int32, c_void_p
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tw_compile.kernels.collective.algorithm import Algorithm
from tw_compile.kernels.collective.call import Call, allocators
from tw_compile.kernels.collective.cuda_variant import (
    LAST_FIELDS,
    POINTER_FIELDS,
    address,
    aligned,
    headers_of,
    numbers_of,
    row_defines,
    variant_of,
)
from tw_compile.kernels.collective.side_stream import cluster_size
from tw_compile.kernels.collective.slot import GroupState, Slot
from tw_compile.kernels.collective.spec import Request, operands_of, rows_per_rank, scales_bytes
from tw_compile.kernels.collective.transport import Started
from tw_compile.kernels.runtime.barrier import MAX_CTAS
from tw_compile.kernels.runtime.launch import Kernel, prepare
from tw_compile.kernels.runtime.program import Program, arch_of


class BarrierParams(Structure):
    """The fields of these kernels' parameter structs. Each kernel gives the struct a name of its own."""

    _fields_ = [
        *POINTER_FIELDS,
        *((name, c_void_p) for name in ("x_table", "hidden_table", "residual_table", "pads", "epochs", "status")),
        *((name, c_int32) for name in ("rank", "tokens")),
        *LAST_FIELDS,
    ]


class BarrierKernel(Algorithm):
    """A CUDA C++ kernel of ``source`` with the parameters ``params``, on at most ``max_sms`` CTAs, one per SM.

    Results are ordinary tensors, or the slot's own memory if the request allows it (``results_in_slot``). In the slot nothing
    has to be copied to them once the ranks have met.
    """

    source: Path
    params: type[BarrierParams]

    def __init__(self, max_sms: int) -> None:
        if not 1 <= max_sms <= MAX_CTAS:
            raise ValueError(f"max_sms: expected 1 to {MAX_CTAS}, got {max_sms}")
        self._max_sms = max_sms
        self._kernels: dict[Hashable, Kernel] = {}

    @abstractmethod
    def defines(self, request: Request, state: GroupState) -> dict[str, int | str]:
        """The definitions of the source, besides those that all sources have."""

    @abstractmethod
    def cta(self, request: Request) -> dict[str, int]:
        """The ``block`` and the ``shared_bytes`` of :meth:`Kernel.launch`."""

    def sms(self, tokens: int, world_size: int) -> int:
        """See :class:`Algorithm`."""
        return min(rows_per_rank(tokens, world_size), self._max_sms)

    def needs(self, request: Request, world_size: int) -> dict[str, int]:
        """See :class:`Algorithm`."""
        norm, elements = request.norm, request.x.numel()
        needs = {"x": request.x.nbytes, "hidden": elements * norm.hidden_dtype.itemsize}
        needs["hidden"] += scales_bytes(request.x.shape[0], request.x.shape[1], norm.scale_columns)
        if request.residual_out == "replicated":
            needs["residual"] = elements * norm.residual_dtype.itemsize
        return needs

    def prepare(self, request: Request, state: GroupState, spin_limit: int) -> None:
        """See :class:`Algorithm`."""
        if self.obstacle(request, state) is None:
            for staged in (False, True):
                self._kernel(request, state, spin_limit, staged)

    def programs(self, request: Request, state: GroupState, spin_limit: int) -> list[Program]:
        """See :class:`Algorithm`."""
        if self.obstacle(request, state) is not None:
            return []
        return [self.program(request, state, spin_limit, staged) for staged in (False, True)]

    def launch(self, request: Request, state: GroupState, slot: Slot, spin_limit: int) -> Started:
        """See :class:`Algorithm`."""
        request = aligned(request)
        call = self._call(request, state, slot, spin_limit)
        stream = torch.cuda.current_stream(state.device).cuda_stream
        return Started(*call.enqueue(operands_of(request), request.outputs, stream), call=call)

    def _call(self, request: Request, state: GroupState, slot: Slot, spin_limit: int) -> Call:
        x = request.x
        staged = x.data_ptr() != slot.buffers["x"].tensor.data_ptr()
        params = self.params(
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
        options: dict[str, Any] = {
            **self.cta(request),
            "cluster": cluster_size(ctas, state.device) if request.overlap_sms else 1,
            "programmatic": not request.overlap_sms,
            "beside": request.overlap_sms > 0,
        }
        kernel = self._kernel(request, state, spin_limit, staged)
        return Call(kernel, [(params, ctas)], options, *self._allocators(request, state, slot))

    def outputs(self, request: Request, state: GroupState, slot: Slot) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Algorithm`."""
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

    def _kernel(self, request: Request, state: GroupState, spin_limit: int, staged: bool) -> Kernel:
        key = (variant_of(request), staged, state.world_size, state.device)
        kernel = self._kernels.get(key)
        if kernel is None:
            program = self.program(request, state, spin_limit, staged)
            kernel = self._kernels[key] = prepare(program, state.device.index)
        return kernel

    def program(self, request: Request, state: GroupState, spin_limit: int, staged: bool) -> Program:
        """The variant of the source that serves the request; ``staged``: ``x`` does not lie in the slot."""
        defines = row_defines(request, state.world_size, spin_limit) | self.defines(request, state)
        defines |= {"STAGED": int(staged), "PULL": int(not request.results_in_slot)}
        arch = arch_of(torch.cuda.get_device_capability(state.device))
        return Program(self.source, self.params, arch, tuple(defines.items()), headers_of(request))
