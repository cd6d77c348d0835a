"""A decoder with statically quantised layers on two gloo ranks: generated code, real reductions."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hf_norm import HFNorm
from torch import nn

from tw_compile import Config, TWCompilePass, collect_reports
from tw_compile.testing import GlooRanks, capture_graphs, compare_on_gloo, fake_process_group

H, SCALE = 64, 0.02
FP8 = torch.float8_e4m3fn
SHAPE = (2, 5, H)


class StaticFloat8Linear(nn.Module):
    """Rows are divided by a scale of the checkpoint; the matmul is one of the float8 values, widened again.

    In float64 nothing is rounded: the error of quantising is part of what is compared.
    """

    def __init__(self, own: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.2 * torch.randn(H, H, generator=own))
        self.scale = nn.Parameter(torch.tensor([SCALE]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float64:
            return x @ self.weight.t()
        quantised = (x.float() / self.scale).clamp(-448, 448).to(FP8)
        return (quantised.to(x.dtype) @ self.weight.t()) * SCALE


class Decoder(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        common, own = torch.Generator().manual_seed(1), torch.Generator().manual_seed(100 + rank)
        self.layers = nn.ModuleList(StaticFloat8Linear(own) for _ in range(4))
        self.norms = nn.ModuleList(HFNorm(H, common) for _ in range(5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        stream, hidden = x, self.norms[0](x)
        for layer, norm in zip(self.layers, self.norms[1:], strict=True):
            partial = layer(hidden)
            dist.all_reduce(partial)
            stream = stream + partial
            hidden = norm(stream)
        return hidden, stream


def build(rank: int) -> nn.Module:
    decoder = Decoder(rank).bfloat16()
    for layer in decoder.layers:
        layer.scale.data = layer.scale.data.float()
    return decoder


def arguments(rank: int, call: int) -> tuple[torch.Tensor]:
    return (torch.randn(SHAPE, generator=torch.Generator().manual_seed(call)).bfloat16(),)


def test_norms_before_quantised_layers_give_float8() -> None:
    with fake_process_group(2), collect_reports() as reports:
        capture_graphs(build(0), arguments(0, 0), pass_=TWCompilePass(Config(strict=True)))
    assert [site.quantisation for site in reports[0].sites] == ["float8_e4m3fn"] * 3 + [""]


@pytest.mark.full
def test_errors_are_within_the_budget_on_every_rank(gloo_ranks: GlooRanks) -> None:
    comparison = compare_on_gloo(build, arguments, ranks=gloo_ranks, options={"tw_compile.strict": True})
    assert comparison.counts == {"all_reduce": 4, "fused": 4, "refused": 0, "gated": 0}
    assert comparison.passed and comparison.bitwise_equal_across_ranks, comparison.errors
    assert all(0 < error.unfused_error < 0.2 for error in comparison.errors), comparison.errors
