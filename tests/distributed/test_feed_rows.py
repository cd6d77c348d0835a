"""A fed GEMM multiplies all rows of the result as they are: GEMMs of a part of them, or of merged rows, can't be fed."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tw_compile.passes.reasons import FeedRefusal
from tw_compile.report import collect_reports
from tw_compile.testing import GlooRanks, compare_on_gloo

OPTIONS = {"tw_compile.strict": True, "tw_compile.feed_mm": "always"}
ROWS = {
    "all": lambda hidden: hidden,
    "sliced": lambda hidden: hidden[128:],
    "merged": lambda hidden: hidden.view(-1, 256),
}


class Block(nn.Module):
    """Two GEMMs of some of the rows behind a norm."""

    def __init__(self, rows: str, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = ROWS[rows]
        self.down, self.norm = nn.Linear(64, 64, bias=False), nn.RMSNorm(64)
        depth = 256 if rows == "merged" else 64
        self.first, self.second = nn.Linear(depth, 128, bias=False), nn.Linear(depth, 64, bias=False)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        partial_sums = self.down(x)
        dist.all_reduce(partial_sums)
        hidden = self.rows(self.norm(residual + partial_sums))
        return self.first(hidden), self.second(hidden)


def build(rows: str, rank: int) -> nn.Module:
    return Block(rows, rank).bfloat16()


def inputs(rank: int, call: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(call)
    return tuple(torch.randn(256, 64, generator=generator).bfloat16() for _ in range(2))


def consumers(rows: str, rank: int) -> list[tuple[str, str]]:
    torch._dynamo.reset()
    with torch.no_grad(), collect_reports() as reports:
        torch.compile(build(rows, rank), backend="tw_compile", options=OPTIONS)(*inputs(rank, 0))
    return [(site.consumer, site.feed_refusal) for report in reports for site in report.sites]


@pytest.mark.parametrize("rows", ROWS)
def test_gemms_of_other_rows_stay_behind_the_wait(gloo_ranks: GlooRanks, rows: str) -> None:
    expected = ("fed", "") if rows == "all" else ("other", FeedRefusal.GEMM_NOT_OURS)
    assert gloo_ranks.run(partial(consumers, rows)) == [[expected]] * 2
    assert compare_on_gloo(partial(build, rows), inputs, ranks=gloo_ranks, options=OPTIONS).passed
