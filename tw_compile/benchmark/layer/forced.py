"""One kernel for all calls of a variant, whatever tables and message sizes say: what another kernel would give a whole layer.

How long a call takes alone does not say how long a layer takes whose calls run beside GEMMs and beside each other. So layers
are timed with each kernel in turn, in one run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tw_compile.kernels.algorithms import ALGORITHMS
from tw_compile.kernels.collective import transport as registry
from tw_compile.kernels.collective.transports import TRANSPORTS
from tw_compile.kernels.transports.selection import Insist
from tw_compile.kernels.transports.slot_transport import SlotTransport


class Forced:
    """A transport whose calls one kernel serves.

    It has to live as long as the process works as a rank: peers may otherwise get memory for new buffers in another order
    than this rank, and graphs that were captured with it need its buffers.

    Raises:
        ValueError: No kernel has this name.
    """

    def __init__(self, kernel: str) -> None:
        entry = ALGORITHMS[kernel]
        transport = TRANSPORTS[entry.transport].make(entry.make())
        assert isinstance(transport, SlotTransport)
        self.kernel, self._transport = kernel, transport

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Within the block it is the process's transport of its name."""
        name, others = self._transport.name, registry.instances
        before = others.get(name)
        self._forget()
        others[name] = self._transport
        try:
            yield
        finally:
            del others[name]
            if before is not None:
                others[name] = before

    def _forget(self) -> None:
        for state in self._transport.states.values():
            if isinstance(state.selector, Insist):
                state.selector.refusals.clear()

    def deviation(self) -> str | None:
        """Why not all calls since :meth:`serving` began were served by the kernel; None if they were."""
        states = self._transport.states.values()
        if not states:
            return f"no call goes over the transport {self._transport.name}, which {self.kernel} belongs to"
        for state in states:
            if state.obstacle is not None:
                return state.obstacle
            assert isinstance(state.selector, Insist)
            if state.selector.refusals:
                return f"{self.kernel} could not serve all calls: {'; '.join(sorted(state.selector.refusals))}"
        return None
