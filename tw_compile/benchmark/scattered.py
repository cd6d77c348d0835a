"""NCCL's reduce_scatter and all_gather, as contenders: around a norm of each rank's own rows, and alone."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.distributed as dist

from tw_compile.benchmark.contender import Contender, ContenderCall
from tw_compile.benchmark.labels import ALL_GATHER_ALONE, ALL_REDUCE_ALONE, REDUCE_SCATTER_ALONE, SCATTERED
from tw_compile.benchmark.peers import add_rms_norm_, compiled_add_rms_norm_
from tw_compile.benchmark.spec import ContenderKind, MessageSize
from tw_compile.harness.problems import Problem
from tw_compile.harness.ranks import Ranks


def _uneven(size: MessageSize, world_size: int) -> str | None:
    if size.tokens % world_size:
        return f"{size.tokens} rows can't be shared out evenly to {world_size} ranks"
    return None


def _own_rows(rows: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """This rank's rows of ``[tokens, hidden]``, copied."""
    return rows.chunk(ranks.ctx.world_size)[ranks.ctx.rank].clone()


class ReduceScatterNormAllGather(Contender):
    """reduce_scatter, then add and norm of a rank's own rows, then all_gather: fusing by order alone, with three kernels.

    The residual stays sharded, in the message's dtype.
    """

    label = SCATTERED
    residual_sharded = True
    residual_narrow = True

    def obstacle(self, size: MessageSize, world_size: int) -> str | None:
        return _uneven(size, world_size)

    def prepare(self, ranks: Ranks, problem: Problem) -> ContenderCall:
        x, residual = problem.x.clone(), _own_rows(problem.residual, ranks)
        own = torch.empty_like(residual)
        norm = compiled_add_rms_norm_() if x.is_cuda else add_rms_norm_

        def call() -> tuple[torch.Tensor, torch.Tensor]:
            dist.reduce_scatter_tensor(own, x)
            h = norm(own, residual, problem.weight)
            dist.all_gather_into_tensor(x, own)
            return x, h

        return call


class CollectiveAlone(Contender):
    """One of NCCL's collectives without residual and norm: only a part of the work, so its output is not a result.

    ``label`` says which one.
    """

    kind: ClassVar[ContenderKind] = "bound"
    reduces = False

    def __init__(self, label: str) -> None:
        self.label = label

    def obstacle(self, size: MessageSize, world_size: int) -> str | None:
        return None if self.label == ALL_REDUCE_ALONE else _uneven(size, world_size)

    def prepare(self, ranks: Ranks, problem: Problem) -> ContenderCall:
        x, residual = problem.x.clone(), problem.residual

        def all_reduce() -> tuple[torch.Tensor, torch.Tensor]:
            dist.all_reduce(x, op=dist.ReduceOp.AVG)  # sums of sums would be infinite after some dozens of calls
            return x, residual

        if self.label == ALL_REDUCE_ALONE:
            return all_reduce
        own = _own_rows(x, ranks)

        def reduce_scatter() -> tuple[torch.Tensor, torch.Tensor]:
            dist.reduce_scatter_tensor(own, x)
            return x, residual

        def all_gather() -> tuple[torch.Tensor, torch.Tensor]:
            dist.all_gather_into_tensor(x, own)
            return x, residual

        return {REDUCE_SCATTER_ALONE: reduce_scatter, ALL_GATHER_ALONE: all_gather}[self.label]
