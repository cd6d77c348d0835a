"""Launches of ``push.cu``: one-shot and two-shot without barriers, for small and medium messages."""

from __future__ import annotations

from collections.abc import Hashable
from ctypes import Structure, c_float, c_int32, c_uint64, c_void_p
from typing import TYPE_CHECKING

import torch

from tw_compile.kernels._sync import MAX_WORLD_SIZE
from tw_compile.kernels.all_reduce_rms_norm.algorithm import Algorithm
from tw_compile.kernels.all_reduce_rms_norm.cuda_variant import (
    SOURCES,
    VECTOR,
    address,
    row_defines,
    row_obstacle,
    variant_of,
)
from tw_compile.kernels.all_reduce_rms_norm.spec import Request, rows_per_rank
from tw_compile.kernels.all_reduce_rms_norm.transport import Started
from tw_compile.kernels.cuda.launch import Kernel, prepare
from tw_compile.kernels.cuda.program import Program, arch_of

if TYPE_CHECKING:
    from tw_compile.kernels.all_reduce_rms_norm.slot import GroupState, Slot

MAX_PUSH_CTAS = 128
PARTS = 3
_PART_ALIGNMENT = 128
_MAX_THREADS = 1024


class PushParams(Structure):
    """``PushParams`` of push.cu."""

    _fields_ = [
        *((name, c_void_p) for name in ("x", "residual", "bias", "weight", "hidden_scale", "hidden", "residual_out")),
        *((name, c_void_p) for name in ("inboxes", "state", "status")),
        ("part_bytes", c_uint64),
        *((name, c_int32) for name in ("rank", "tokens")),
        *((name, c_float) for name in ("eps", "weight_offset", "scale")),
    ]


def part_bytes(capacity: int) -> int:
    """Bytes of each of the three parts of an inbox of ``capacity`` bytes."""
    return capacity // PARTS // _PART_ALIGNMENT * _PART_ALIGNMENT


def threads_for(hidden_size: int) -> int:
    """Threads of a CTA, which holds one row: a vector each, as far as a CTA can have so many threads."""
    vectors = hidden_size // VECTOR
    each = -(-vectors // _MAX_THREADS)
    return -(-vectors // (32 * each)) * 32


class Push(Algorithm):
    """Rows go to the peers' inboxes and say of themselves that they have arrived; at most ``max_ctas`` CTAs."""

    def __init__(self, one_shot: bool, max_ctas: int = MAX_PUSH_CTAS) -> None:
        if not 1 <= max_ctas <= MAX_PUSH_CTAS:
            raise ValueError(f"max_ctas: expected 1 to {MAX_PUSH_CTAS}, got {max_ctas}")
        self._one_shot, self._max_ctas = one_shot, max_ctas
        self._kernels: dict[Hashable, Kernel] = {}

    def obstacle(self, request: Request) -> str | None:
        return row_obstacle(request)

    def ctas(self, tokens: int, world_size: int) -> int:
        return min(tokens if self._one_shot else rows_per_rank(tokens, world_size), self._max_ctas)

    def needs(self, request: Request, world_size: int, slot: Slot | None) -> dict[str, int]:
        tokens, hidden_size = request.x.shape
        element = request.x.element_size()
        rows = tokens
        if not self._one_shot:
            rows = rows_per_rank(tokens, world_size)
            element += request.norm.hidden_dtype.itemsize
            if request.residual_out == "replicated":
                element += request.norm.residual_dtype.itemsize
        return {"inbox": PARTS * ((world_size - 1) * rows * hidden_size * element + _PART_ALIGNMENT)}

    def launch(self, request: Request, state: GroupState, slot: Slot, spin_limit: int) -> Started:
        norm = request.norm
        hidden, residual = request.allocate(state.world_size)
        key = (variant_of(request), state.world_size, state.device)
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = self._kernels[key] = self._prepare(request, state, spin_limit)
        inbox = slot.buffers["inbox"]
        assert inbox.state is not None
        params = PushParams(
            address(request.x),
            address(request.residual),
            address(request.bias),
            address(request.weight),
            address(request.hidden_scale),
            address(hidden),
            address(residual),
            address(inbox.table),
            address(inbox.state),
            address(slot.push_status),
            part_bytes(inbox.capacity),
            state.rank,
            request.x.shape[0],
            norm.eps,
            norm.weight_offset,
            norm.scale,
        )
        kernel.launch(
            params,
            stream=torch.cuda.current_stream(state.device).cuda_stream,
            grid=self.ctas(request.x.shape[0], state.world_size),
            block=threads_for(request.x.shape[1]),
            programmatic=True,
        )
        return Started(hidden, residual)

    def _prepare(self, request: Request, state: GroupState, spin_limit: int) -> Kernel:
        defines = row_defines(request, state.world_size, spin_limit)
        defines |= {"ONE_SHOT": int(self._one_shot), "THREADS": threads_for(request.x.shape[1])}
        arch = arch_of(torch.cuda.get_device_capability(state.device))
        return prepare(Program(SOURCES / "push.cu", PushParams, arch, tuple(defines.items())), state.device.index)


def new_inbox_state(device: torch.device) -> torch.Tensor:
    """``PushState`` of push.cu, for an inbox that is all cleared."""
    return torch.zeros(2 + PARTS, dtype=torch.int32, device=device)


def new_push_status(device: torch.device) -> torch.Tensor:
    """Zeros: nobody has given up waiting."""
    return torch.zeros((MAX_PUSH_CTAS, MAX_WORLD_SIZE), dtype=torch.int32, device=device)
