"""The transport made of the group's own collectives: gloo on CPU (the reference), NCCL on GPUs (the fallback).

Replicated rows: asynchronous all_reduce in ``start``; bias, residual and norm in ``finish``, on every rank. Sharded
rows: each rank adds and normalises the rows it owns and an all_gather shares the result, so that the residual never has
to be whole; NCCL reduces with reduce_scatter, gloo (which has none) with all_reduce.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from tw_compile import compat
from tw_compile.kernels.all_reduce_rms_norm.reference import add_rms_norm
from tw_compile.kernels.all_reduce_rms_norm.spec import Request, row_range, rows_per_rank
from tw_compile.kernels.all_reduce_rms_norm.transport import Started, Transport


def _pad_rows(rows: torch.Tensor, count: int) -> torch.Tensor:
    """``rows`` with zero rows appended up to ``count``; the tensor itself when it has them already."""
    missing = count - rows.shape[0]
    return torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows


class CollectiveTransport(Transport):
    """all_reduce (or reduce_scatter + all_gather) of the process group, then the norm."""

    def __init__(self, name: str) -> None:
        self.name = name

    def start(self, request: Request) -> Started:
        group = compat.resolve_process_group(request.group_name)
        if request.residual_sharded or request.residual_out == "sharded":
            return self._start_sharded(request, group)
        return self._start_replicated(request, group)

    def _start_replicated(self, request: Request, group: dist.ProcessGroup) -> Started:
        hidden, residual = request.allocate(group.size())
        reduced = request.x.clone()
        work = dist.all_reduce(reduced, group=group, async_op=True)

        def finish() -> None:
            work.wait()
            rows, h = self._norm(request, reduced, request.residual)
            hidden.copy_(rows)
            if request.residual_out == "replicated":
                residual.copy_(h)

        return Started(hidden, residual, finish)

    def _start_sharded(self, request: Request, group: dist.ProcessGroup) -> Started:
        world_size, rank = group.size(), dist.get_rank(group)
        hidden, residual = request.allocate(world_size)
        tokens = request.x.shape[0]
        per_rank = rows_per_rank(tokens, world_size)
        begin, end = row_range(tokens, world_size, rank)
        own, work = self._reduce_own_rows(request.x, group, per_rank, rank)

        def finish() -> None:
            work.wait()
            if request.residual is None:
                own_residual = None
            elif request.residual_sharded:
                own_residual = request.residual
            else:
                own_residual = _pad_rows(request.residual[begin:end], per_rank)
            rows, h = self._norm(request, own, own_residual)
            gathered = rows.new_empty((per_rank * world_size, rows.shape[1]))
            dist.all_gather_into_tensor(gathered, rows, group=group)
            hidden.copy_(gathered[:tokens])
            if request.residual_out == "sharded":
                residual.copy_(h)
            elif request.residual_out == "replicated":
                residual.copy_(self.all_gather_rows(h, tokens, request.group_name))

        return Started(hidden, residual, finish)

    def _reduce_own_rows(
        self, x: torch.Tensor, group: dist.ProcessGroup, per_rank: int, rank: int
    ) -> tuple[torch.Tensor, dist.Work]:
        padded = _pad_rows(x, per_rank * group.size())
        if self.name == "nccl":
            own = x.new_empty((per_rank, x.shape[1]))
            return own, dist.reduce_scatter_tensor(own, padded.contiguous(), group=group, async_op=True)
        reduced = padded.clone()
        work = dist.all_reduce(reduced, group=group, async_op=True)
        return reduced[rank * per_rank : (rank + 1) * per_rank], work

    def _norm(
        self, request: Request, reduced: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if reduced.is_cuda:
            from tw_compile.kernels.all_reduce_rms_norm.norm_kernel import add_rms_norm_cuda

            return add_rms_norm_cuda(reduced, residual, request.bias, request.weight, request.norm)
        return add_rms_norm(reduced, residual, request.bias, request.weight, request.norm)

    def all_gather_rows(self, shard: torch.Tensor, tokens: int, group_name: str) -> torch.Tensor:
        group = compat.resolve_process_group(group_name)
        gathered = shard.new_empty((shard.shape[0] * group.size(), shard.shape[1]))
        dist.all_gather_into_tensor(gathered, shard.contiguous(), group=group)
        return gathered[:tokens].clone() if tokens != gathered.shape[0] else gathered
