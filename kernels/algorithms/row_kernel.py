"""Base of the CUDA C++ kernels that run the operator as one-shot or two-shot, a row at a time.

A one-shot rank computes all rows, so it needs all rows of the residual. If the graph keeps a shard on each rank, a one-shot
call returns a slice of the whole residual as the shard (:func:`~tw_compile.kernels.collective.spec.slice_of_whole_residual`).
The next one-shot call finds the whole residual from that slice.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from ctypes import Structure
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tw_compile.kernels.collective.algorithm import Algorithm
from tw_compile.kernels.collective.call import Call, allocators
from tw_compile.kernels.collective.cuda_variant import (
    HOPPER,
    aligned,
    headers_of,
    row_defines,
    row_obstacle,
    variant_of,
)
from tw_compile.kernels.collective.fed_call import started_by
from tw_compile.kernels.collective.prefetch import prefetched
from tw_compile.kernels.collective.slot import GroupState, Slot
from tw_compile.kernels.collective.spec import (
    Request,
    operands_of,
    rows_per_rank,
    slice_of_whole_residual,
    whole_residual,
)
from tw_compile.kernels.collective.transport import Started
from tw_compile.kernels.gemm.fed import FedRows
from tw_compile.kernels.runtime.launch import Kernel, prepare
from tw_compile.kernels.runtime.program import Program, arch_of


class RowKernel(Algorithm):
    """A CUDA C++ kernel of ``source`` with the parameters ``params``, on at most ``max_sms`` of ``most_sms`` SMs.

    ``min_capability``: the compute capability that its instructions need. ``wires``: whether its two-shot rows can travel in
    codes. ``prefetches``: whether it can have CTAs that prefetch (``prefetch.py``). Then the source has a definition PREFETCH,
    and ``params`` have a field of that name.
    """

    source: Path
    params: type[Structure]
    most_sms: int
    min_capability: tuple[int, int]
    wires = False
    prefetches = False

    def __init__(self, name: str, one_shot: bool, max_sms: int) -> None:
        if not 1 <= max_sms <= self.most_sms:
            raise ValueError(f"max_sms: expected 1 to {self.most_sms}, got {max_sms}")
        self.name = name
        self._one_shot, self._max_sms = one_shot, max_sms
        self._kernels: dict[Hashable, Kernel] = {}

    @abstractmethod
    def defines(self, request: Request, state: GroupState) -> dict[str, int | str]:
        """The definitions of the source, besides those that all sources have."""

    @abstractmethod
    def options(self, request: Request, state: GroupState) -> dict[str, Any]:
        """What :meth:`Kernel.launch` takes besides grid and stream."""

    @abstractmethod
    def launches(self, request: Request, state: GroupState, slot: Slot) -> list[tuple[Structure, int]]:
        """The parameters, without the addresses of the request's tensors, and the number of CTAs of each launch."""

    def stream_options(self, request: Request, state: GroupState) -> dict[str, Any]:
        """The options of :meth:`Kernel.launch` that depend on whether the call runs in the current stream's order or beside it.

        Programmatic launches need Hopper or later.
        """
        beside = request.overlap_sms > 0
        return {
            "programmatic": not beside and torch.cuda.get_device_capability(state.device) >= HOPPER,
            "beside": beside,
        }

    def with_prefetch(
        self,
        request: Request,
        state: GroupState,
        launches: list[tuple[Structure, int]],
        ctas_per_sm: int,
        cluster: int = 1,
    ) -> list[tuple[Structure, int]]:
        """``launches``, with clusters added to the first launch that prefetch the request's tensors on free SMs."""
        if not request.prefetch:
            return launches
        room = torch.cuda.get_device_properties(state.device).multi_processor_count * ctas_per_sm
        budget, grown = request.prefetch_bytes, []
        for params, ctas in launches:
            params.prefetch, grid = prefetched(request.prefetch, budget, ctas, room - ctas, cluster)
            grown.append((params, grid))
            budget = 0
        return grown

    def obstacle(self, request: Request, state: GroupState) -> str | None:
        """See :class:`Algorithm`."""
        if self._one_shot and request.residual_sharded and _whole_residual(request, state) is None:
            return "one-shot needs all rows of the residual"
        return self._row_obstacle(request)

    def _row_obstacle(self, request: Request) -> str | None:
        wires = self.wires and not self._one_shot
        return row_obstacle(request, self.min_capability, wires=wires, scales=True)

    def sms(self, tokens: int, world_size: int) -> int:
        """See :class:`Algorithm`."""
        return min(self.local_rows(tokens, world_size), self._max_sms)

    def local_rows(self, tokens: int, world_size: int) -> int:
        """The rows that the CTAs share out: all rows in one-shot, the rows that a rank owns in two-shot."""
        return tokens if self._one_shot else rows_per_rank(tokens, world_size)

    def prepare(self, request: Request, state: GroupState, spin_limit: int) -> None:
        """See :class:`Algorithm`."""
        served = self._of_any_size(request)
        if served is not None:
            self._kernel(served, state, spin_limit)

    def programs(self, request: Request, state: GroupState, spin_limit: int) -> list[Program]:
        """See :class:`Algorithm`."""
        served = self._of_any_size(request)
        return [] if served is None else [self.program(served, state, spin_limit)]

    def _of_any_size(self, request: Request) -> Request | None:
        """The request that the kernel serves for messages like it; None if it serves no such message."""
        if self._row_obstacle(request) is not None:
            return None
        if not self._one_shot:
            return request
        residual_out = "replicated" if request.residual_out == "sharded" else request.residual_out
        return replace(request, residual_sharded=False, residual_out=residual_out)

    def outputs(self, request: Request, state: GroupState, slot: Slot) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Algorithm`. A one-shot rank writes all rows of the residual, even if the call returns only a slice."""
        make_hidden, make_residual = allocators(request, self._residual_rows(request, state))
        return make_hidden(), make_residual()

    def _residual_rows(self, request: Request, state: GroupState) -> int:
        rows = request.residual_rows(state.world_size)
        return rows * state.world_size if self._one_shot and request.residual_out == "sharded" else rows

    def launch(self, request: Request, state: GroupState, slot: Slot, spin_limit: int) -> Started:
        """See :class:`Algorithm`."""
        request = aligned(request)
        call = self._call(request, state, slot, spin_limit)
        stream = torch.cuda.current_stream(state.device).cuda_stream
        return started_by(call, operands_of(request), request.outputs, stream, request.prefetch)

    def _call(self, request: Request, state: GroupState, slot: Slot, spin_limit: int) -> Call:
        """The launches of the request.

        In one-shot a rank computes all rows, so it needs the whole residual. If the request asks for a shard of the new
        residual, the call returns a slice of the whole residual.
        """
        tokens, world_size, rank = request.x.shape[0], state.world_size, state.rank
        residual_of = residual_out_of = None
        launched = request
        if self._one_shot and request.residual_sharded:
            launched = replace(launched, residual=_whole_residual(request, state), residual_sharded=False)

            def residual_of(shard: torch.Tensor) -> torch.Tensor:
                whole = whole_residual(shard, tokens, world_size, rank)
                assert whole is not None, "a form of calls with a whole residual has got one without"
                return whole

        if self._one_shot and request.residual_out == "sharded":
            launched = replace(launched, residual_out="replicated")

            def residual_out_of(whole: torch.Tensor) -> torch.Tensor:
                return slice_of_whole_residual(whole, world_size, rank)

        kernel = self._kernel(launched, state, spin_limit)
        launches = self.launches(launched, state, slot)
        options = self.options(launched, state)
        return Call(
            kernel,
            launches,
            options,
            *allocators(request, self._residual_rows(request, state)),
            residual_of,
            residual_out_of,
            prefetches=self.prefetches and bool(request.prefetch),
            fed=self.fed_rows(request, state, slot, spin_limit),
        )

    def fed_rows(self, request: Request, state: GroupState, slot: Slot, spin_limit: int) -> FedRows | None:
        """Where the call leaves the rows for a fed GEMM; None: all rows are in ``hidden``."""
        return None

    def _kernel(self, request: Request, state: GroupState, spin_limit: int) -> Kernel:
        """The loaded kernel. In one-shot the caller has changed ``request`` to one with a whole residual.

        Beside other work the definitions may differ.
        """
        key = (variant_of(request), request.overlap_sms > 0, state.world_size, state.device)
        kernel = self._kernels.get(key)
        if kernel is None:
            program = self.program(request, state, spin_limit)
            kernel = self._kernels[key] = prepare(program, state.device.index)
        return kernel

    def program(self, request: Request, state: GroupState, spin_limit: int) -> Program:
        """The variant of the source that serves the request. In one-shot the request has a whole residual."""
        defines = row_defines(request, state.world_size, spin_limit) | self.defines(request, state)
        if self.prefetches:
            defines["PREFETCH"] = int(bool(request.prefetch))
        arch = arch_of(torch.cuda.get_device_capability(state.device))
        return Program(self.source, self.params, arch, tuple(defines.items()), headers_of(request))


def _whole_residual(request: Request, state: GroupState) -> torch.Tensor | None:
    assert request.residual is not None
    return whole_residual(request.residual, request.x.shape[0], state.world_size, state.rank)
