"""Launches of the two-shot Triton kernel (``kernel.py``)."""

from __future__ import annotations

from typing import Any

import torch

from tw_compile.kernels.algorithms.two_shot.kernel import all_reduce_rms_norm_kernel
from tw_compile.kernels.collective.algorithm import Algorithm
from tw_compile.kernels.collective.cuda_variant import MAKES_NO_SCALES
from tw_compile.kernels.collective.row import launch_shape, triton_dtype
from tw_compile.kernels.collective.slot import GroupState, Slot
from tw_compile.kernels.collective.spec import Request, rows_per_rank
from tw_compile.kernels.collective.transport import Started
from tw_compile.kernels.collective.wires import EXACT
from tw_compile.kernels.epilogues import EPILOGUES
from tw_compile.kernels.registry import load
from tw_compile.kernels.runtime.barrier import MAX_CTAS


class TwoShot(Algorithm):
    """Serves all messages of the transport whose rows travel as they are."""

    name = "two_shot"

    def obstacle(self, request: Request, state: GroupState) -> str | None:
        if request.norm.scale_columns:
            return MAKES_NO_SCALES
        return None if request.wire == EXACT else f"rows travel as they are, not as {request.wire}"

    def sms(self, tokens: int, world_size: int) -> int:
        return min(rows_per_rank(tokens, world_size), MAX_CTAS)

    def needs(self, request: Request, world_size: int) -> dict[str, int]:
        norm, elements = request.norm, request.x.numel()
        needs = {"x": request.x.nbytes, "hidden": elements * norm.hidden_dtype.itemsize}
        if request.residual_out == "replicated":
            needs["residual"] = elements * norm.residual_dtype.itemsize
        return needs

    def prepare(self, request: Request, state: GroupState, spin_limit: int) -> None:
        if self.obstacle(request, state) is not None:
            return
        norm, x = request.norm, request.x
        replicated = request.residual_out == "replicated"
        for staged in (False, True):
            # Dtypes stand in for tensors here: Triton assumes tensors at multiples of 16 bytes, as torch allocates them.
            kernel = all_reduce_rms_norm_kernel.warmup(
                x.dtype,
                *(
                    tensor if tensor is None else tensor.dtype
                    for tensor in (request.residual, request.bias, request.weight, request.norm_bias)
                ),
                *(norm.hidden_dtype, norm.residual_dtype),
                None if request.hidden_scale is None else request.hidden_scale.dtype,
                *(torch.int64, torch.int64, torch.int64 if replicated else None, torch.int64),
                *(torch.int32, torch.int32),
                *(state.rank, x.shape[0], norm.eps, norm.weight_offset, norm.scale),
                **_constants(request, state, spin_limit, staged),
                grid=(1,),
            )
            kernel._init_handles()  # loads it, as the first launch would

    def launch(self, request: Request, state: GroupState, slot: Slot, spin_limit: int) -> Started:
        x, norm = request.x, request.norm
        tokens = x.shape[0]
        hidden, residual = request.allocate(state.world_size)
        staging = slot.buffers["x"]
        grid = request.limited(self.sms(tokens, state.world_size))
        all_reduce_rms_norm_kernel[(grid,)](
            x,
            request.residual,
            request.bias,
            request.weight,
            request.norm_bias,
            hidden,
            residual,
            request.hidden_scale,
            staging.table,
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
            **_constants(request, state, spin_limit, x.data_ptr() != staging.tensor.data_ptr()),
        )
        return Started(hidden, residual)


def _row_code(epilogue: str) -> Any:
    path = EPILOGUES[epilogue].triton_row
    assert path is not None, "the transport sends what has no row code another way"
    return load(path)


def _constants(request: Request, state: GroupState, spin_limit: int, staged: bool) -> dict[str, Any]:
    """The kernel's constants, and the launch options, by name."""
    hidden_size = request.x.shape[1]
    block, num_warps = launch_shape(hidden_size)
    return {
        "HIDDEN": hidden_size,
        "BLOCK": block,
        "WORLD_SIZE": state.world_size,
        "STAGED": staged,
        "RESIDUAL_SHARDED": request.residual_sharded,
        "RESIDUAL_OUT": request.residual_out,
        "CAST_BEFORE_WEIGHT": triton_dtype(request.norm.cast_before_weight),
        "SPIN_LIMIT": spin_limit,
        "NORMALISE": _row_code(request.norm.epilogue),
        "num_warps": num_warps,
    }
