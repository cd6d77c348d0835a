"""A fed GEMM multiplies all rows of the result as they are: a GEMM of a part of them, or of merged rows, can't be fed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tw_compile.planning import feeding
from tw_compile.testing import GlooRanks, compare_on_gloo


def fed_early() -> None:
    feeding.tokens_to_send = feeding.tokens_to_fill = lambda *_: 64  # type: ignore[assignment]


class Block(nn.Module):
    def __init__(self, rank: int, merged: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.merged = merged
        self.down, self.norm = nn.Linear(64, 64, bias=False), nn.RMSNorm(64)
        self.next = nn.Linear(256 if merged else 64, 128, bias=False)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        partial = self.down(x)
        dist.all_reduce(partial)
        hidden = self.norm(residual + partial)
        return self.next(hidden.view(-1, 256) if self.merged else hidden[128:])


def sliced(rank: int) -> nn.Module:
    fed_early()
    return Block(rank, False).bfloat16()


def merged(rank: int) -> nn.Module:
    fed_early()
    return Block(rank, True).bfloat16()


def inputs(rank: int, call: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(call)
    return tuple(torch.randn(256, 64, generator=generator).bfloat16() for _ in range(2))


@pytest.mark.parametrize("build", [sliced, merged])
def test_gemms_of_other_rows_stay_behind_the_wait(gloo_ranks: GlooRanks, build: object) -> None:
    options = {"tw_compile.strict": True}
    assert compare_on_gloo(build, inputs, ranks=gloo_ranks, options=options).passed
