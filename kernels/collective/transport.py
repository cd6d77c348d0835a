"""The interface every transport implements, and the choice between them.

A transport owns everything between ``start`` and ``wait_`` of one call: how partial sums reach the rank that adds them
and how the normalised rows get back. What is computed (:class:`NormSpec`) and the row layout
(:func:`~tw_compile.kernels.collective.spec.row_range`) are the same for all of them, so a graph may be rewritten
for one and run by another.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from tw_compile import compat
from tw_compile.kernels.collective.spec import Request

if TYPE_CHECKING:
    from tw_compile.kernels.collective.call import Call
    from tw_compile.kernels.collective.known import Known

TRANSPORTS = ("gloo", "multimem", "nccl", "p2p")
WITH_MESSAGE_BUFFERS = ("multimem", "p2p")
P2P_WORLD_SIZES = range(2, 9)
P2P_MAX_HIDDEN = 32768
P2P_ROW_ALIGNMENT_BYTES = 16
NCCL_MAX_HIDDEN = 65536  # one row is one block of the norm kernel: 64 elements a thread


@dataclass
class Started:
    """A call in flight. ``finish`` completes it on the caller's current stream; None when nothing is left to do.

    ``overlap_sms``: SMs that the call's kernel may hold beside what the current stream does before ``finish``. ``call``:
    what was launched, where other calls of the same form may be made with it.
    """

    hidden: torch.Tensor
    residual: torch.Tensor
    finish: Callable[[], None] | None = None
    overlap_sms: int = 0
    call: Call | None = None


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
        """Memory ``[tokens, hidden]`` for the request's ``x``, of which only shape, dtype and device matter here.

        What is written there, on the stream and before :meth:`start`, ``start`` need not copy. It belongs to the request's
        slot: the next call on the slot overwrites it, and may replace it by more memory. None where there is nothing to
        gain. Collective where the slot grows, so all ranks ask alike.
        """
        return None

    def known(self, group_name: str, device: torch.device, form: Hashable) -> Known | None:
        """How an earlier call with this ``Request.form`` was served, if others may be served in the same way."""
        return None

    def reserved_bytes(self) -> int:
        """Memory that the transport keeps for its slots, beside torch's allocator, on this rank."""
        return 0


@dataclass(frozen=True)
class GroupFacts:
    """What the choice of a transport depends on; the same on every rank of the group."""

    device_type: str
    world_size: int
    hosts: int


@dataclass(frozen=True)
class Choice:
    """The transport that will be used, and why; ``name`` is None when none can serve the message.

    ``limited_by`` names what ruled the transport (or a better one) out.
    """

    name: str | None
    reason: str
    limited_by: Literal["nothing", "hidden_size", "group", "device"] = "nothing"


def group_facts(group_name: str, device_type: str) -> GroupFacts:
    """Facts about a group without talking to other ranks.

    The hosts follow from the launcher's LOCAL_WORLD_SIZE (ranks are numbered host by host); without a launcher the group
    is taken to live on one host, and the first run-time use finds out (see ``p2p.py``) if that is wrong.
    """
    group = compat.resolve_process_group(group_name)
    ranks = dist.get_process_group_ranks(group)
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    return GroupFacts(device_type, len(ranks), len({rank // local_world_size for rank in ranks}))


def choose_transport(facts: GroupFacts, hidden_size: int, dtype: torch.dtype, requested: str = "auto") -> Choice:
    """The transport for messages ``[*, hidden_size]`` of ``dtype``; a pure function of its arguments."""
    if facts.device_type != "cuda":
        if requested not in ("auto", "gloo"):
            reason = f"transport {requested!r} needs CUDA tensors, the graph has {facts.device_type} tensors"
            return Choice(None, reason, "device")
        return Choice("gloo", "CPU tensors: collectives of the group's own backend")
    if requested == "gloo":
        return Choice(None, "transport 'gloo' needs CPU tensors, the graph has cuda tensors", "device")
    obstacle = Choice("nccl", "requested") if requested == "nccl" else _p2p_obstacle(facts, hidden_size, dtype)
    if obstacle is None and requested == "multimem":
        return Choice("multimem", "one host, two-shot kernel over symmetric memory, NVLink multicast if there is any")
    if obstacle is None:
        return Choice("p2p", "one host, two-shot kernel over symmetric memory")
    if hidden_size > NCCL_MAX_HIDDEN:
        return Choice(None, f"hidden_size {hidden_size} exceeds {NCCL_MAX_HIDDEN}", "hidden_size")
    if requested in ("p2p", "multimem"):
        return Choice(None, obstacle.reason, obstacle.limited_by)
    return obstacle


def prefer_transport(facts: GroupFacts, hidden_size: int, dtype: torch.dtype, preferred: str) -> Choice:
    """``preferred`` where it can serve such messages, else what ``auto`` takes."""
    choice = choose_transport(facts, hidden_size, dtype, preferred)
    return choice if choice.name is not None else choose_transport(facts, hidden_size, dtype)


def _p2p_obstacle(facts: GroupFacts, hidden_size: int, dtype: torch.dtype) -> Choice | None:
    """NCCL, with what keeps the message from going peer to peer; None when nothing does."""
    if facts.hosts > 1:
        return Choice("nccl", f"the group spans {facts.hosts} hosts", "group")
    if facts.world_size not in P2P_WORLD_SIZES:
        span = f"{P2P_WORLD_SIZES.start}..{P2P_WORLD_SIZES.stop - 1}"
        return Choice("nccl", f"world_size {facts.world_size} is not in {span}", "group")
    if hidden_size > P2P_MAX_HIDDEN:
        return Choice("nccl", f"hidden_size {hidden_size} exceeds {P2P_MAX_HIDDEN}", "hidden_size")
    if hidden_size * dtype.itemsize % P2P_ROW_ALIGNMENT_BYTES:
        reason = f"a row of {hidden_size} x {dtype} is not a multiple of {P2P_ROW_ALIGNMENT_BYTES} bytes"
        return Choice("nccl", reason, "hidden_size")
    return None


_instances: dict[str, Transport] = {}


def get_transport(name: str) -> Transport:
    """The process-wide transport called ``name``; created, and its module imported, on first use."""
    if name not in _instances:
        if name in ("gloo", "nccl"):
            from tw_compile.kernels.collective.transports.process_group import CollectiveTransport

            _instances[name] = CollectiveTransport(name)
        elif name in ("p2p", "multimem"):
            from tw_compile.kernels.collective.transports.p2p import P2PTransport

            _instances[name] = P2PTransport(name)
        else:
            raise ValueError(f"transport: expected one of {', '.join(TRANSPORTS)}, got {name!r}")
    return _instances[name]


def reserved_bytes() -> int:
    """What all transports of this process keep for their slots."""
    return sum(transport.reserved_bytes() for transport in _instances.values())
