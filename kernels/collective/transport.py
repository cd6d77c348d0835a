"""The interface that every transport implements, facts about process groups, and the transports of this process.

A transport owns everything between ``start`` and ``wait_`` of one call: how partial sums reach the rank that adds them
and how the normalised rows get back. What is computed (:class:`NormSpec`) and the row layout
(:func:`~tw_compile.kernels.collective.spec.row_range`) are the same for all transports. So a graph may be rewritten
for one transport and run by another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tw_compile import compat
from tw_compile.kernels.collective.peer_access import local_world_size, peer_access_obstacle
from tw_compile.kernels.collective.spec import Request
from tw_compile.kernels.collective.transports import TRANSPORTS, GroupFacts, TransportEntry

if TYPE_CHECKING:
    from tw_compile.kernels.collective.call import Call
    from tw_compile.kernels.collective.known import Known
    from tw_compile.kernels.gemm.fed import FedRows


@dataclass
class Started:
    """A call in flight. ``finish`` completes it on the caller's current stream; None when nothing is left to do.

    ``overlap_sms``: SMs that the call's kernel may hold beside what the current stream does before ``finish``. ``call``:
    what was launched, if other calls of the same form may reuse it. ``fed``: the rows of ``hidden`` for a GEMM that is fed. The
    rows of other ranks arrive while that GEMM runs. If no GEMM was fed, ``finish`` fetches them.
    """

    hidden: torch.Tensor
    residual: torch.Tensor
    finish: Callable[[], None] | None = None
    overlap_sms: int = 0
    call: Call | None = None
    fed: FedRows | None = None


class Transport(ABC):
    """Moves rows between the ranks of a group; one instance per process and transport name."""

    name: str

    @abstractmethod
    def start(self, request: Request) -> Started:
        """Begin the call on the current stream; must not wait on the host for a peer.

        The slot's earlier call has been completed by its ``finish``. With ``request.overlap_sms`` the communication may run
        beside what the current stream does before ``finish``.
        """

    def message_buffer(self, request: Request) -> torch.Tensor | None:
        """Memory ``[tokens, hidden]`` for the request's ``x``. Only the shape, dtype and device of ``x`` matter here.

        If the message is written there, on the stream and before :meth:`start`, ``start`` need not copy it. The memory belongs
        to the request's slot: the slot's next call overwrites it, and may replace it by a larger buffer. None if there is
        nothing to gain. The method is collective if the slot grows, so all ranks must call it alike.
        """
        return None

    def known(self, group_name: str, device: torch.device, form: Hashable) -> Known | None:
        """How an earlier call with this ``Request.form`` was served, if others may be served in the same way."""
        return None

    def reserved_bytes(self) -> int:
        """Bytes of this rank's device memory that the transport holds for its slots, outside of torch's allocator."""
        return 0


def group_facts(group_name: str, device_type: str) -> GroupFacts:
    """Facts about a group, found without waiting for other ranks.

    The hosts follow from the launcher's LOCAL_WORLD_SIZE (ranks are numbered host by host). Without a launcher the group is
    assumed to live on one host. If that is wrong, the first use at run time finds out (see ``p2p_group.py``).
    """
    group = compat.resolve_process_group(group_name)
    ranks = dist.get_process_group_ranks(group)
    on_each_host = local_world_size()
    hosts = len({rank // on_each_host for rank in ranks})
    return _facts(device_type, len(ranks), hosts, [rank % on_each_host for rank in ranks])


def node_facts(device_type: str, world_size: int) -> GroupFacts:
    """Facts about a group of the first ``world_size`` ranks of this host, which need not be there."""
    return _facts(device_type, world_size, 1, range(world_size))


def _facts(device_type: str, world_size: int, hosts: int, local_ranks: Sequence[int]) -> GroupFacts:
    facts = GroupFacts(device_type, world_size, hosts)
    obstacle = peer_access_obstacle(local_ranks) if device_type == "cuda" else None
    return facts if obstacle is None else replace(facts, peer_access=False, peer_obstacle=obstacle)


instances: dict[str, Transport] = {}


def get_transport(name: str) -> Transport:
    """The process-wide transport called ``name``. The first use imports its module and creates it.

    Raises:
        ValueError: No transport has this name.
    """
    if name not in instances:
        instances[name] = TRANSPORTS[name].make()
    return instances[name]


@contextmanager
def registered(entry: TransportEntry) -> Iterator[None]:
    """Register a transport for the duration of a ``with`` block, as tests do. ``TRANSPORTS.register`` is permanent."""
    with TRANSPORTS.registered(entry):
        try:
            yield
        finally:
            instances.pop(entry.name, None)


def reserved_bytes() -> int:
    """Bytes that all transports of this process hold for their slots."""
    return sum(transport.reserved_bytes() for transport in instances.values())
