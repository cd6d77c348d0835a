"""The first hop of two-shot: each rank sums the rows that it owns, and keeps the normalised rows in the slot's memory.

This is for calls whose rows are fed to a GEMM. The GEMM does the second hop: it sends a rank's rows to the other ranks, and
receives theirs (``kernels/runtime/fed.cuh``, which explains why this is correct).
"""

from __future__ import annotations

from ctypes import Structure, c_void_p
from typing import Any

import torch

from tw_compile.kernels.algorithms.push.push import Push, PushParams
from tw_compile.kernels.collective.cuda_variant import address
from tw_compile.kernels.collective.slot import FED, GroupState, Slot
from tw_compile.kernels.collective.spec import Request, row_range
from tw_compile.kernels.collective.wires import EXACT
from tw_compile.kernels.gemm.fed import MOST_ROWS, FedRows, fed_bytes, rows_in
from tw_compile.kernels.runtime.wgmma import BOX_COLUMNS, has_instructions


class FedPushParams(Structure):
    """``PushParams`` of push.cu with FED."""

    _fields_ = [*PushParams._fields_, ("fed", c_void_p)]


FedPushParams.__name__ = PushParams.__name__


class FedPush(Push):
    """Serves calls of ``feed_from`` tokens or more, on at most ``max_sms`` SMs; each call is one launch."""

    params = FedPushParams
    wires = False

    def __init__(self, max_sms: int = 128) -> None:
        super().__init__(False, max_sms)
        self.name = "push_fed"

    def obstacle(self, request: Request, state: GroupState) -> str | None:
        """See :class:`Algorithm`."""
        tokens = request.x.shape[0]
        if not request.feed_from or tokens < request.feed_from:
            return "no GEMM is fed its rows"
        if request.overlap_sms:
            return "rows that a GEMM is fed are not made beside other work"
        if tokens > MOST_ROWS:
            return f"{tokens} tokens are more than {MOST_ROWS}"
        if self.rows_of_a_launch(request, state.world_size) < self.local_rows(tokens, state.world_size):
            return "the message takes several launches"
        return super().obstacle(request, state)

    def _row_obstacle(self, request: Request) -> str | None:
        if request.norm.hidden_dtype != torch.bfloat16 or request.wire != EXACT:
            return "a GEMM is fed rows of bfloat16, as they are"
        if request.residual_out == "replicated":
            return "all ranks want all rows of the residual"
        if request.x.shape[1] % BOX_COLUMNS:
            return f"hidden_size {request.x.shape[1]} is not a multiple of {BOX_COLUMNS}"
        if not has_instructions(request.x.device):
            return "no GEMM on this device takes rows as they arrive"
        return super()._row_obstacle(request)

    def needs(self, request: Request, world_size: int) -> dict[str, int]:
        """See :class:`Algorithm`."""
        return super().needs(request, world_size) | {FED: fed_bytes(*request.x.shape)}

    def _returned_bytes(self, request: Request) -> int:
        return 0

    def defines(self, request: Request, state: GroupState) -> dict[str, int | str]:
        """See :class:`RowKernel`."""
        return super().defines(request, state) | {"FED": 1}

    def _more_params(self, slot: Slot) -> dict[str, Any]:
        return {"fed": address(slot.buffers[FED].state)}

    def fed_rows(self, request: Request, state: GroupState, slot: Slot, spin_limit: int) -> FedRows | None:
        """See :class:`RowKernel`."""
        memory = slot.buffers[FED]
        assert memory.state is not None
        rows, rank, world_size = rows_in(memory.tensor, *request.x.shape), state.rank, state.world_size
        own = row_range(len(rows), world_size, rank)
        return FedRows(rows, memory.table, memory.state, slot.status, rank, world_size, *own, spin_limit)
