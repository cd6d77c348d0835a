"""Launches of ``push.cu``: one-shot and two-shot without barriers, for small and medium messages."""

from __future__ import annotations

from collections.abc import Hashable
from ctypes import Structure, c_int32, c_uint64, c_void_p
from dataclasses import replace
from pathlib import Path

import torch

from tw_compile.kernels.collective.algorithm import Algorithm
from tw_compile.kernels.collective.call import Call, allocators
from tw_compile.kernels.collective.cuda_variant import (
    NUMBER_FIELDS,
    POINTER_FIELDS,
    VECTOR,
    address,
    aligned,
    headers_of,
    numbers_of,
    row_defines,
    row_obstacle,
    variant_of,
)
from tw_compile.kernels.collective.slot import INBOX, GroupState, Slot
from tw_compile.kernels.collective.spec import (
    Request,
    operands_of,
    rows_per_rank,
    slice_of_whole_residual,
    whole_residual,
)
from tw_compile.kernels.collective.transport import Started
from tw_compile.kernels.epilogues import EPILOGUES
from tw_compile.kernels.runtime.launch import Kernel, prepare
from tw_compile.kernels.runtime.program import Program, arch_of

PARTS = 3
MOST_INBOX_BYTES = 256 * 2**20
MOST_SMS = 128
_PART_ALIGNMENT = 128


class PushParams(Structure):
    """``PushParams`` of push.cu."""

    _fields_ = [
        *POINTER_FIELDS,
        *((name, c_void_p) for name in ("inboxes", "state", "status")),
        ("part_bytes", c_uint64),
        *((name, c_int32) for name in ("rank", "tokens", "begin", "end")),
        *NUMBER_FIELDS,
    ]


def part_bytes(capacity: int) -> int:
    """Bytes of each of the three parts of an inbox of ``capacity`` bytes."""
    return capacity // PARTS // _PART_ALIGNMENT * _PART_ALIGNMENT


def threads_for(hidden_size: int, world_size: int) -> int:
    """Threads of a CTA, which holds one row: a vector each, as far as a CTA can have so many threads.

    A thread holds a vector of each peer: where there are many, half as many threads have twice the registers.
    """
    vectors = hidden_size // VECTOR
    each = -(-vectors // _max_threads(world_size))
    return -(-vectors // (32 * each)) * 32


def ctas_per_sm(threads: int, world_size: int) -> int:
    """CTAs of short rows share an SM, two at most."""
    return min(2, _max_threads(world_size) // threads)


def _max_threads(world_size: int) -> int:
    return 1024 if world_size <= 4 else 512


class Push(Algorithm):
    """Rows go to the peers' inboxes and say of themselves that they have arrived; CTAs for at most ``max_sms`` SMs.

    Calls on one slot need no more than one CTA of theirs to be resident. Where calls on several slots overlap, all CTAs of
    all but one of them must be, on every rank (``kernels/runtime/barrier.py``): choose ``max_sms`` for that. Messages that
    would need more than :data:`MOST_INBOX_BYTES` are done in several launches.
    """

    def __init__(self, one_shot: bool, max_sms: int = 128) -> None:
        if not 1 <= max_sms <= MOST_SMS:
            raise ValueError(f"max_sms: expected 1 to {MOST_SMS}, got {max_sms}")
        self.name = "push_one_shot" if one_shot else "push_two_shot"
        self._one_shot, self._max_sms = one_shot, max_sms
        self._kernels: dict[Hashable, Kernel] = {}

    def obstacle(self, request: Request, state: GroupState) -> str | None:
        if self._one_shot and request.overlap_sms:
            return "one-shot is for messages that are over before others could run beside them"
        if self._one_shot and request.residual_sharded and _whole_residual(request, state) is None:
            return "one-shot needs all rows of the residual"
        return row_obstacle(request)

    def sms(self, tokens: int, world_size: int) -> int:
        return min(self._local_rows(tokens, world_size), self._max_sms)

    def needs(self, request: Request, world_size: int) -> dict[str, int]:
        rows, row_bytes = self.rows_of_a_launch(request, world_size), self._row_bytes(request, world_size)
        return {INBOX: PARTS * (rows * row_bytes + _PART_ALIGNMENT)}

    def rows_of_a_launch(self, request: Request, world_size: int) -> int:
        """Local rows that the largest of the call's launches exchanges; they are of about equal size."""
        rows = self._local_rows(request.x.shape[0], world_size)
        most = max(1, (MOST_INBOX_BYTES // PARTS - _PART_ALIGNMENT) // self._row_bytes(request, world_size))
        return -(-rows // -(-rows // most))

    def _local_rows(self, tokens: int, world_size: int) -> int:
        """The rows that the CTAs share out: all rows in one-shot, the rows that a rank owns in two-shot."""
        return tokens if self._one_shot else rows_per_rank(tokens, world_size)

    def _row_bytes(self, request: Request, world_size: int) -> int:
        """Bytes that each local row takes in a part of an inbox."""
        element = request.x.element_size()
        if not self._one_shot:
            element += request.norm.hidden_dtype.itemsize
            if request.residual_out == "replicated":
                element += request.norm.residual_dtype.itemsize
        return (world_size - 1) * request.x.shape[1] * element

    def prepare(self, request: Request, state: GroupState, spin_limit: int) -> None:
        if row_obstacle(request) is not None:
            return
        if self._one_shot:
            residual_out = "replicated" if request.residual_out == "sharded" else request.residual_out
            request = replace(request, residual_sharded=False, residual_out=residual_out)
        self._kernel(request, state, spin_limit)

    def launch(self, request: Request, state: GroupState, slot: Slot, spin_limit: int) -> Started:
        request = aligned(request)
        call = self._call(request, state, slot, spin_limit)
        stream = torch.cuda.current_stream(state.device).cuda_stream
        return Started(*call.enqueue(operands_of(request), request.outputs, stream), call=call)

    def _call(self, request: Request, state: GroupState, slot: Slot, spin_limit: int) -> Call:
        """The launches of the request.

        In one-shot a rank computes all rows. So it needs the whole residual. Where a shard of the new residual is asked for, it
        returns a slice of the whole one.
        """
        tokens, world_size, rank = request.x.shape[0], state.world_size, state.rank
        residual_of = residual_out_of = None
        residual_rows = request.residual_rows(world_size)
        launched = request
        if self._one_shot and request.residual_sharded:
            launched = replace(launched, residual=_whole_residual(request, state), residual_sharded=False)

            def residual_of(shard: torch.Tensor) -> torch.Tensor:
                whole = whole_residual(shard, tokens, world_size, rank)
                assert whole is not None, "a form of calls with a whole residual has got one without"
                return whole

        if self._one_shot and request.residual_out == "sharded":
            launched = replace(launched, residual_out="replicated")
            residual_rows *= world_size

            def residual_out_of(whole: torch.Tensor) -> torch.Tensor:
                return slice_of_whole_residual(whole, world_size, rank)

        kernel = self._kernel(launched, state, spin_limit)
        threads = threads_for(request.x.shape[1], world_size)
        options = {
            "block": threads,
            # Statistics of the warps, of two rows.
            "shared_bytes": 2 * threads // 32 * EPILOGUES[request.norm.epilogue].statistics_bytes,
            "programmatic": not request.overlap_sms,
            "beside": request.overlap_sms > 0,
        }
        launches = self._launches(request, state, slot, threads)
        return Call(kernel, launches, options, *allocators(request, residual_rows), residual_of, residual_out_of)

    def _launches(self, request: Request, state: GroupState, slot: Slot, threads: int) -> list[tuple[PushParams, int]]:
        tokens, inbox = request.x.shape[0], slot.buffers[INBOX]
        assert inbox.state is not None
        rows, most = self._local_rows(tokens, state.world_size), self.rows_of_a_launch(request, state.world_size)
        ctas = request.limited(self._max_sms) * ctas_per_sm(threads, state.world_size)
        launches = []
        for begin in range(0, rows, most):
            end = min(begin + most, rows)
            params = PushParams(
                inboxes=address(inbox.table),
                state=address(inbox.state),
                status=address(slot.status),
                part_bytes=part_bytes(inbox.capacity),
                rank=state.rank,
                tokens=tokens,
                begin=begin,
                end=end,
                **numbers_of(request.norm),
            )
            launches.append((params, min(end - begin, ctas)))
        return launches

    def _kernel(self, request: Request, state: GroupState, spin_limit: int) -> Kernel:
        """The loaded kernel. In one-shot the caller has changed ``request`` to one with a whole residual."""
        key = (variant_of(request), state.world_size, state.device)
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = self._kernels[key] = self._prepare(request, state, spin_limit)
        return kernel

    def _prepare(self, request: Request, state: GroupState, spin_limit: int) -> Kernel:
        defines = row_defines(request, state.world_size, spin_limit)
        threads = threads_for(request.x.shape[1], state.world_size)
        ctas = ctas_per_sm(threads, state.world_size)
        defines |= {"ONE_SHOT": int(self._one_shot), "THREADS": threads, "CTAS_PER_SM": ctas}
        arch = arch_of(torch.cuda.get_device_capability(state.device))
        source = Path(__file__).with_name("push.cu")
        program = Program(source, PushParams, arch, tuple(defines.items()), headers_of(request))
        return prepare(program, state.device.index)


def _whole_residual(request: Request, state: GroupState) -> torch.Tensor | None:
    assert request.residual is not None
    return whole_residual(request.residual, request.x.shape[0], state.world_size, state.rank)
