"""The transports under check, by name, and calls of them that fail the check when something else served the call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import Any

import torch

from tw_compile.harness.problems import Context, Results
from tw_compile.kernels.algorithms import ALGORITHMS as REGISTRY
from tw_compile.kernels.algorithms.push.entries import CLUSTERS
from tw_compile.kernels.algorithms.push.push import MOST_SHARED_COLUMNS
from tw_compile.kernels.collective import ops
from tw_compile.kernels.collective import transport as registry
from tw_compile.kernels.collective.algorithm import Algorithm
from tw_compile.kernels.collective.call import Call, Outputs
from tw_compile.kernels.collective.slot import GroupState, Slot
from tw_compile.kernels.collective.spec import Operands, Request
from tw_compile.kernels.collective.transport import Started, Transport, get_transport
from tw_compile.kernels.collective.transports import TRANSPORTS
from tw_compile.kernels.transports.slot_transport import SlotTransport

ALGORITHMS: dict[str, Callable[[], Algorithm]] = {
    checked.name: partial(entry.make, **dict(checked.options)) for entry in REGISTRY for checked in entry.checked
}
"""Kernels under check. "emulated_multimem" has loads and stores of peers in the place of the switch's instructions."""
TRANSPORT_OF = {checked.name: entry.transport for entry in REGISTRY for checked in entry.checked}
"""Of an algorithm under check."""
IN_SLOT = {checked.name for entry in REGISTRY for checked in entry.checked if checked.in_slot}
"""Get messages that were made in the slot's memory, and leave their results there."""
MOST_COLUMNS = {
    checked.name: MOST_SHARED_COLUMNS
    for entry in REGISTRY
    for checked in entry.checked
    if checked.name.endswith(tuple(f"_{clusters}" for clusters in CLUSTERS.values()))
}
"""Of the rows that an algorithm under check serves, where there is such a limit."""
NEED_WHOLE_RESIDUALS = {checked.name for entry in REGISTRY if entry.needs_whole_residual for checked in entry.checked}


Factors = tuple[torch.Tensor, torch.Tensor]
"""``a [tokens, k]`` and ``b [k, hidden]``, whose product is a message."""

Work = Callable[[], object]
"""Enqueues something on the current stream."""


class Counting(Algorithm):
    """Does as ``inner``, and counts its launches, captured ones too, and those of messages that lay in the slot."""

    def __init__(self, inner: Algorithm) -> None:
        self._inner = inner
        self.launches = 0
        self.launches_in_slot = 0

    def obstacle(self, request: Request, state: GroupState) -> str | None:
        return self._inner.obstacle(request, state)

    def sms(self, tokens: int, world_size: int) -> int:
        return self._inner.sms(tokens, world_size)

    def needs(self, request: Request, world_size: int) -> dict[str, int]:
        return self._inner.needs(request, world_size)

    def prepare(self, request: Request, state: GroupState, spin_limit: int) -> None:
        self._inner.prepare(request, state, spin_limit)

    def outputs(self, request: Request, state: GroupState, slot: Slot) -> Results:
        return self._inner.outputs(request, state, slot)

    def launch(self, request: Request, state: GroupState, slot: Slot, spin_limit: int) -> Started:
        self.count(request.x, slot)
        started = self._inner.launch(request, state, slot, spin_limit)
        if started.call is None:
            return started
        options = {field.name: getattr(started.call, field.name) for field in fields(started.call)}
        return replace(started, call=CountedCall(**options, counting=self, in_slot=slot))

    def count(self, x: torch.Tensor, slot: Slot) -> None:
        """A launch for the message ``x``."""
        self.launches += 1
        self.launches_in_slot += "x" in slot.buffers and x.data_ptr() == slot.buffers["x"].tensor.data_ptr()


@dataclass(frozen=True, kw_only=True)
class CountedCall(Call):
    """Makes known calls, which ask no algorithm, count as launches of the one that made the first of their form."""

    counting: Counting
    in_slot: Slot

    def enqueue(
        self,
        operands: Operands,
        outputs: Outputs | None,
        stream: int,
        prefetch: Sequence[torch.Tensor] | None = None,
    ) -> Outputs:
        self.counting.count(operands.x, self.in_slot)
        return super().enqueue(operands, outputs, stream, prefetch)


class Subject:
    """A transport under check: one of :data:`ALGORITHMS`, or by the name of a transport that isn't peer to peer."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.transport: Transport
        self._algorithm: Counting | None = None
        if name in ALGORITHMS:
            self._algorithm = Counting(ALGORITHMS[name]())
            self.transport = TRANSPORTS[TRANSPORT_OF[name]].make(self._algorithm)
        else:
            self.transport = get_transport(name)
        # Where operators look for a transport.
        registry.instances[self._operator_name] = self.transport

    @property
    def _operator_name(self) -> str:
        return f"{self.name} under check"

    @property
    def algorithm(self) -> Counting:
        """Of a peer-to-peer transport."""
        assert self._algorithm is not None, self.name
        return self._algorithm

    def state(self, request: Request) -> GroupState:
        """Of a peer-to-peer transport, for the group of ``request``, which has been used."""
        assert isinstance(self.transport, SlotTransport)
        return self.transport.states[request.group_name, request.x.device]

    def start(
        self, ctx: Context, request: Request, factors: Factors | None = None, beside: Work | None = None
    ) -> Results:
        """Results of one call, in memory of their own. A failure is recorded if another algorithm or transport served it.

        With ``factors`` by the operator that multiplies them, and not from ``request.x``: a failure if the product was not
        made where peers read it, if this algorithm has such memory. ``beside`` is enqueued between the operators
        ``start`` and ``wait_``; it may make calls, too.
        """
        if self._algorithm is None:
            return self._results(request, factors, beside)
        launches, in_slot = self._algorithm.launches, self._algorithm.launches_in_slot
        if self.name in IN_SLOT:
            assert beside is None, "calls inside of it may overwrite its results"
            results = self._start_in_slot(ctx, request, factors)
        elif beside is None:
            results = self._results(request, factors)
        else:
            counting, inside = self._algorithm, beside

            def uncounted() -> None:
                nonlocal launches, in_slot
                before = counting.launches, counting.launches_in_slot
                inside()
                launches += counting.launches - before[0]
                in_slot += counting.launches_in_slot - before[1]

            results = self._results(request, factors, uncounted)
        state = self.state(request)
        if factors is not None and "x" in self._algorithm.needs(request, state.world_size):
            there = self._algorithm.launches_in_slot == in_slot + 1
            ctx.expect(there, f"{self.name}: the product {list(request.x.shape)} was not made in the slot's memory")
        if self._algorithm.launches != launches + 1:
            reason = state.obstacle or self._algorithm.obstacle(request, state) or "its slot has no room"
            ctx.expect(False, f"{self.name} did not serve {list(request.x.shape)}, another did: {reason}")
        return results

    def call(
        self, ctx: Context, request: Request, factors: Factors | None = None, beside: Work | None = None
    ) -> Results:
        """As :meth:`start`, and the memory that the results get is full of NaNs before."""
        with new_memory_is_nan():
            return self.start(ctx, request, factors, beside)

    def _results(self, request: Request, factors: Factors | None, beside: Work | None = None) -> Results:
        if factors is None and beside is None:
            return finished(self.transport.start(request))
        norm, message = request.norm, factors or (request.x,)
        made: dict[str, Any] = {}
        start, mm_start = ops.operators_of(norm.epilogue)
        if norm.scale_columns:
            start, mm_start = ops.quant_operators_of(norm.epilogue)
            made = {name: getattr(norm, name) for name in ("scale_columns", "min_scale", "divides_by_scale")}
        hidden, residual, *scales = (mm_start if factors else start)(
            *(*message, request.residual, request.bias, request.weight, norm.eps, norm.weight_offset),
            *(norm.cast_before_weight, norm.hidden_dtype, norm.residual_dtype, request.residual_sharded),
            *(request.residual_out, request.group_name, self._operator_name, request.slot, norm.scale),
            hidden_scale=request.hidden_scale,
            overlap_sms=request.overlap_sms,
            results_in_slot=request.results_in_slot,
            wire=request.wire,
            norm_bias=request.norm_bias,
            prefetch=request.prefetch,
            prefetch_bytes=request.prefetch_bytes,
            **made,
        )
        if beside is not None:
            beside()
        ops.wait_(hidden, residual, list(message), request.group_name, request.slot, *scales)
        return hidden, residual

    def _start_in_slot(self, ctx: Context, request: Request, factors: Factors | None) -> Results:
        """The next call on the slot overwrites the results, so they are copied; what is left of them there is NaN."""
        assert isinstance(self.transport, SlotTransport)
        request = replace(request, results_in_slot=True)
        buffer = self.transport.message_buffer(request)
        if buffer is None:
            return self._results(request, factors)
        if factors is None:
            request = replace(request, x=buffer.copy_(request.x))
        hidden, residual = self._results(request, factors)
        buffers = self.state(request).slots[request.slot].buffers
        for name, tensor in (("x", buffer), ("hidden", hidden), ("residual", residual)):
            if name != "residual" or request.residual_out == "replicated":
                there = tensor.data_ptr() == buffers[name].tensor.data_ptr()
                ctx.expect(there, f"{name} {list(request.x.shape)} is not in the slot's memory")
        copies = hidden.clone(), residual.clone()
        hidden.fill_(float("nan"))
        residual.fill_(float("nan"))
        return copies


@cache
def subject(name: str) -> Subject:
    """The one of that name in this process."""
    return Subject(name)


def finished(started: Started) -> Results:
    """The results of a call, complete on the current stream."""
    if started.finish is not None:
        started.finish()
    return started.hidden, started.residual


@contextmanager
def new_memory_is_nan() -> Iterator[None]:
    """Tensors that torch leaves uninitialised hold NaNs: what a kernel forgets to write shows."""
    torch.use_deterministic_algorithms(True)  # torch.utils.deterministic.fill_uninitialized_memory is its default
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
