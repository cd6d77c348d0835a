"""The transport made of the group's own collectives: gloo on CPU (the reference), NCCL on GPUs (the fallback).

``start`` begins an asynchronous all_reduce, the same one that the unfused graph does, and ``finish`` adds and normalises.
With a replicated residual every rank does that for all rows, on its own. With a sharded one each rank does it for the rows
it owns, and an all_gather shares the result.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from tw_compile import compat
from tw_compile.kernels.all_reduce_rms_norm.reference import add_rms_norm
from tw_compile.kernels.all_reduce_rms_norm.spec import Request, row_range, rows_per_rank
from tw_compile.kernels.all_reduce_rms_norm.transport import Started, Transport


class CollectiveTransport(Transport):
    """all_reduce of the process group, then the norm."""

    def __init__(self, name: str) -> None:
        self.name = name

    def start(self, request: Request) -> Started:
        group = compat.resolve_process_group(request.group_name)
        hidden, residual = request.allocate(group.size())
        reduced = request.x.clone()
        work = dist.all_reduce(reduced, group=group, async_op=True)
        sharded = request.residual_sharded or request.residual_out == "sharded"

        def finish() -> None:
            work.wait()
            if sharded:
                self._finish_own_rows(request, group, reduced, hidden, residual)
                return
            rows, h = self._norm(request, reduced, request.residual)
            hidden.copy_(rows)
            if request.residual_out == "replicated":
                residual.copy_(h)

        return Started(hidden, residual, finish)

    def _finish_own_rows(
        self,
        request: Request,
        group: dist.ProcessGroup,
        reduced: torch.Tensor,
        hidden: torch.Tensor,
        residual: torch.Tensor,
    ) -> None:
        tokens = reduced.shape[0]
        per_rank = rows_per_rank(tokens, group.size())
        begin, end = row_range(tokens, group.size(), dist.get_rank(group))
        own = request.residual
        if own is not None:
            own = own[: end - begin] if request.residual_sharded else own[begin:end]
        rows, h = self._norm(request, reduced[begin:end], own)
        hidden.copy_(_all_gather_rows(rows, per_rank, tokens, group))
        if request.residual_out == "sharded":
            residual[: end - begin].copy_(h)
            residual[end - begin :].zero_()
        elif request.residual_out == "replicated":
            residual.copy_(_all_gather_rows(h, per_rank, tokens, group))

    def _norm(
        self, request: Request, reduced: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if reduced.is_cuda:
            from tw_compile.kernels.all_reduce_rms_norm.norm_kernel import add_rms_norm_cuda

            return add_rms_norm_cuda(reduced, residual, request.bias, request.weight, request.norm)
        return add_rms_norm(reduced, residual, request.bias, request.weight, request.norm)


def _all_gather_rows(own: torch.Tensor, per_rank: int, tokens: int, group: dist.ProcessGroup) -> torch.Tensor:
    """``[tokens, hidden]`` from every rank's rows, of which there are at most ``per_rank``."""
    shard = torch.nn.functional.pad(own, (0, 0, 0, per_rank - own.shape[0]))
    gathered = own.new_empty((per_rank * group.size(), own.shape[1]))
    dist.all_gather_into_tensor(gathered, shard, group=group)
    return gathered[:tokens]
