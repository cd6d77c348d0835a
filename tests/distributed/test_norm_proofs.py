"""Norms that are not what the fused operator computes: means taken off other rows, vectors of other types."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from graph_builder import GraphBuilder, aten
from torch import nn

from tw_compile.passes.fusion.find import RefusedSite, find_sites
from tw_compile.passes.reasons import Refusal
from tw_compile.testing import GlooRanks, compare_on_gloo, fake_process_group

BF16 = torch.bfloat16


class MeansOffAllRows(nn.Module):
    """``[4, tokens, 64]`` less the mean of each of the 4: ``[4, 4, tokens, 64]``."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        partial = x * 1
        dist.all_reduce(partial)
        h = residual + partial
        centred = h.unsqueeze(1) - h.mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)


def module(rank: int) -> nn.Module:
    return MeansOffAllRows()


def inputs(rank: int, call: int) -> tuple[torch.Tensor, ...]:
    found = tuple(torch.randn(4, 8, 64, generator=torch.Generator().manual_seed(one)) for one in range(2))
    for one in found:
        torch._dynamo.mark_dynamic(one, 1)
    return found


def test_means_that_are_taken_off_other_rows(gloo_ranks: GlooRanks) -> None:
    found = compare_on_gloo(module, inputs, ranks=gloo_ranks, options={"tw_compile.strict": True})
    assert found.errors[0].error < 1e-6


@pytest.fixture
def group() -> Iterator[None]:
    with fake_process_group(2):
        yield


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_weights_of_types_that_are_not_supported(group: None, dtype: torch.dtype) -> None:
    b = GraphBuilder()
    h = b.add(b.input(4, 64, dtype=BF16), b.all_reduce(b.input(4, 64, dtype=BF16)))
    weight = b.input(64, dtype=dtype)
    weight = b.add(weight, 1.0) if dtype == torch.int32 else weight
    graph = b.finish(b.cast(b.call(aten.mul.Tensor, b.scale(h), weight), BF16))
    (site,) = find_sites(graph)
    assert isinstance(site, RefusedSite) and site.refused.reason == Refusal.WEIGHT_NOT_PROVABLE
