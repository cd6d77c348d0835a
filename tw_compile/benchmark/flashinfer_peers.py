"""FlashInfer's fused all_reduce + residual + RMSNorm over peer memory, when flashinfer is installed.

Written against flashinfer-python 0.6.12. Its workspace comes from torch's symmetric memory, so the switch that turns multicast
off there holds here too; the multicast backend of FlashInfer is never called. The kernels are built at first use and
need nvcc, unless flashinfer's prebuilt ones are installed.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
import torch.distributed as dist

from tw_compile.benchmark.contender import Contender, ContenderCall
from tw_compile.benchmark.spec import MessageSize
from tw_compile.harness.problems import EPS, Problem
from tw_compile.harness.ranks import Ranks, one_line
from tw_compile.harness.spec import ELEMENT_BYTES
from tw_compile.kernels.collective.peer_access import copy_obstacle

WORLD_SIZES = (2, 4, 8)
MAX_ONE_SHOT_BYTES = 2**25
"""The most bytes that the messages of all ranks may have together. With more, results have been seen to be wrong (4 ranks,
1024 tokens x 8192), and 4 ranks with 16384 x 8192 ended in an illegal memory access, though the workspace was made for them."""
VECTOR_BYTES = 16


@functools.cache
def import_obstacle() -> str | None:
    """Why ``flashinfer.comm`` cannot be used; None when it can."""
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed (pip install flashinfer-python)"
    try:
        import flashinfer.comm
    except Exception as error:  # it loads CUDA libraries, which fail in many ways
        return f"flashinfer.comm cannot be imported: {one_line(error)}"
    lacks = [
        name
        for name in ("trtllm_create_ipc_workspace_for_all_reduce_fusion", "trtllm_allreduce_fusion")
        if not hasattr(flashinfer.comm, name)
    ]
    return f"this flashinfer has no {', '.join(lacks)}" if lacks else None


class FlashInfer(Contender):
    """One kernel; the residual is replicated. ``most_tokens`` is what the workspace has room for."""

    def __init__(self, label: str, one_shot: bool, most_tokens: int) -> None:
        self.label = label
        self._one_shot = one_shot
        self._most_tokens = most_tokens
        self._workspaces: dict[int, tuple[Any, torch.Tensor]] = {}

    def obstacle(self, size: MessageSize, world_size: int) -> str | None:
        if obstacle := copy_obstacle(range(world_size)):
            return obstacle
        if world_size not in WORLD_SIZES:
            return f"serves {', '.join(map(str, WORLD_SIZES))} ranks"
        if size.hidden * ELEMENT_BYTES[size.dtype] % VECTOR_BYTES:
            return f"rows must be a multiple of {VECTOR_BYTES} bytes"
        if self._one_shot and world_size * size.nbytes > MAX_ONE_SHOT_BYTES:
            return f"the messages of all ranks exceed {MAX_ONE_SHOT_BYTES >> 20} MiB, beyond which it has been seen to fail"
        if not self._one_shot and size.tokens <= world_size:
            return "needs more tokens than ranks"
        return import_obstacle()

    def prepare(self, ranks: Ranks, problem: Problem) -> ContenderCall:
        import flashinfer.comm as comm

        ctx, x = ranks.ctx, problem.x
        tokens, hidden_size = x.shape
        workspace = self._workspace(ranks, x)
        hidden, residual_out = torch.full_like(x, float("nan")), torch.full_like(x, float("nan"))

        def call() -> tuple[torch.Tensor, torch.Tensor]:
            comm.trtllm_allreduce_fusion(
                allreduce_in=x,
                world_size=ctx.world_size,
                world_rank=ctx.rank,
                token_num=tokens,
                hidden_dim=hidden_size,
                workspace_ptrs=workspace,
                # As vLLM calls it: programmatic dependent launch on, sums in float32.
                launch_with_pdl=True,
                trigger_completion_at_end=True,
                fp32_acc=True,
                pattern_code=comm.AllReduceFusionPattern.kARResidualRMSNorm,
                use_oneshot=self._one_shot,
                allreduce_out=None,
                residual_in=problem.residual,
                residual_out=residual_out,
                norm_out=hidden,
                quant_out=None,
                scale_out=None,
                rms_gamma=problem.weight,
                rms_eps=EPS,
                scale_factor=None,
                layout_code=None,
            )
            return hidden, residual_out

        return call

    def _workspace(self, ranks: Ranks, x: torch.Tensor) -> torch.Tensor:
        """Addresses of the ranks' buffers; one workspace per hidden size, kept to the end."""
        import flashinfer.comm as comm
        from flashinfer.comm.trtllm_ar import get_trtllm_comm_module

        hidden_size = x.shape[1]
        if hidden_size not in self._workspaces:
            # A build can fail on one rank alone. So all ranks build first: making the workspace waits for all of them.
            ranks.together(get_trtllm_comm_module)
            self._workspaces[hidden_size] = comm.trtllm_create_ipc_workspace_for_all_reduce_fusion(
                ranks.ctx.rank,
                ranks.ctx.world_size,
                self._most_tokens,
                hidden_size,
                use_fp32_lamport=x.dtype == torch.float32,
                group=dist.group.WORLD,
            )
        return self._workspaces[hidden_size][1]
