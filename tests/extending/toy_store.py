"""A transport in a file of its own: the group's all_gather brings partial sums to all ranks, which add them in rank order."""

from __future__ import annotations

import torch

from tw_compile import compat
from tw_compile.kernels.collective.spec import Request, row_range
from tw_compile.kernels.collective.transport import Started, Transport
from tw_compile.kernels.collective.transports import GroupFacts, Obstacle, TransportEntry
from tw_compile.kernels.epilogues import EPILOGUES
from tw_compile.kernels.registry import Benchmarked, load

MAX_HIDDEN = 4096


class ToyStore(Transport):
    def __init__(self, name: str) -> None:
        self.name = name
        self.calls = 0

    def start(self, request: Request) -> Started:
        self.calls += 1
        group = compat.resolve_process_group(request.group_name)
        gathered = [torch.empty_like(request.x) for _ in range(group.size())]
        torch.distributed.all_gather(gathered, request.x, group=group)
        total = torch.zeros(request.x.shape, dtype=torch.float32)
        for partial in gathered:
            total += partial
        assert not request.residual_sharded, "the entry keeps no shards"
        hidden, residual_out = request.allocate(group.size())
        operands = (
            request.residual,
            request.bias,
            request.weight,
            request.norm,
            request.hidden_scale,
            request.norm_bias,
        )
        rows, h = load(EPILOGUES[request.norm.epilogue].reference)(total, *operands)
        hidden.copy_(rows)
        if request.residual_out == "replicated":
            residual_out.copy_(h)
        elif request.residual_out == "sharded":
            begin, end = row_range(len(h), group.size(), group.rank())
            residual_out[: end - begin] = h[begin:end]
        return Started(hidden, residual_out)


def obstacle(facts: GroupFacts, hidden_size: int, element_bytes: int) -> Obstacle | None:
    if hidden_size > MAX_HIDDEN:
        return Obstacle(f"hidden_size {hidden_size} exceeds {MAX_HIDDEN}", "hidden_size")
    return None


ENTRY = TransportEntry(
    "toy_store",
    ("cpu",),
    "toy_store:ToyStore",
    "a toy",
    obstacle,
    keeps_shards=False,
    benchmarked=(Benchmarked("tw-toy-store", sharded=False),),
)
