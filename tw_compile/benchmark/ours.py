"""The fused operator's transports, as contenders."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from tw_compile.benchmark.contender import Contender, ContenderCall, form
from tw_compile.benchmark.spec import MessageSize
from tw_compile.harness.problems import Problem
from tw_compile.harness.ranks import Ranks
from tw_compile.kernels.algorithms import ALGORITHMS
from tw_compile.kernels.algorithms.entry import AlgorithmEntry
from tw_compile.kernels.collective.algorithm import Algorithm
from tw_compile.kernels.collective.spec import Request
from tw_compile.kernels.collective.transport import Transport, choose_transport, get_transport, node_facts
from tw_compile.kernels.collective.transports import TRANSPORTS
from tw_compile.kernels.registry import Benchmarked

FP8_SCALE = 0.02
"""Few of the products of normal numbers that the norm gives here are beyond 448 times this."""


@dataclass(frozen=True)
class Variant:
    """One way to run the operator.

    Attributes:
        transport: Makes it for a number of CTAs.
        over: What the registry calls that transport.
        sharded, narrow: The residual that is natural to it, see :attr:`Contender.residual_sharded`.
        sms: How many it has unless ``--sms`` says otherwise; None for those that choose themselves.
        most_sms: How many it can have.
        algorithm: What a table of ``configs/kernels`` calls it; None for what no table can ask for.
        hidden_scale: See :attr:`Contender.hidden_scale`.
        in_slot: ``x`` lies in the slot's symmetric memory already, as if its producer had written it there, and the results
            stay there.
    """

    label: str
    transport: Callable[[int | None], Transport]
    over: str
    sharded: bool
    sms: int | None = None
    most_sms: int = 0
    algorithm: str | None = None
    in_slot: bool = False
    hidden_scale: float | None = None
    narrow: bool = False


class Operator(Contender):
    """The fused operator, run as ``variant`` on ``sms`` SMs."""

    kind = "ours"

    def __init__(self, variant: Variant, sms: int | None = None) -> None:
        self.label = variant.label if sms is None else f"{variant.label}-{sms}sm"
        self.residual_sharded, self.residual_narrow = variant.sharded, variant.narrow
        self.hidden_scale = variant.hidden_scale
        self._variant, self._sms = variant, sms or variant.sms
        self.algorithm, self.max_sms = variant.algorithm, self._sms
        self._slots = itertools.count()
        self._request: Request | None = None
        self._algorithm: Algorithm | None = None
        self._overlap_sms = 0

    @functools.cached_property
    def transport(self) -> Transport:
        return self._variant.transport(self._sms)

    def obstacle(self, size: MessageSize, world_size: int) -> str | None:
        """What the registry has against its transport where GPUs can't reach each other; the rest is for the first call."""
        facts = node_facts(TRANSPORTS[self._variant.over].device_types[0], world_size)
        if facts.peer_access:
            return None
        choice = choose_transport(facts, size.hidden, getattr(torch, size.dtype), self._variant.over)
        return choice.reason if choice.name is None else None

    def num_sms(self, size: MessageSize, world_size: int) -> int | None:
        return self._sms if self._algorithm is None else self._algorithm.sms(size.tokens, world_size)

    def prepare(self, ranks: Ranks, problem: Problem) -> ContenderCall:
        own_form = form(self, problem.x.dtype)
        residual = problem.residual.to(own_form.norm().residual_dtype)
        request = replace(problem, form=own_form, residual=residual).request(ranks.ctx)
        request = replace(request, overlap_sms=self._overlap_sms)
        meanwhile = self.meanwhile(problem)
        transport = self.transport
        if self._variant.in_slot:
            request = self._in_slot(transport, request)
        self._request = request

        def call() -> tuple[torch.Tensor, torch.Tensor]:
            started = transport.start(request)
            meanwhile()
            if started.finish is not None:
                started.finish()
            return started.hidden, started.residual

        return call

    def meanwhile(self, problem: Problem) -> Callable[[], None]:
        """What the current stream does between start and finish of a call."""
        return lambda: None

    def kernel_name(self) -> str | None:
        """The kernel that a transport with several of them took; None before it has, and of other transports."""
        return None if self._algorithm is None else self._algorithm.name

    def _in_slot(self, transport: Transport, request: Request) -> Request:
        """Each input set has a slot of its own."""
        request = replace(request, slot=next(self._slots), results_in_slot=True)
        buffer = transport.message_buffer(request)
        return request if buffer is None else replace(request, x=buffer.copy_(request.x))

    def deviation(self, ranks: Ranks) -> str | None:
        from tw_compile.kernels.transports.slot_transport import SlotTransport

        transport = self.transport
        if not isinstance(transport, SlotTransport):
            return None
        obstacle = fallback(ranks, transport)
        if obstacle is not None:
            return obstacle
        assert self._request is not None
        state = transport._states[ranks.ctx.group_name, ranks.ctx.device]
        self._algorithm = state.selector.choose(self._request, state)
        if transport.algorithm is None or transport.algorithm is self._algorithm:
            return None
        return f"fell back to another kernel: {transport.algorithm.obstacle(self._request, state)}"


def fallback(ranks: Ranks, transport: Transport) -> str | None:
    """That the transport has given up and another one runs instead; None when that is not so."""
    from tw_compile.kernels.transports.slot_transport import SlotTransport

    if not isinstance(transport, SlotTransport):
        return None
    obstacle = transport._states[ranks.ctx.group_name, ranks.ctx.device].obstacle
    return None if obstacle is None else f"fell back to {transport.instead}: {obstacle}"


def _named(name: str) -> Callable[[int | None], Transport]:
    return lambda sms: get_transport(name)


def _only(entry: AlgorithmEntry) -> Callable[[int | None], Transport]:
    """The algorithm's transport, with that algorithm alone."""

    def transport(sms: int | None) -> Transport:
        alone: Transport = TRANSPORTS[entry.transport].make(entry.make(sms))
        return alone

    return transport


def variants(device_type: str) -> tuple[Variant, ...]:
    """Those of all transports of such tensors, and behind those of each the algorithms that it has."""
    listed = []
    for transport in TRANSPORTS:
        if device_type in transport.device_types:
            listed += [_variant(line, transport.name, _named(transport.name)) for line in transport.benchmarked]
            listed += _of_algorithms(transport.name)
    return tuple(listed)


def _of_algorithms(transport: str) -> list[Variant]:
    """All that is float8 is behind the rest, with which it can't be compared."""
    pairs = [(entry, line) for entry in ALGORITHMS if entry.transport == transport for line in entry.benchmarked]
    pairs.sort(key=lambda pair: pair[1].quantises)
    return [
        replace(
            _variant(line, transport, _only(entry)),
            sms=entry.sms,
            most_sms=entry.most_sms,
            algorithm=entry.name if line.plain else None,
        )
        for entry, line in pairs
    ]


def _variant(line: Benchmarked, over: str, transport: Callable[[int | None], Transport]) -> Variant:
    return Variant(
        line.label,
        transport,
        over,
        line.sharded,
        in_slot=line.in_slot,
        hidden_scale=FP8_SCALE if line.quantises else None,
        narrow=line.narrow,
    )


OURS = variants("cuda")
OURS_ON_CPU = variants("cpu")
