"""Two-shot by the GPUs' copy engines: no SM moves a byte between GPUs, and none waits for a peer.

Each rank copies to every peer the rows that the peer owns. It adds up and normalises its own rows, and copies the results to
all peers. Ranks signal each other by words that the streams themselves write and wait for (stream memory operations of the
driver). The rank that waited for a word clears it. The word is written again only after that rank has sent its next message.
So it has been cleared by then, also when a CUDA graph is replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tw_compile.benchmark.contender import Contender, ContenderCall
from tw_compile.benchmark.labels import COPY_ENGINES
from tw_compile.benchmark.spec import MessageSize
from tw_compile.harness.problems import EPS, Problem
from tw_compile.harness.ranks import Ranks, symmetric_memory
from tw_compile.kernels.collective.peer_access import copy_obstacle
from tw_compile.kernels.collective.spec import rows_per_rank
from tw_compile.kernels.runtime import bindings

_SENT, _PUBLISHED = 0, 1
_WORD_BYTES = 4
_EQUAL = 1
"""CU_STREAM_WAIT_VALUE_EQ"""
_MIN_BYTES = 2**20


class CopyEngines(Contender):
    """Two-shot by copy engines. The residual is this rank's rows. The norm is one kernel on all SMs."""

    label = COPY_ENGINES
    residual_sharded = True

    def obstacle(self, size: MessageSize, world_size: int) -> str | None:
        if obstacle := copy_obstacle(range(world_size)):
            return obstacle
        if size.tokens % world_size:
            return f"tried for multiples of {world_size} tokens"
        if size.nbytes < _MIN_BYTES:
            return f"its copies alone take longer than others need: tried from {_MIN_BYTES // 2**20} MiB"
        return None

    def prepare(self, ranks: Ranks, problem: Problem) -> ContenderCall:
        x, weight = problem.x, problem.weight
        world, rank = ranks.ctx.world_size, ranks.ctx.rank
        rows = rows_per_rank(x.shape[0], world)
        own = slice(rank * rows, (rank + 1) * rows)
        residual = problem.residual[own].float()
        peers = [(rank + step) % world for step in range(1, world)]
        received, result, words = _on_all_ranks(ranks, x), _on_all_ranks(ranks, x), _on_all_ranks(ranks, x[0])
        words[rank].view(torch.uint8).zero_()
        signals = Signals([word.data_ptr() for word in words], rank, peers)
        add_up = torch.compile(_sum_add_rms_norm, dynamic=False, fullgraph=True)

        def call() -> tuple[torch.Tensor, torch.Tensor]:
            for peer in peers:
                received[peer][own].copy_(x[peer * rows : (peer + 1) * rows])
            received[rank][own].copy_(x[own])
            signals.exchange(_SENT)
            h, y = add_up(received[rank].view(world, rows, -1), residual, weight)
            for receiver in (rank, *peers):
                result[receiver][own].copy_(y)
            signals.exchange(_PUBLISHED)
            return result[rank], h

        return call


def _on_all_ranks(ranks: Ranks, like: torch.Tensor) -> list[torch.Tensor]:
    """Symmetric memory for a tensor like ``like``, by rank."""
    _, handle = symmetric_memory(ranks, like.nbytes, like.device)
    return [handle.get_buffer(rank, like.shape, like.dtype) for rank in range(ranks.ctx.world_size)]


class Signals:
    """Words of 4 bytes in every rank's memory, at ``addresses`` by rank: one for each kind of message and each sender."""

    def __init__(self, addresses: Sequence[int], rank: int, peers: Sequence[int]) -> None:
        self._addresses, self._rank, self._peers = addresses, rank, peers

    def exchange(self, kind: int) -> None:
        """Tell all peers that this stream has arrived. The stream goes on when the streams of all peers have arrived, too."""
        world = len(self._addresses)
        to_peers = [self._addresses[peer] + _WORD_BYTES * (kind * world + self._rank) for peer in self._peers]
        from_peers = [self._addresses[self._rank] + _WORD_BYTES * (kind * world + peer) for peer in self._peers]
        write, wait = (getattr(self._kinds, f"CU_STREAM_MEM_OP_{name}_VALUE_32") for name in ("WRITE", "WAIT"))
        operations = [
            *(self._operation("writeValue", write, address, 1, 0) for address in to_peers),
            *(self._operation("waitValue", wait, address, 1, _EQUAL) for address in from_peers),
            *(self._operation("writeValue", write, address, 0, 0) for address in from_peers),
        ]
        stream = torch.cuda.current_stream().cuda_stream
        bindings.call(self._driver.cuStreamBatchMemOp, stream, len(operations), operations, 0, where="copy engines")

    @property
    def _driver(self) -> Any:
        return bindings.load("driver")

    @property
    def _kinds(self) -> Any:
        return self._driver.CUstreamBatchMemOpType

    def _operation(self, name: str, kind: Any, address: int, value: int, flags: int) -> Any:
        """One operation of a batch. A batch runs in order, and a write comes after everything that the stream did before."""
        params = self._driver.CUstreamBatchMemOpParams()
        params.operation = kind
        part = getattr(params, name)
        part.operation, part.address, part.value, part.flags = kind, address, value, flags
        return params


def _sum_add_rms_norm(
    parts: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``h = residual + parts.sum(0)`` in float32 and its norm, Hugging Face Llama's; ``parts [ranks, rows, hidden]``."""
    h = residual + parts.float().sum(0)
    y = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return h, weight * y.to(parts.dtype)
