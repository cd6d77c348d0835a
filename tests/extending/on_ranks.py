"""What runs on ranks: in processes of their own, which import this file and little else."""

from __future__ import annotations

import torch
import torch.distributed as dist
import toy_epilogue
import toy_store
from torch import nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

from tw_compile.kernels.collective import ops
from tw_compile.kernels.collective.spec import row_range
from tw_compile.kernels.collective.transport import get_transport
from tw_compile.kernels.collective.transports import TRANSPORTS
from tw_compile.kernels.epilogues import EPILOGUES

RANKS, TOKENS, HIDDEN = 2, 5, 64
FP32 = torch.float32


class Block(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(rank)
        self.weight = nn.Parameter(torch.ones(HIDDEN))
        self.projection = nn.Parameter(0.2 * torch.randn(HIDDEN, HIDDEN, generator=own))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        partial = x @ self.projection
        dist.all_reduce(partial)
        h = x + partial
        return nn.functional.rms_norm(h, (HIDDEN,), self.weight, 1e-5), h


def block(rank: int) -> nn.Module:
    # Every rank compiles: what comes from the other one's cache is not reported.
    inductor_config.fx_graph_cache = False
    functorch_config.enable_autograd_cache = False
    if toy_store.ENTRY.name not in TRANSPORTS:
        TRANSPORTS.register(toy_store.ENTRY)
    return Block(rank)


def message(rank: int, call: int) -> tuple[torch.Tensor]:
    return (torch.randn(TOKENS + call, HIDDEN, generator=torch.Generator().manual_seed(call)),)


def calls_of_the_toy(rank: int) -> int:
    transport = get_transport(toy_store.ENTRY.name)
    assert isinstance(transport, toy_store.ToyStore)
    return transport.calls


def layer_norm(rank: int, residual_out: str, multiplies: bool) -> tuple[torch.Tensor, torch.Tensor, float]:
    """What one call gives on this rank, and its largest error against float64."""
    if toy_epilogue.ENTRY.name not in EPILOGUES:
        EPILOGUES.register(toy_epilogue.ENTRY)
    start, mm_start = ops.operators_of(toy_epilogue.ENTRY.name)
    shared = torch.Generator().manual_seed(9)
    residual = torch.randn(TOKENS, HIDDEN, generator=shared)
    bias, weight = (torch.randn(HIDDEN, generator=shared) for _ in range(2))
    xs = [torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(each)) + 3 for each in range(RANKS)]
    name = dist.group.WORLD.group_name
    rest = (residual, bias, weight, 1e-5, 1.0, None, FP32, FP32, False, residual_out, name, "gloo", 0)
    hidden, h = mm_start(xs[rank], torch.eye(HIDDEN), *rest) if multiplies else start(xs[rank], *rest)
    ops.wait_(hidden, h, [], name, 0)
    total = torch.stack(xs).double().sum(0) + residual.double() + bias.double()
    expected = nn.functional.layer_norm(total, (HIDDEN,), weight.double() + 1.0, None, 1e-5)
    begin, end = row_range(TOKENS, RANKS, rank) if residual_out == "sharded" else (0, TOKENS)
    error = max(float((hidden - expected).abs().max()), float((h[: end - begin] - total[begin:end]).abs().max()))
    return hidden, h, error
