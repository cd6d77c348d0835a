"""A transport whose kernels work on memory that all ranks of a node reach. It manages slots and chooses kernels.

A slot belongs to (group, slot index, device) and owns everything that a launch needs: buffers, pads and epochs (see
``tw_compile.kernels.runtime.barrier``). So calls on different slots or groups may run at once, on different streams. Calls on
one slot must follow each other: on one stream, or ordered by events, as calls beside other work are (:mod:`side_stream`).

All decisions here depend on values that all ranks share (shapes, capacity, whether a graph is being captured), or a collective
agrees on them. So all ranks launch the same kernel with the same grid, or all use the next transport.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from tw_compile import compat
from tw_compile.agree import common_obstacle
from tw_compile.environment import spin_limit
from tw_compile.kernels.collective.algorithm import Algorithm
from tw_compile.kernels.collective.cuda_variant import variant_of
from tw_compile.kernels.collective.known import MOST_FORMS, Known
from tw_compile.kernels.collective.p2p_group import outside_pools
from tw_compile.kernels.collective.side_stream import start_beside
from tw_compile.kernels.collective.slot import GroupState, Slot, SlotMemory, grow
from tw_compile.kernels.collective.spec import FP8, SUPPORTED_DTYPES, Request
from tw_compile.kernels.collective.transport import Started, Transport, get_transport
from tw_compile.kernels.collective.transports import P2P_MAX_HIDDEN, P2P_ROW_ALIGNMENT_BYTES, P2P_WORLD_SIZES
from tw_compile.kernels.collective.wires import EXACT
from tw_compile.kernels.runtime.barrier import raise_if_peer_missing
from tw_compile.kernels.runtime.program import compile_all
from tw_compile.kernels.transports.selection import Insist, Selector, Step, default_steps, steps_for

logger = logging.getLogger("tw_compile")


class SlotTransport(Transport):
    """Kernels over memory of slots. If a group can't have that memory, all its ranks agree to use another transport.

    A table says which kernel serves a call (:mod:`selection`), unless one ``algorithm`` is given for all calls that it can
    serve.

    Attributes:
        label: The transport's name in messages.
        kernels_of: The transport under which the registry of algorithms lists the kernels.
        memory: The kind of memory that slots have.
        instead: The transport for groups that can't use this one.
        in_turn_from: From this message size in bytes on, calls beside other work with exact rows follow each other, because
            their messages share one link (:mod:`side_stream`); None: they never do.
        states: What is known of each group and device that has been used.
        spin_limit: A barrier gives up after this many polls; 0: it never gives up. See :meth:`limit_spins`.
    """

    label: str
    kernels_of: str
    memory: SlotMemory
    instead: str
    multicast = False
    in_turn_from: int | None = None

    def __init__(self, name: str, algorithm: Algorithm | None = None) -> None:
        self.name, self.algorithm = name, algorithm
        self.states: dict[tuple[str, torch.device], GroupState] = {}
        self.spin_limit = spin_limit()

    @abstractmethod
    def group_obstacle(self, group: dist.ProcessGroup, device: torch.device) -> str | None:
        """Why the group can't have the memory; None where it can. Collective, and the same on all ranks."""

    @abstractmethod
    def serves(self, request: Request) -> bool:
        """Whether one of the kernels can serve the request, if the group can have the memory. The same on all ranks."""

    def route(self, group: dist.ProcessGroup) -> str:
        """The route of the only kernels that the group may use; empty if it may use all (``tw_compile/peer_routes.py``)."""
        return ""

    def other_for(self, request: Request) -> Transport | None:
        """The transport that serves the request because no kernel of this one can; else None. The same on all ranks."""
        return None if self.serves(request) else get_transport("nccl")

    def steps(self, device_name: str, world_size: int) -> tuple[Step, ...]:
        """The table of kernels for a device, or what is best by default."""
        return steps_for(device_name, world_size, self.kernels_of) or default_steps(self.kernels_of, world_size)

    def start(self, request: Request) -> Started:
        other = self.other_for(request)
        if other is not None:
            return other.start(request)
        request, state, algorithm = self.choose(request)
        if request.x.shape[0] == 0:
            return Started(*request.allocate(state.world_size))
        hoped_for_multimem = state.multimem
        slot = self.slot_for(state, request.slot, algorithm.needs(request, state.world_size))
        if slot is None:
            return self._other(state).start(request)
        if hoped_for_multimem and not state.multimem:
            return self.start(request)  # the new memory has no multicast, so another kernel serves the call
        with torch.cuda.device(state.device):
            if request.overlap_sms:
                launch = partial(algorithm.launch, state=state, slot=slot, spin_limit=self.spin_limit)
                ready = replace(request, outputs=algorithm.outputs(request, state, slot))
                started = start_beside(ready, launch, self._in_turn(request))
            else:
                started = algorithm.launch(request, state, slot, self.spin_limit)
        self._remember(request, state, slot, started)
        return started

    def limit_spins(self, polls: int) -> None:
        """Make waits give up after ``polls`` polls, whatever TW_COMPILE_SPIN_LIMIT says. To be called before the first call."""
        self.spin_limit = polls

    def load(self, request: Request) -> None:
        """Compile and load the kernel that will serve the request, and launch nothing. Collective at a group's first use."""
        request, state, algorithm = self.choose(request)
        if state.obstacle is None:
            self._load((algorithm,), request, state)

    def known(self, group_name: str, device: torch.device, form: Hashable) -> Known | None:
        """See :class:`Transport`."""
        state = self.states.get((group_name, device))
        if state is None or state.group is not compat.resolve_process_group(group_name):
            return None
        if state.obstacle is not None:
            return self._other(state).known(group_name, device, form)
        return state.known.get(form)

    def _other(self, state: GroupState) -> Transport:
        """The transport for a group without this memory, and for calls in a CUDA-graph capture for which a slot has no room."""
        return get_transport("nccl" if state.obstacle is None else self.instead)

    def _remember(self, request: Request, state: GroupState, slot: Slot, started: Started) -> None:
        """Note how the request was served, so that later calls of its form take the short way.

        Not in debug mode (``TW_COMPILE_SPIN_LIMIT``), which looks at the slot before each call.
        """
        if request.form is None or started.call is None or self.spin_limit:
            return
        x, staging = request.x, slot.buffers.get("x")
        in_slot = staging is not None and x.data_ptr() == staging.tensor.data_ptr()
        if len(state.known) >= MOST_FORMS:
            state.known.clear()
        state.known[request.form] = Known(
            started.call,
            state.device,
            state.name,
            request.slot,
            request.overlap_sms,
            x if in_slot else None,
            self._in_turn(request),
        )

    def _in_turn(self, request: Request) -> bool:
        if self.in_turn_from is None or request.wire != EXACT:
            return False
        return request.x.nbytes >= self.in_turn_from

    def message_buffer(self, request: Request) -> torch.Tensor | None:
        """See :class:`Transport`.

        None if another transport will serve the call, or if the kernel's peers don't read ``x`` in place.
        """
        if self.other_for(request) is not None:
            return None
        request, state, algorithm = self.choose(request)
        if request.x.shape[0] == 0:
            return None
        # Make room for all buffers of the call, not only for this one. Then start grows nothing, and can't lack room and turn
        # to NCCL.
        needs = algorithm.needs(request, state.world_size)
        if "x" not in needs:
            return None
        slot = self.slot_for(state, request.slot, needs)
        return None if slot is None else slot.buffers["x"].view(tuple(request.x.shape), request.x.dtype)

    def reserved_bytes(self) -> int:
        """See :class:`Transport`."""
        return sum(slot.nbytes for state in self.states.values() for slot in state.slots.values())

    def choose(self, request: Request) -> tuple[Request, GroupState, Algorithm]:
        """The request as it is served (:meth:`Chooser.settled`), the group's state, and the algorithm, loaded.

        All three are the same on all ranks.

        Raises:
            RuntimeError: The kernels do not take such rows, or see :meth:`group_state`.
        """
        self.check_rows(request)
        state = self.group_state(request.group_name, request.x.device)
        settled = state.selector.settled(request, state)
        chosen = state.selector.choose(settled, state)
        self._prepare(settled, state, chosen)
        # If the group can't have this memory, another transport serves all its calls, and that may support the wire.
        return settled if state.obstacle is None else request, state, chosen

    def check_rows(self, request: Request) -> None:
        """RuntimeError if the kernels do not take such rows."""
        norm, x = request.norm, request.x
        # float8 has its own rules (check_hidden_scale), and the kernels take rows of float8 like others.
        hidden_dtype = x.dtype if norm.hidden_dtype == FP8 else norm.hidden_dtype
        require_supported(self.label, x.shape[1], x.dtype, hidden_dtype, norm.residual_dtype)

    def _prepare(self, request: Request, state: GroupState, chosen: Algorithm) -> None:
        """Load also the kernels for other message sizes: the first message of such a size may come during graph capture.

        During capture this does nothing, and the launch loads its own kernel (see ``kernels/runtime/launch.py``).
        """
        variant = (variant_of(request), request.overlap_sms > 0, request.feed_from > 0)
        if variant in state.prepared or torch.cuda.is_current_stream_capturing():
            return
        alternatives = state.selector.alternatives(request, state) or ((chosen,) if request.overlap_sms else ())
        if not alternatives:
            return
        if state.obstacle is None:
            self._load(alternatives, request, state)
        state.prepared.add(variant)

    def _load(self, algorithms: Sequence[Algorithm], request: Request, state: GroupState) -> None:
        """Compile and load the kernels of the algorithms for messages like the request."""
        with torch.cuda.device(state.device):
            compile_all(program for one in algorithms for program in one.programs(request, state, self.spin_limit))
            for algorithm in algorithms:
                algorithm.prepare(request, state, self.spin_limit)

    def check(self) -> None:
        """RuntimeError when a barrier of any slot gave up (TW_COMPILE_SPIN_LIMIT). Waits for the device; not in capture."""
        for state in self.states.values():
            torch.cuda.synchronize(state.device)  # calls beside other work are on streams of their own
            for index, slot in state.slots.items():
                raise_if_peer_missing(slot.status, state.rank, _where(state, index))

    def group_state(self, group_name: str, device: torch.device) -> GroupState:
        """What is known of a group on a device; collective at the first use of the group.

        Raises:
            RuntimeError: The device is no GPU, the group has too many ranks, or it is first used in a CUDA-graph capture.
        """
        group = compat.resolve_process_group(group_name)
        state = self.states.get((group_name, device))
        # A group may be destroyed and another group made under the same name, with other ranks and addresses.
        if state is None or state.group is not group:
            if device.type != "cuda":
                raise RuntimeError(f"{self.label}: needs CUDA tensors, got a tensor on {device}")
            if group.size() not in P2P_WORLD_SIZES:
                raise RuntimeError(
                    f"{self.label}: group {group_name!r} has {group.size()} ranks, "
                    f"supported are {P2P_WORLD_SIZES.start} to {P2P_WORLD_SIZES.stop - 1}"
                )
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"{self.label}: first use of group {group_name!r} during CUDA-graph capture. Its ranks must meet "
                    "and allocate first, which cannot be captured: run the model once (warm-up) before capturing it"
                )
            device_name = torch.cuda.get_device_name(device)
            steps = () if self.algorithm else self.steps(device_name, group.size())
            kernels = self.kernels_of, self.route(group)
            selector = Insist(self.algorithm, *kernels) if self.algorithm else Selector(steps, *kernels)
            state = GroupState(
                group_name,
                group,
                device,
                dist.get_rank(group),
                group.size(),
                selector,
                self.multicast,
                memory=self.memory,
                label=self.label,
                instead=self.instead,
            )
            obstacle = outside_pools(device, lambda: self.group_obstacle(group, device))
            obstacle = obstacle or outside_pools(
                device, lambda: common_obstacle(group, None, (device_name, steps, *kernels))
            )
            if obstacle is not None:
                state.give_up(obstacle)
            self.states[group_name, device] = state
        return state

    def slot_for(self, state: GroupState, index: int, needs: dict[str, int]) -> Slot | None:
        """The slot with buffers for ``needs`` (name -> bytes), or None: another transport serves this call.

        Collective if the slot grows.
        """
        if state.obstacle is not None:
            return None
        slot = state.slots.get(index)
        lacking = needs if slot is None else slot.lacks(needs)
        capturing = torch.cuda.is_current_stream_capturing()
        if slot is not None and self.spin_limit and not capturing:
            raise_if_peer_missing(slot.status, state.rank, _where(state, index))
        if lacking and capturing:
            if not state.warned:
                state.warned = True
                logger.warning(
                    "%s: %s has no room for %s bytes and cannot grow during CUDA-graph capture; this message "
                    "goes through NCCL. Run messages of all captured sizes once before capturing",
                    self.label,
                    _where(state, index),
                    max(lacking.values()),
                )
            return None
        if lacking:
            hoped_for_multimem = state.multimem
            slot = outside_pools(state.device, lambda: grow(state, index, lacking))
            if hoped_for_multimem and not state.multimem:
                logger.warning(
                    "multimem transport: %s has no multicast address (absent, or turned off in torch's symmetric memory); "
                    "group %r uses peer loads and stores instead",
                    _where(state, index),
                    state.name,
                )
        return slot


def _where(state: GroupState, index: int) -> str:
    return f"group {state.name!r}, slot {index}, {state.device}"


def require_supported(label: str, hidden_size: int, *dtypes: torch.dtype) -> None:
    """RuntimeError for rows the kernels do not take; ``choose_transport`` never sends such rows here."""
    for dtype in dtypes:
        if dtype not in SUPPORTED_DTYPES:
            raise RuntimeError(f"{label}: dtype {dtype} is not supported")
    row_bytes = hidden_size * dtypes[0].itemsize
    if hidden_size > P2P_MAX_HIDDEN or row_bytes % P2P_ROW_ALIGNMENT_BYTES:
        raise RuntimeError(
            f"{label}: rows of {hidden_size} x {dtypes[0]} are not supported: at most {P2P_MAX_HIDDEN} elements, "
            f"and a multiple of {P2P_ROW_ALIGNMENT_BYTES} bytes"
        )
