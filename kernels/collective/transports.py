"""The transports, as data: what each can serve, from facts that all ranks share, and where its implementation is.

A new transport needs a module in ``kernels/transports`` with a subclass of ``Transport`` (``transport.py``), and an entry here.
Users pass entries of their own to ``TRANSPORTS.register``. Options, the command line, tables of thresholds, the benchmark and
the checks take the names from here. All transports leave identical bits on all ranks.

This module also chooses the transport for a message. The choice depends on numbers only, so the command line can explain it
without importing torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from tw_compile.kernels.collective.wires import EXACT, WIRES
from tw_compile.kernels.registry import Benchmarked, Registry, load

AUTO = "auto"
"""The option's value for the first transport by :attr:`TransportEntry.preference` that can serve a message."""

P2P_WORLD_SIZES = range(2, 9)
P2P_MAX_HIDDEN = 32768
P2P_ROW_ALIGNMENT_BYTES = 16
HOST_HIDDEN_MULTIPLE = 8
CODED_WIRES = tuple(name for name in WIRES if name != EXACT)
SLOW_LINK_WIRE_BYTES = 1 << 20
"""From this message size on, links that are far slower than NVLink use a wire. The size is not measured: it keeps decoding
exact."""
NCCL_MAX_HIDDEN = 65536  # one row is one block of the norm kernel: 64 elements a thread
NO_PEER_ACCESS = "no peer access between the GPUs"
NO_PEER_ATOMICS = "the link between the GPUs has no native atomics"

P2P_HALVES_BYTES = 12 << 20
"""From this message size on, over peer memory, exact rows in halves are at least as fast as codes in whole layers.

At 8 MiB halves of H100 were slower than whole layers. In one run of Llama-3.1-8B at TP2 both were equal at 16 MiB, and exact
halves 1.06x as fast at 32 MiB. Llama-3.3-70B at TP4 is faster in exact halves than whole layers would be if codes saved of them
what they save of calls alone: 1.04x at 16 MiB and 1.08x at 64 MiB. The planner says that they meet at 12 to 14 MiB. Where they
are equal, exact rows have no error.
"""

LimitedBy = Literal["nothing", "hidden_size", "group", "device"]


@dataclass(frozen=True)
class GroupFacts:
    """What the choice of a transport depends on; the same on every rank of the group.

    Attributes:
        peer_access: Whether kernels on its GPUs may work on each other's memory; also True where only the first use can tell.
        peer_obstacle: The reason that is reported where they may not.
    """

    device_type: str
    world_size: int
    hosts: int
    peer_access: bool = True
    peer_obstacle: str = NO_PEER_ACCESS


@dataclass(frozen=True)
class Obstacle:
    """Why a transport can't serve a message, and what rules it out."""

    reason: str
    limited_by: LimitedBy


@dataclass(frozen=True)
class ExactHalves:
    """Where tokens may be split: from which message size on rows stay exact, and the figures that say so.

    Halves hide the calls of exact rows, so that codes gain less than the halves do.
    """

    from_bytes: int
    why: str


def no_obstacle(facts: GroupFacts, hidden_size: int, element_bytes: int) -> Obstacle | None:
    return None


@dataclass(frozen=True)
class TransportEntry:
    """One transport.

    Attributes:
        device_types: The device types of the tensors that it moves.
        factory: ``module:attribute``; called with the name, once per process, at the first call.
        why: The reason for choosing it where it can serve the message, for reports.
        obstacle: A pure function of the group's facts, the hidden size and the bytes of an element. It returns why the
            transport can't serve messages ``[*, hidden_size]`` of such elements, or None if it can.
        preference: The order in which ``auto`` tries the transports of a device type, lowest first. None: ``auto`` never takes
            the transport; it must be named.
        message_buffers: Whether it has memory where a producer may write messages (:meth:`Transport.message_buffer`).
        keeps_shards: Whether a residual may stay with the ranks that own its rows; if not, all ranks have all rows anyway.
        repeatable: Whether equal calls give equal bits.
        benchmarked: Its lines in the benchmark of the operator.
        checked_beside: Whether checks on GPUs run calls of it beside other work, under its name.
        results_in_slots: Whether calls beside other work can leave their results in the slot (``results_in_slot``). For gloo
            this is for tests.
        feeds: Whether graphs may have GEMMs that read a call's result before ``wait_`` (``fed_mm.py``). For gloo this is for
            tests.
        wires: The names of the wires that it serves besides ``exact``.
        prefetches: Whether some of its kernels can prefetch weights (``prefetch.py``).
        wire_from_bytes: The message size in bytes from which on rows travel in codes, if no table and no option gives a size.
            None: they never do.
        exact_halves: See :class:`ExactHalves`. None: halves gain from codes, too.
    """

    name: str
    device_types: tuple[str, ...]
    factory: str
    why: str
    obstacle: Callable[[GroupFacts, int, int], Obstacle | None] = no_obstacle
    preference: int | None = None
    message_buffers: bool = False
    keeps_shards: bool = True
    repeatable: bool = True
    benchmarked: tuple[Benchmarked, ...] = ()
    checked_beside: bool = False
    results_in_slots: bool = False
    feeds: bool = False
    wires: tuple[str, ...] = ()
    wire_from_bytes: int | None = None
    exact_halves: ExactHalves | None = None
    prefetches: bool = False

    def make(self, *arguments: Any) -> Any:
        """Make the :class:`Transport` from its name and ``arguments``; imports its module."""
        return load(self.factory)(self.name, *arguments)


def _nccl_obstacle(facts: GroupFacts, hidden_size: int, element_bytes: int) -> Obstacle | None:
    if hidden_size > NCCL_MAX_HIDDEN:
        return Obstacle(f"hidden_size {hidden_size} exceeds {NCCL_MAX_HIDDEN}", "hidden_size")
    return None


def _node_obstacle(facts: GroupFacts, hidden_size: int, element_bytes: int) -> Obstacle | None:
    """Why kernels over memory of one node can't serve the message.

    NCCL's limits apply too, because NCCL takes over if that memory is not available.
    """
    if obstacle := _nccl_obstacle(facts, hidden_size, element_bytes):
        return obstacle
    if facts.hosts > 1:
        return Obstacle(f"the group spans {facts.hosts} hosts", "group")
    if facts.world_size not in P2P_WORLD_SIZES:
        span = f"{P2P_WORLD_SIZES.start}..{P2P_WORLD_SIZES.stop - 1}"
        return Obstacle(f"world_size {facts.world_size} is not in {span}", "group")
    if hidden_size > P2P_MAX_HIDDEN:
        return Obstacle(f"hidden_size {hidden_size} exceeds {P2P_MAX_HIDDEN}", "hidden_size")
    if hidden_size * element_bytes % P2P_ROW_ALIGNMENT_BYTES:
        reason = f"a row of {hidden_size} x {element_bytes} bytes is not a multiple of {P2P_ROW_ALIGNMENT_BYTES} bytes"
        return Obstacle(reason, "hidden_size")
    return None


def _p2p_obstacle(facts: GroupFacts, hidden_size: int, element_bytes: int) -> Obstacle | None:
    obstacle = _node_obstacle(facts, hidden_size, element_bytes)
    if obstacle is None and not facts.peer_access:
        return Obstacle(facts.peer_obstacle, "device")
    return obstacle


def _host_obstacle(facts: GroupFacts, hidden_size: int, element_bytes: int) -> Obstacle | None:
    obstacle = _node_obstacle(facts, hidden_size, element_bytes)
    if obstacle is None and hidden_size % HOST_HIDDEN_MULTIPLE:
        return Obstacle(f"hidden_size {hidden_size} is not a multiple of {HOST_HIDDEN_MULTIPLE}", "hidden_size")
    return obstacle


_P2P = "tw_compile.kernels.transports.p2p:P2PTransport"
_HOST = "tw_compile.kernels.transports.host:HostTransport"
_PROCESS_GROUP = "tw_compile.kernels.transports.process_group:CollectiveTransport"

TRANSPORTS: Registry[TransportEntry] = Registry(
    "transport",
    (
        TransportEntry(
            "p2p",
            ("cuda",),
            _P2P,
            "one host, two-shot kernel over symmetric memory",
            _p2p_obstacle,
            preference=0,
            message_buffers=True,
            results_in_slots=True,
            prefetches=True,
            benchmarked=(Benchmarked("tw-p2p", sharded=True), Benchmarked("tw-p2p-replicated", sharded=False)),
            feeds=True,
            wires=CODED_WIRES,
            exact_halves=ExactHalves(
                P2P_HALVES_BYTES,
                "on two H100 Llama-3.1-8B was as fast in exact halves as whole in codes at 16 MiB, and 1.06x as fast at 32; on "
                "four H100 Llama-3.3-70B took 744 us in exact halves at 16 MiB, and would take about 772 whole in codes",
            ),
        ),
        TransportEntry(
            "multimem",
            ("cuda",),
            _P2P,
            "one host, two-shot kernel over symmetric memory, NVLink multicast if there is any",
            _p2p_obstacle,
            message_buffers=True,
            results_in_slots=True,
            prefetches=True,
            repeatable=False,  # the switch promises no order of the addends
        ),
        TransportEntry(
            "host",
            ("cuda",),
            _HOST,
            "one host, kernels over pinned host memory",
            _host_obstacle,
            preference=1,
            prefetches=True,
            benchmarked=(Benchmarked("tw-host", sharded=False),),
            wires=CODED_WIRES,
            wire_from_bytes=SLOW_LINK_WIRE_BYTES,
        ),
        TransportEntry(
            "nccl",
            ("cuda",),
            _PROCESS_GROUP,
            "requested",
            _nccl_obstacle,
            preference=2,
            keeps_shards=False,
            repeatable=False,
            benchmarked=(Benchmarked("tw-nccl", sharded=False),),
            checked_beside=True,
            wires=CODED_WIRES,
            wire_from_bytes=SLOW_LINK_WIRE_BYTES,
        ),
        TransportEntry(
            "gloo",
            ("cpu",),
            _PROCESS_GROUP,
            "CPU tensors: collectives of the group's own backend",
            preference=0,
            benchmarked=(Benchmarked("tw-gloo", sharded=False),),
            results_in_slots=True,
            feeds=True,
            wires=CODED_WIRES,
            wire_from_bytes=SLOW_LINK_WIRE_BYTES,
        ),
    ),
)


def preferred_names(device_type: str) -> list[str]:
    """The names of the transports that ``auto`` tries for tensors of this device type, in that order."""
    ranked = [
        (entry.preference, entry.name)
        for entry in TRANSPORTS
        if entry.preference is not None and device_type in entry.device_types
    ]
    return [name for _, name in sorted(ranked)]


def names_for(device_type: str) -> tuple[str, ...]:
    """The names of the transports that move tensors of this device type."""
    return tuple(entry.name for entry in TRANSPORTS if device_type in entry.device_types)


@dataclass(frozen=True)
class Choice:
    """The transport that will be used, and why; ``name`` is None when none can serve the message.

    ``limited_by`` names what ruled out the transport, or a better transport.
    """

    name: str | None
    reason: str
    limited_by: LimitedBy = "nothing"


def choose_transport(facts: GroupFacts, hidden_size: int, element_bytes: int, requested: str = AUTO) -> Choice:
    """The transport for messages ``[*, hidden_size]`` whose elements have ``element_bytes`` bytes.

    A pure function of its arguments and the registry. If ``auto`` passes over transports, the reported obstacle is that of the
    first one, which would have been the best. If no transport can serve the message, it is that of the last one.

    Raises:
        ValueError: No transport is called ``requested``.
    """
    if requested != AUTO:
        entry = TRANSPORTS[requested]
        obstacle = _device_obstacle(entry, facts) or entry.obstacle(facts, hidden_size, element_bytes)
        return Choice(entry.name, entry.why) if obstacle is None else Choice(None, obstacle.reason, obstacle.limited_by)
    passed_over: list[Obstacle] = []
    for entry in (TRANSPORTS[name] for name in preferred_names(_moved_as(facts.device_type))):
        obstacle = entry.obstacle(facts, hidden_size, element_bytes)
        if obstacle is not None:
            passed_over.append(obstacle)
        elif passed_over:
            return Choice(entry.name, passed_over[0].reason, passed_over[0].limited_by)
        else:
            return Choice(entry.name, entry.why)
    return Choice(None, passed_over[-1].reason, passed_over[-1].limited_by)


def _moved_as(device_type: str) -> str:
    """The device type whose transports serve such tensors.

    CPU transports serve device types that have no transport, such as meta.
    """
    return device_type if any(device_type in entry.device_types for entry in TRANSPORTS) else "cpu"


def _device_obstacle(entry: TransportEntry, facts: GroupFacts) -> Obstacle | None:
    if _moved_as(facts.device_type) in entry.device_types:
        return None
    needed = " or ".join(name.upper() for name in entry.device_types)
    reason = f"transport {entry.name!r} needs {needed} tensors, the graph has {facts.device_type} tensors"
    return Obstacle(reason, "device")


def prefer_transport(facts: GroupFacts, hidden_size: int, element_bytes: int, preferred: str) -> Choice:
    """``preferred`` if it can serve such messages, else the transport that ``auto`` chooses."""
    choice = choose_transport(facts, hidden_size, element_bytes, preferred)
    return choice if choice.name is not None else choose_transport(facts, hidden_size, element_bytes)
