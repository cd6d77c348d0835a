"""Memory that all ranks of a node reach: which slots a group has, what buffers a slot has, and how they grow."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import triton

from tw_compile import compat
from tw_compile.agree import common_obstacle
from tw_compile.kernels.gemm.fed import STATE_WORDS
from tw_compile.kernels.runtime.barrier import MAX_CTAS, MAX_WORLD_SIZE, REPORT_ROWS

if TYPE_CHECKING:
    from tw_compile.kernels.collective.known import Known
    from tw_compile.kernels.transports.selection import Insist, Selector

logger = logging.getLogger("tw_compile")

MIN_CAPACITY_BYTES = 32 * 2**20
"""Smallest size of a symmetric buffer."""

INBOX = "inbox"
FED = "fed"
NOT_ARRIVED = -(2**31)
"""The value, as int32, of an inbox word to which nothing has been written; elements.cuh defines it too."""

OUTBOX, WORDS = "outbox", "words"
HOST_MAX_CTAS = 24
"""The most CTAs of a call of host_rows.cu. Two ranks have them for rows in codes. An outbox has rings for all of them."""

_STATE_WORDS = {INBOX: 4, FED: STATE_WORDS, OUTBOX: 2 * HOST_MAX_CTAS, WORDS: 2}
"""How many int32 words a kernel keeps beside its buffer, by the buffer's name. They are PushState of push.cu, FedState of
fed.cuh, the state of host_rows.cu, and HostWordsState of host_words.cu."""


def state_words(buffer: str) -> int:
    """How many int32 words a kernel keeps on the device beside a buffer of that name; they are zero at first."""
    return _STATE_WORDS.get(buffer, 0)


def capacity_for(nbytes: int) -> int:
    """Bytes to allocate for messages of ``nbytes``: a power of two, at least ``MIN_CAPACITY_BYTES``."""
    return max(MIN_CAPACITY_BYTES, triton.next_power_of_2(nbytes))


@dataclass(frozen=True)
class Shared:
    """One buffer with a part on every rank.

    Attributes:
        handle: The object that keeps the memory alive; the buffer must not outlive it.
        addresses: The address of each rank's part, as this rank's device reaches it.
        multicast: The multicast address of all parts together, or 0.
        offset: Where the part begins in its allocation, in bytes; it must be the same on all ranks.
    """

    handle: Any
    addresses: list[int]
    multicast: int = 0
    offset: int = 0


class SlotMemory(ABC):
    """A kind of memory for the buffers of slots."""

    def capacity_for(self, nbytes: int) -> int:
        """Bytes to allocate where ``nbytes`` are needed."""
        return capacity_for(nbytes)

    @abstractmethod
    def allocate(self, sizes: Mapping[str, int], device: torch.device) -> dict[str, torch.Tensor]:
        """Allocate this rank's parts, ``uint8 [bytes]``, by name; RuntimeError if there is no room."""

    @abstractmethod
    def share(self, tensors: Mapping[str, torch.Tensor], state: GroupState) -> dict[str, Shared]:
        """Exchange the parts of all ranks. Collective, after all ranks have allocated.

        RuntimeError if this rank can't reach a part.
        """

    def settle(self, tensors: Mapping[str, torch.Tensor]) -> None:  # noqa: B027
        """Called when all ranks have all parts, or when the growth has failed. After this no rank will open the parts."""


class SymmetricMemory(SlotMemory):
    """torch's symmetric memory: memory of the GPUs that peers can reach."""

    def allocate(self, sizes: Mapping[str, int], device: torch.device) -> dict[str, torch.Tensor]:
        """See :class:`SlotMemory`."""
        try:
            return {name: compat.symm_mem_empty(size, device) for name, size in sizes.items()}
        except RuntimeError as error:
            raise RuntimeError(f"symmetric memory: cannot allocate {sum(sizes.values())} bytes: {error}") from error

    def share(self, tensors: Mapping[str, torch.Tensor], state: GroupState) -> dict[str, Shared]:
        """See :class:`SlotMemory`."""
        try:
            return {name: Shared(*compat.symm_mem_rendezvous(tensor, state.name)) for name, tensor in tensors.items()}
        except RuntimeError as error:
            raise RuntimeError(f"symmetric memory: rendezvous failed: {error}") from error


@dataclass(frozen=True)
class SymmetricBuffer:
    """A buffer of ``capacity`` bytes on every rank.

    ``table`` is ``int64 [world + 1]`` on the device: the address of each rank's part, then the multicast address or 0.
    ``state`` holds the words that a kernel keeps for this buffer (:func:`state_words`). Both live as long as the buffer,
    because captured graphs go on using them.
    """

    tensor: torch.Tensor
    handle: Any
    table: torch.Tensor
    capacity: int
    state: torch.Tensor | None = None

    def view(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The first bytes of this rank's part as a tensor."""
        nbytes = math.prod(shape) * dtype.itemsize
        return self.tensor[:nbytes].view(dtype).view(shape)


@dataclass
class Slot:
    """The memory of one slot on this rank. Pads and epochs live as long as the slot; larger buffers may replace its buffers."""

    pads: SymmetricBuffer
    epochs: torch.Tensor
    status: torch.Tensor
    buffers: dict[str, SymmetricBuffer] = field(default_factory=dict)
    retired: list[SymmetricBuffer] = field(default_factory=list)  # captured CUDA graphs may still use them

    def lacks(self, needs: dict[str, int]) -> dict[str, int]:
        """Which buffers of ``needs`` (name -> bytes) are missing or too small."""
        return {
            name: nbytes
            for name, nbytes in needs.items()
            if name not in self.buffers or self.buffers[name].capacity < nbytes
        }

    @property
    def nbytes(self) -> int:
        """Memory of this rank that peers reach."""
        return sum(buffer.capacity for buffer in (self.pads, *self.buffers.values(), *self.retired))


@dataclass
class GroupState:
    """What a transport knows of a process group. All ranks have the same values, but for ``rank``.

    Attributes:
        selector: Chooses the kernel of a call.
        obstacle: Why the group uses another transport, the one named by ``instead``; None: it uses this one.
        multimem: Whether multicast is used. This ends when a buffer has no multicast address.
        prepared: The variants of requests whose kernels are loaded.
        known: How calls were served, by form. No entry outlives the buffers that it names.
    """

    name: str
    group: dist.ProcessGroup
    device: torch.device
    rank: int
    world_size: int
    selector: Selector | Insist
    multimem: bool = False
    obstacle: str | None = None
    slots: dict[int, Slot] = field(default_factory=dict)
    warned: bool = False
    prepared: set[Hashable] = field(default_factory=set)
    known: dict[Hashable, Known] = field(default_factory=dict)
    memory: SlotMemory = field(default_factory=SymmetricMemory)
    label: str = "P2P transport"
    instead: str = "host"

    def give_up(self, reason: str) -> None:
        """Make this group use the transport ``instead`` from now on; ``reason`` says why."""
        self.obstacle = reason
        self.known.clear()
        logger.warning("%s: group %r uses %s instead; %s", self.label, self.name, self.instead, reason)


def grow(state: GroupState, index: int, lacking: dict[str, int]) -> Slot | None:
    """Give the slot buffers of at least ``lacking`` bytes (name -> bytes), and return it.

    Returns None if any rank fails; then the group gives up this transport, on all ranks alike. Collective. Nothing changes
    before all ranks have all buffers.
    """
    state.known.clear()
    memory = state.memory
    sizes = {name: memory.capacity_for(nbytes) for name, nbytes in lacking.items()}
    if index not in state.slots:
        sizes["pads"] = MAX_CTAS * MAX_WORLD_SIZE * 4
    tensors: dict[str, torch.Tensor] = {}
    shared: dict[str, Shared] = {}
    made: dict[str, SymmetricBuffer] = {}
    obstacle = None
    try:
        try:
            tensors = memory.allocate(sizes, state.device)
            for name, tensor in tensors.items():
                tensor.view(torch.int32).fill_(NOT_ARRIVED if name == INBOX else 0)
        except RuntimeError as error:
            obstacle = str(error)
        obstacle = common_obstacle(state.group, obstacle, sizes)
        if obstacle is None:
            try:
                shared = memory.share(tensors, state)
                # Device memory may be full on this rank alone. The others would wait for ever in the agreement below.
                for name, parts in shared.items():
                    table = torch.tensor([*parts.addresses, parts.multicast], dtype=torch.int64, device=state.device)
                    words = torch.zeros(state_words(name), dtype=torch.int32, device=state.device)
                    made[name] = SymmetricBuffer(tensors[name], parts.handle, table, sizes[name], words)
                epochs = torch.zeros(MAX_CTAS, dtype=torch.int32, device=state.device)
                status = torch.zeros((REPORT_ROWS, MAX_WORLD_SIZE), dtype=torch.int32, device=state.device)
                # Peers may write here after the agreement below, which acts as a barrier. The fills above must be in memory
                # before.
                torch.cuda.synchronize(state.device)
            except RuntimeError as error:
                obstacle = str(error)
            obstacle = common_obstacle(state.group, obstacle, {name: parts.offset for name, parts in shared.items()})
    finally:
        memory.settle(tensors)
    if obstacle is not None:
        state.give_up(obstacle)
        return None
    has_multicast = all(parts.multicast for parts in shared.values())
    if state.multimem:
        state.multimem = common_obstacle(state.group, None if has_multicast else "no multicast address") is None
    if index not in state.slots:
        state.slots[index] = Slot(made.pop("pads"), epochs, status)
    slot = state.slots[index]
    slot.retired += [slot.buffers[name] for name in made if name in slot.buffers]
    slot.buffers.update(made)
    return slot
