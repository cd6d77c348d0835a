"""Sizes of results that are viewed: what has them in front of the fused operator, or why a site is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tw_compile import Config, collect_reports, make_backend
from tw_compile.passes.reasons import Refusal
from tw_compile.report import GraphReport
from tw_compile.testing import fake_process_group

H = 64


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with fake_process_group(2):
        yield


class Viewed(nn.Module):
    """Two norms behind sums; the first sum is viewed with sizes that the graph computes on the way, if ``halved``."""

    def __init__(self, halved: bool) -> None:
        super().__init__()
        self.partial = nn.Linear(H, H, bias=False)
        self.norms = nn.ModuleList([nn.RMSNorm(H), nn.RMSNorm(H)])
        self.halved = halved

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batch, seq, _ = x.shape
        first = self.partial(x)
        dist.all_reduce(first)
        h = residual + first
        h = h.view(batch * seq // 2, -1, H) if self.halved else h.view(seq, batch, H)
        hidden = self.norms[0](h)
        second = self.partial(hidden.view(batch, seq, H))
        dist.all_reduce(second)
        stream = residual + second
        return hidden, h, self.norms[1](stream), stream


def compiled(halved: bool) -> GraphReport:
    module, x = Viewed(halved), torch.randn(2, 6, H)
    torch._dynamo.reset()
    with torch.no_grad(), collect_reports() as reports:
        function = torch.compile(module, backend=make_backend(Config(strict=True, transport="gloo")), dynamic=True)
        for one, other in zip(function(x, x), module(x, x), strict=True):
            torch.testing.assert_close(one, other)
    (report,) = reports
    return report


@pytest.mark.full
def test_a_size_that_nothing_has_refuses_one_site_and_no_other() -> None:
    report = compiled(halved=True)
    assert report.counts == {"all_reduce": 2, "fused": 1, "refused": 1, "gated": 0} and not report.warning
    first, second = report.sites
    assert first.reason == Refusal.SIZE_NOT_AVAILABLE and "has its size" in first.detail
    assert second.decision == "fused"


def test_sizes_that_inputs_have_are_no_obstacle() -> None:
    assert compiled(halved=False).counts["fused"] == 2
