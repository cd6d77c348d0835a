"""The P2P transport: slots of symmetric memory and the launches of the two-shot kernel.

A slot belongs to (group, slot index, device) and owns everything that a launch needs: buffers, pads and epochs (see
``tw_compile.kernels._sync``), so calls on different slots or groups may run at once, on different streams. Calls on
one slot must follow each other: on one stream, or ordered by events.

What is decided here is decided from values that all ranks share (shapes, capacity, whether a graph is being captured)
or agreed by a collective, so all ranks launch the same kernel, with the same grid, or all use the NCCL transport.

Whether a launch adds up and publishes rows by peer loads and stores or by NVLink multicast is decided here too, because
only symmetric memory knows, once buffers exist, if they have a multicast address. Nothing here asks for one: torch makes
it by itself, unless TORCH_SYMM_MEM_DISABLE_MULTICAST=1.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import triton

from tw_compile import compat
from tw_compile.kernels._multimem import ACCESS_BYTES
from tw_compile.kernels._sync import MAX_CTAS, MAX_WORLD_SIZE, raise_if_peer_missing, spin_limit
from tw_compile.kernels.all_reduce_rms_norm.p2p_group import agree, group_obstacle, outside_pools
from tw_compile.kernels.all_reduce_rms_norm.p2p_kernel import all_reduce_rms_norm_kernel
from tw_compile.kernels.all_reduce_rms_norm.row import launch_shape, triton_dtype
from tw_compile.kernels.all_reduce_rms_norm.spec import FP8, SUPPORTED_DTYPES, Request, rows_per_rank
from tw_compile.kernels.all_reduce_rms_norm.transport import (
    MULTIMEM_MIN_WORLD_SIZE,
    P2P_MAX_HIDDEN,
    P2P_ROW_ALIGNMENT_BYTES,
    P2P_WORLD_SIZES,
    Started,
    Transport,
    get_transport,
)

logger = logging.getLogger("tw_compile")

MIN_CAPACITY_BYTES = 32 * 2**20
"""Smallest size of a symmetric buffer."""


def grid_size(tokens: int, world_size: int) -> int:
    """CTAs of a launch; a function of rank-invariant values only, which the barriers need."""
    return min(rows_per_rank(tokens, world_size), MAX_CTAS)


def capacity_for(nbytes: int) -> int:
    """Bytes to allocate for messages of ``nbytes``: a power of two, at least ``MIN_CAPACITY_BYTES``."""
    return max(MIN_CAPACITY_BYTES, triton.next_power_of_2(nbytes))


@dataclass(frozen=True)
class SymmetricBuffer:
    """``capacity`` bytes on every rank.

    ``table``: ``int64 [world + 1]`` on the device, the addresses by rank and then the multicast address, or 0.
    """

    tensor: torch.Tensor
    handle: Any
    table: torch.Tensor
    capacity: int


@dataclass
class Slot:
    """Memory of one slot on this rank; pads and epochs live as long as the slot, buffers may be replaced by larger ones."""

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


@dataclass
class GroupState:
    """A process group as this transport sees it; the same on all ranks but for ``rank``.

    ``obstacle``: why it uses NCCL instead. ``multimem``: use multicast, which ends when a buffer has no multicast address.
    """

    name: str
    group: dist.ProcessGroup
    device: torch.device
    rank: int
    world_size: int
    multimem: bool = False
    obstacle: str | None = None
    slots: dict[int, Slot] = field(default_factory=dict)
    warned: bool = False

    def give_up(self, reason: str) -> None:
        """From now on this group uses NCCL."""
        self.obstacle = reason
        logger.warning("P2P transport: group %r uses NCCL instead; %s", self.name, reason)


class P2PTransport(Transport):
    """Two-shot kernels over symmetric memory; falls back to the NCCL transport, by agreement of all ranks.

    Groups of at least ``multimem_from`` ranks use multicast if all their buffers have it, others peer loads and stores.
    ``emulate_multimem``, for tests: all groups do as with multicast, with loops in the place of its instructions.
    """

    def __init__(
        self, name: str = "p2p", multimem_from: int = MULTIMEM_MIN_WORLD_SIZE, emulate_multimem: bool = False
    ) -> None:
        self.name = name
        self._multimem_from = multimem_from
        self._emulate_multimem = emulate_multimem
        self._states: dict[tuple[str, torch.device], GroupState] = {}
        self._spin_limit = spin_limit()

    def start(self, request: Request) -> Started:
        x, norm = request.x, request.norm
        tokens, hidden_size = x.shape
        # float8 has its own rules (check_hidden_scale), and rows of it are as good as others.
        hidden_dtype = x.dtype if norm.hidden_dtype == FP8 else norm.hidden_dtype
        _require_supported(hidden_size, x.dtype, hidden_dtype, norm.residual_dtype)
        state = self._state(request.group_name, x.device)
        if tokens == 0:
            return Started(*request.allocate(state.world_size))
        elements = tokens * hidden_size
        needs = {"x": elements * x.element_size(), "hidden": elements * norm.hidden_dtype.itemsize}
        if request.residual_out == "replicated":
            needs["residual"] = elements * norm.residual_dtype.itemsize
        slot = self._slot(state, request.slot, needs)
        if slot is None:
            return get_transport("nccl").start(request)
        hidden, residual = request.allocate(state.world_size)
        block, num_warps = launch_shape(hidden_size)
        primitives = "p2p"
        if self._emulate_multimem:
            primitives = "emulated"
        elif state.multimem and takes_multimem(hidden_size, x.dtype, norm.hidden_dtype, norm.residual_dtype):
            primitives = "multimem"
        grid = grid_size(tokens, state.world_size)
        with torch.cuda.device(state.device):
            all_reduce_rms_norm_kernel[(grid,)](
                x,
                request.residual,
                request.bias,
                request.weight,
                hidden,
                residual,
                request.hidden_scale,
                None if primitives == "p2p" else x.new_empty((grid, hidden_size)),
                slot.buffers["x"].table,
                slot.buffers["hidden"].table,
                slot.buffers["residual"].table if request.residual_out == "replicated" else None,
                slot.pads.table,
                slot.epochs,
                slot.status,
                state.rank,
                tokens,
                norm.eps,
                norm.weight_offset,
                norm.scale,
                HIDDEN=hidden_size,
                BLOCK=block,
                WORLD_SIZE=state.world_size,
                RESIDUAL_SHARDED=request.residual_sharded,
                RESIDUAL_OUT=request.residual_out,
                CAST_BEFORE_WEIGHT=triton_dtype(norm.cast_before_weight),
                SPIN_LIMIT=self._spin_limit,
                PRIMITIVES=primitives,
                num_warps=num_warps,
            )
        return Started(hidden, residual)

    def check(self) -> None:
        """RuntimeError when a barrier of any slot gave up (TW_COMPILE_SPIN_LIMIT). Waits for the device; not in capture."""
        for state in self._states.values():
            for index, slot in state.slots.items():
                raise_if_peer_missing(slot.status, state.rank, _where(state, index))

    def _state(self, group_name: str, device: torch.device) -> GroupState:
        group = compat.resolve_process_group(group_name)
        state = self._states.get((group_name, device))
        # A group may be destroyed and another made under the same name; its ranks and addresses are others.
        if state is None or state.group is not group:
            if device.type != "cuda":
                raise RuntimeError(f"P2P transport: needs CUDA tensors, got a tensor on {device}")
            if group.size() not in P2P_WORLD_SIZES:
                raise RuntimeError(
                    f"P2P transport: group {group_name!r} has {group.size()} ranks, "
                    f"supported are {P2P_WORLD_SIZES.start} to {P2P_WORLD_SIZES.stop - 1}"
                )
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"P2P transport: first use of group {group_name!r} during CUDA-graph capture. Its ranks must meet "
                    "and allocate first, which cannot be captured: run the model once (warm-up) before capturing it"
                )
            multimem = group.size() >= self._multimem_from and not self._emulate_multimem
            state = GroupState(group_name, group, device, dist.get_rank(group), group.size(), multimem)
            obstacle = outside_pools(device, lambda: group_obstacle(group, device))
            if obstacle is not None:
                state.give_up(obstacle)
            self._states[group_name, device] = state
        return state

    def _slot(self, state: GroupState, index: int, needs: dict[str, int]) -> Slot | None:
        """The slot with buffers for ``needs`` (name -> bytes), or None: this call goes through NCCL. Collective if it grows."""
        if state.obstacle is not None:
            return None
        slot = state.slots.get(index)
        lacking = needs if slot is None else slot.lacks(needs)
        capturing = torch.cuda.is_current_stream_capturing()
        if slot is not None and self._spin_limit and not capturing:
            raise_if_peer_missing(slot.status, state.rank, _where(state, index))
        if lacking and capturing:
            if not state.warned:
                state.warned = True
                logger.warning(
                    "P2P transport: %s has no room for %s bytes and cannot grow during CUDA-graph capture; this message "
                    "goes through NCCL. Run the largest message once before capturing",
                    _where(state, index),
                    max(lacking.values()),
                )
            return None
        if lacking:
            hoped_for_multimem = state.multimem
            slot = outside_pools(state.device, lambda: _grow(state, index, lacking))
            if hoped_for_multimem and not state.multimem and self.name == "multimem":
                logger.warning(
                    "multimem transport: %s has no multicast address (absent, or turned off in torch's symmetric memory); "
                    "group %r uses peer loads and stores instead",
                    _where(state, index),
                    state.name,
                )
        return slot


def _where(state: GroupState, index: int) -> str:
    return f"group {state.name!r}, slot {index}, {state.device}"


def takes_multimem(hidden_size: int, *dtypes: torch.dtype) -> bool:
    """Whether rows of ``hidden_size`` in all of ``dtypes`` can be moved by multicast, in whole accesses; else peers' do."""
    return all(hidden_size * dtype.itemsize % ACCESS_BYTES == 0 for dtype in dtypes)


def _require_supported(hidden_size: int, *dtypes: torch.dtype) -> None:
    """RuntimeError for rows the kernels do not take; ``choose_transport`` never sends such rows here."""
    for dtype in dtypes:
        if dtype not in SUPPORTED_DTYPES:
            raise RuntimeError(f"P2P transport: dtype {dtype} is not supported")
    row_bytes = hidden_size * dtypes[0].itemsize
    if hidden_size > P2P_MAX_HIDDEN or row_bytes % P2P_ROW_ALIGNMENT_BYTES:
        raise RuntimeError(
            f"P2P transport: rows of {hidden_size} x {dtypes[0]} are not supported: at most {P2P_MAX_HIDDEN} elements, "
            f"and a multiple of {P2P_ROW_ALIGNMENT_BYTES} bytes"
        )


def _grow(state: GroupState, index: int, lacking: dict[str, int]) -> Slot | None:
    """The slot, with buffers of at least ``lacking`` bytes; None, and the group gives up, when a rank cannot.

    Collective. Nothing changes before all ranks have everything: a failure on any rank leaves the group without this
    transport, on all ranks alike.
    """
    sizes = {name: capacity_for(nbytes) for name, nbytes in lacking.items()}
    if index not in state.slots:
        sizes["pads"] = MAX_CTAS * MAX_WORLD_SIZE * 4
    tensors: dict[str, torch.Tensor] = {}
    made: dict[str, SymmetricBuffer] = {}
    has_multicast = True
    offsets: dict[str, int] = {}
    obstacle = None
    try:
        tensors = {name: compat.symm_mem_empty(size, state.device) for name, size in sizes.items()}
    except RuntimeError as error:
        obstacle = f"symmetric memory: cannot allocate {sum(sizes.values())} bytes: {error}"
    obstacle = agree(state.group, obstacle, sizes)
    if obstacle is None:
        try:
            for name, tensor in tensors.items():
                tensor.zero_()
                handle, addresses, multicast, offsets[name] = compat.symm_mem_rendezvous(tensor, state.name)
                table = torch.tensor([*addresses, multicast], dtype=torch.int64, device=state.device)
                has_multicast &= multicast != 0
                made[name] = SymmetricBuffer(tensor, handle, table, sizes[name])
        except RuntimeError as error:
            obstacle = f"symmetric memory: rendezvous failed: {error}"
        epochs = torch.zeros(MAX_CTAS, dtype=torch.int32, device=state.device)
        status = torch.zeros((MAX_CTAS, MAX_WORLD_SIZE), dtype=torch.int32, device=state.device)
        # The agreement is the barrier after which peers may write here: the zeros must be in memory before it.
        torch.cuda.synchronize(state.device)
        obstacle = agree(state.group, obstacle, offsets)
    if obstacle is not None:
        state.give_up(obstacle)
        return None
    if state.multimem:
        state.multimem = agree(state.group, None if has_multicast else "no multicast address") is None
    if index not in state.slots:
        state.slots[index] = Slot(made.pop("pads"), epochs, status)
    slot = state.slots[index]
    slot.retired += [slot.buffers[name] for name in made if name in slot.buffers]
    slot.buffers.update(made)
    return slot
