"""The fused operator's transports, as contenders."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace

import torch

from tw_compile import compat
from tw_compile.benchmark.contender import Contender, ContenderCall, form
from tw_compile.benchmark.spec import MessageSize
from tw_compile.benchmark.variants import Variant
from tw_compile.harness.problems import Problem
from tw_compile.harness.ranks import Ranks
from tw_compile.kernels.algorithms import ALGORITHMS
from tw_compile.kernels.collective.algorithm import Algorithm
from tw_compile.kernels.collective.peer_access import plain_route
from tw_compile.kernels.collective.prefetch import MOST_TOKENS
from tw_compile.kernels.collective.spec import Request
from tw_compile.kernels.collective.transport import Transport, node_facts
from tw_compile.kernels.collective.transports import TRANSPORTS, choose_transport
from tw_compile.kernels.transports.selection import P2P

NO_MULTICAST = "needs NVLink multicast: there is none here, or it is turned off (TORCH_SYMM_MEM_DISABLE_MULTICAST=1)"


class Operator(Contender):
    """The fused operator, run as ``variant`` on ``sms`` SMs."""

    kind = "ours"

    def __init__(self, variant: Variant, sms: int | None = None) -> None:
        self.label = variant.label if sms is None else f"{variant.label}-{sms}sm"
        self.residual_sharded, self.residual_narrow = variant.sharded, variant.narrow
        self.hidden_scale, self.scales = variant.hidden_scale, variant.scales
        self.wire, self.norm = variant.wire, variant.norm
        self.gemm_columns, self.prefetch_bytes = variant.gemm_columns, variant.prefetch_bytes
        self._variant, self._sms = variant, sms or variant.sms
        self.algorithm, self.max_sms = variant.algorithm, self._sms
        self.several = any(entry.transport == variant.over for entry in ALGORITHMS)
        self._slots = itertools.count()
        self._request: Request | None = None
        self._algorithm: Algorithm | None = None
        self._overlap_sms = 0

    @functools.cached_property
    def transport(self) -> Transport:
        return self._variant.transport(self._sms)

    def obstacle(self, size: MessageSize, world_size: int) -> str | None:
        """Why it can't serve this size: no peer access, no multicast, another route over the link, or nothing to
        prefetch. Others show at the first call."""
        facts = node_facts(TRANSPORTS[self._variant.over].device_types[0], world_size)
        if not facts.peer_access:
            choice = choose_transport(facts, size.hidden, size.element_bytes, self._variant.over)
            if choice.name is None:
                return choice.reason
        if self.algorithm is not None and self._variant.over == P2P:
            route = plain_route(range(world_size))
            if route not in ("", ALGORITHMS[self.algorithm].plain_link):
                return f"over links without native atomics only kernels of the route {route} run here"
        if self._variant.needs_multicast and not multicast_here():
            return f"{self._variant.over} {NO_MULTICAST}"
        if self.prefetch_bytes and size.tokens > MOST_TOKENS:
            return f"calls of more than {MOST_TOKENS} tokens prefetch nothing"
        return None

    def num_sms(self, size: MessageSize, world_size: int) -> int | None:
        return self._sms if self._algorithm is None else self._algorithm.sms(size.tokens, world_size)

    def prepare(self, ranks: Ranks, problem: Problem) -> ContenderCall:
        own_form = form(self, problem.x.dtype)
        residual = problem.residual.to(own_form.residual_dtype or own_form.dtype)
        request = replace(problem, form=own_form, residual=residual).request(ranks.ctx)
        request = replace(request, overlap_sms=self._overlap_sms, wire=self.wire, slot=self.lane)
        meanwhile = self.meanwhile(problem)
        transport = self.transport
        if self._variant.in_slot:
            request = self._in_slot(transport, request)
        weights = self._weights(problem)
        requests = [self._asking_for(weight, request) for weight in weights] or [request]
        self._request = requests[0]
        turn = itertools.cycle(zip(requests, weights or (None,), strict=True))

        def call() -> tuple[torch.Tensor, torch.Tensor]:
            request, weight = next(turn)
            started = transport.start(request)
            meanwhile()
            if started.finish is not None:
                started.finish()
            if weight is not None:
                torch.mm(started.hidden, weight.t())
            return started.hidden, started.residual

        return call

    def _asking_for(self, weight: torch.Tensor, request: Request) -> Request:
        if not self.prefetch_bytes:
            return request
        return replace(request, prefetch=[weight], prefetch_bytes=self.prefetch_bytes)

    def _weights(self, problem: Problem) -> list[torch.Tensor]:
        """Weights ``[columns, hidden]`` of the matmul behind the call: so many copies that L2 never holds the next one."""
        if not self.gemm_columns:
            return []
        x = problem.x
        first = torch.randn((self.gemm_columns, x.shape[1]), device=x.device).to(x.dtype)
        cache = torch.cuda.get_device_properties(x.device).L2_cache_size
        return [first, *(first.clone() for _ in range(1 + -(-cache // first.nbytes)))]

    def meanwhile(self, problem: Problem) -> Callable[[], None]:
        """What the current stream does between start and finish of a call."""
        return lambda: None

    def kernel_name(self) -> str | None:
        """The kernel that was chosen; None before that, and for transports that don't choose between kernels."""
        return None if self._algorithm is None else self._algorithm.name

    def _in_slot(self, transport: Transport, request: Request) -> Request:
        """Put the message into a slot's memory. Each input set has a slot of its own."""
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
        state = transport.states[ranks.ctx.group_name, ranks.ctx.device]
        settled = state.selector.settled(self._request, state)
        self._algorithm = state.selector.choose(settled, state)
        if transport.algorithm is None or (transport.algorithm is self._algorithm and settled.wire == self.wire):
            return None
        return f"fell back to another kernel: {transport.algorithm.obstacle(self._request, state)}"


def multicast_here() -> bool:
    """Whether torch says that this process's GPU has NVLink multicast, and it is not turned off."""
    return torch.cuda.is_initialized() and bool(compat.multicast_support(torch.cuda.current_device()))


def fallback(ranks: Ranks, transport: Transport) -> str | None:
    """Says that the transport has given up, and which one runs instead. None when it has not."""
    from tw_compile.kernels.transports.slot_transport import SlotTransport

    if not isinstance(transport, SlotTransport):
        return None
    obstacle = transport.states[ranks.ctx.group_name, ranks.ctx.device].obstacle
    return None if obstacle is None else f"fell back to {transport.instead}: {obstacle}"
