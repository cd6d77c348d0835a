"""Contenders that use torch or NCCL, and one that does the same work without communication."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist

from tw_compile.benchmark.contender import Contender, ContenderCall
from tw_compile.benchmark.labels import NO_COMMUNICATION
from tw_compile.benchmark.spec import SYMM_MEM_ONE_SHOT_MAX_BYTES, MessageSize
from tw_compile.harness.problems import EPS, Problem
from tw_compile.harness.ranks import Ranks, symmetric_memory
from tw_compile.kernels.collective.peer_access import peer_access_obstacle


def add_rms_norm_(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``h = residual + x``, and write its norm (Hugging Face Llama's) to ``x``; all are ``[tokens, hidden]``."""
    h = residual + x
    y = h.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)
    x.copy_(weight * y.to(x.dtype))
    return h


@functools.cache
def compiled_add_rms_norm_() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """:func:`add_rms_norm_`, compiled by Inductor to one kernel for each shape."""
    return torch.compile(add_rms_norm_, dynamic=False, fullgraph=True)


def _norm_after(reduce: Callable[[], torch.Tensor], problem: Problem) -> ContenderCall:
    """``reduce()`` and then residual add and norm, compiled on GPUs."""
    norm = compiled_add_rms_norm_() if problem.x.is_cuda else add_rms_norm_

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        reduced = reduce()
        return reduced, norm(reduced, problem.residual, problem.weight)

    return call


class UnfusedAllReduce(Contender):
    """The process group's all_reduce in place (NCCL or gloo), then add and norm: the unfused way."""

    def __init__(self, label: str) -> None:
        self.label = label

    def prepare(self, ranks: Ranks, problem: Problem) -> ContenderCall:
        x = problem.x.clone()

        def reduce() -> torch.Tensor:
            dist.all_reduce(x)
            return x

        return _norm_after(reduce, problem)


class SymmetricMemory(Contender):
    """torch's own kernels over symmetric memory, then add and norm. The input is in symmetric memory already: no copy."""

    def __init__(self, label: str, one_shot: bool) -> None:
        self.label = label
        self._one_shot = one_shot

    def obstacle(self, size: MessageSize, world_size: int) -> str | None:
        if obstacle := peer_access_obstacle(range(world_size)):
            return obstacle
        if self._one_shot and size.nbytes > SYMM_MEM_ONE_SHOT_MAX_BYTES:
            return f"every rank would read all messages whole: tried up to {SYMM_MEM_ONE_SHOT_MAX_BYTES // 2**20} MiB"
        return None

    def prepare(self, ranks: Ranks, problem: Problem) -> ContenderCall:
        x, name = problem.x, ranks.ctx.group_name
        buffer, _ = symmetric_memory(ranks, x.nbytes, x.device)
        x = buffer.view(x.dtype).view(x.shape).copy_(x)
        if self._one_shot:
            return _norm_after(lambda: torch.ops.symm_mem.one_shot_all_reduce(x, "sum", name), problem)
        return _norm_after(lambda: torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", name), problem)


class NoCommunication(Contender):
    """Only the add and norm, of rows that are there already: the work that is left when communication is free."""

    label = NO_COMMUNICATION
    kind = "bound"
    reduces = False

    def prepare(self, ranks: Ranks, problem: Problem) -> ContenderCall:
        x = problem.x.clone()
        return _norm_after(lambda: x, problem)
