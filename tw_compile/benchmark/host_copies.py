"""The bound of calls through host memory: bare copies of as many bytes as two-shot moves, both ways at once.

For a message of M bytes each rank copies M to its own part of host memory that all ranks share, and 2(N-1)/N M from the parts
of the others. The copy engines do it, so no rank waits for another rank, and no SM adds anything up.

Parts are small, and are used again for each piece of a long message. So they stay in the CPU's caches, as the rings of our
kernels do. Copies that go through large parts would also wait for the CPU's memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tw_compile.benchmark.contender import Contender, ContenderCall
from tw_compile.benchmark.labels import HOST_COPIES
from tw_compile.benchmark.spec import MessageSize
from tw_compile.harness.problems import Problem
from tw_compile.harness.ranks import Ranks
from tw_compile.kernels.collective.host_memory import HostMemory
from tw_compile.kernels.collective.peer_access import peer_access_obstacle

ALL_PARTS_BYTES = 8 * 2**20
"""Of all ranks together."""
_PAGE = 64 * 1024
_MIN_BYTES = 2**20
_PART = "part"


class HostCopies(Contender):
    """Bare copies by the copy engines, where kernels can't work on the memory of peers. All its calls share the parts."""

    label = HOST_COPIES
    kind = "bound"
    reduces = False
    several = True

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] | None = None
        self._sides: dict[int, torch.cuda.Stream] = {}

    def obstacle(self, size: MessageSize, world_size: int) -> str | None:
        if peer_access_obstacle(range(world_size)) is None:
            return "the GPUs reach each other's memory, so nothing need go through the host's"
        if size.nbytes < _MIN_BYTES:
            return f"copies of less take longer to begin than kernels need: tried from {_MIN_BYTES // 2**20} MiB"
        return None

    def prepare(self, ranks: Ranks, problem: Problem) -> ContenderCall:
        x, world, rank = problem.x, ranks.ctx.world_size, ranks.ctx.rank
        if self._parts is None:
            self._parts = _parts_of_all(ranks, x.device)
        # Streams of this priority are never the one that a graph is captured on: copies there would go in turn.
        side = self._sides.setdefault(self.lane, torch.cuda.Stream(priority=-1))
        parts = self._parts
        most = parts[rank].numel()
        sent = x.view(torch.uint8).view(-1)
        received = torch.empty_like(sent)
        peers = [parts[(rank + step) % world] for step in range(1, world)]

        def call() -> tuple[torch.Tensor, torch.Tensor]:
            current = torch.cuda.current_stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for begin, nbytes in pieces(sent.numel(), most):
                    parts[rank][:nbytes].copy_(sent[begin : begin + nbytes], non_blocking=True)
            for begin, nbytes in pieces(sent.numel(), most):
                for peer in peers:
                    nread = 2 * nbytes // world
                    received[begin : begin + nread].copy_(peer[:nread], non_blocking=True)
            current.wait_stream(side)
            return problem.x, problem.residual

        return call


def _parts_of_all(ranks: Ranks, device: torch.device) -> list[torch.Tensor]:
    """Each rank's part, by rank. Collective. No file keeps its name, also where a rank has no memory for its part."""
    memory, own = HostMemory(), dict[str, torch.Tensor]()
    nbytes = ALL_PARTS_BYTES // ranks.ctx.world_size // _PAGE * _PAGE
    try:
        ranks.together(lambda: own.update(memory.allocate({_PART: nbytes}, device)))
        parts: list[torch.Tensor] = ranks.together(
            lambda: memory.share_in(own, ranks.control, ranks.ctx.rank)[_PART].handle
        )
        return parts
    finally:
        memory.settle(own)


def pieces(nbytes: int, most: int) -> Iterator[tuple[int, int]]:
    """Where the pieces of ``nbytes`` bytes begin, and how many bytes each has: ``most``, and the last one what is left."""
    for begin in range(0, nbytes, most):
        yield begin, min(most, nbytes - begin)
