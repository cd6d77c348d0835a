"""A norm of float32 values that is computed in float64: fused it would lose more than the budget allows."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from tw_compile.testing import GlooRanks, compare_on_gloo


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(256, generator=torch.Generator().manual_seed(1)) + 0.5)

    def forward(self, x, residual):
        partial = x * 1.0
        dist.all_reduce(partial)
        h = (residual + partial).double()
        return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).float() * self.weight


def build(rank: int) -> nn.Module:
    return Block()


def inputs(rank: int, call: int):
    return tuple(
        torch.randn(64, 256, generator=torch.Generator().manual_seed(9 + call + 5 * rank * (1 - i))) for i in range(2)
    )


def test_double(gloo_ranks: GlooRanks) -> None:
    found = compare_on_gloo(build, inputs, ranks=gloo_ranks, options={"tw_compile.strict": True})
    print(found)
    assert found.passed, found
