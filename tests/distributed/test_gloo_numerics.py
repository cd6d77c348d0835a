"""The whole backend on two gloo ranks: generated CPU code, real reductions, errors against float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hf_norm import HFNorm
from torch import nn

from tw_compile.testing import Comparison, GlooRanks, compare_on_gloo

H = 64
CALLS = ((2, 5), (1, 7), (3, 1), (2, 5), (1, 9))
_SECOND: list[dist.ProcessGroup] = []


def second_group() -> dist.ProcessGroup:
    if not _SECOND:
        _SECOND.append(dist.new_group(list(range(dist.get_world_size()))))
    return _SECOND[0]


class Decoder(nn.Module):
    """Attention-like blocks on one group, MLP-like blocks on another; a bias, an early norm, a final norm."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        common, own = torch.Generator().manual_seed(1), torch.Generator().manual_seed(100 + rank)
        self.blocks = nn.ModuleList(nn.Linear(H, H, bias=False) for _ in range(4))
        for block in self.blocks:
            block.weight.data = 0.2 * torch.randn(H, H, generator=own)
        self.norms = nn.ModuleList(HFNorm(H, common) for _ in range(5))
        self.bias = nn.Parameter(torch.randn(H, generator=common))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        stream, hidden = x, self.norms[0](x)
        for index, block in enumerate(self.blocks):
            partial = block(hidden)
            # Sites 0 and 1 share a group, so the residual between them stays sharded.
            dist.all_reduce(partial, group=second_group() if index >= 2 else None)
            if index == 1:
                partial = partial + self.bias
            stream = stream + partial
            hidden = self.norms[index + 1](stream)
        return hidden, stream


def build(rank: int) -> nn.Module:
    second_group()
    return Decoder(rank).bfloat16()


def arguments(rank: int, call: int) -> tuple[torch.Tensor]:
    return (torch.randn(*CALLS[call], H, generator=torch.Generator().manual_seed(call % 3)).bfloat16(),)


def compare(ranks: GlooRanks, absorb_mm: str) -> Comparison:
    options = {"tw_compile.strict": True, "tw_compile.absorb_mm": absorb_mm}
    return compare_on_gloo(build, arguments, calls=len(CALLS), ranks=ranks, dynamic=True, options=options)


@pytest.fixture(scope="module")
def comparison(gloo_ranks: GlooRanks) -> Comparison:
    return compare(gloo_ranks, "auto")


@pytest.mark.full
def test_every_site_is_fused(comparison: Comparison) -> None:
    assert comparison.counts == {"all_reduce": 4, "fused": 4, "refused": 0, "gated": 0}


def test_hidden_and_residual_are_within_the_budget(comparison: Comparison) -> None:
    assert [(error.call, error.output) for error in comparison.errors] == [
        (c, o) for c in range(len(CALLS)) for o in (0, 1)
    ]
    assert all(error.passed for error in comparison.errors), comparison.errors
    assert all(0 < error.unfused_error < 0.05 for error in comparison.errors), comparison.errors


def test_ranks_hold_the_same_bits(comparison: Comparison) -> None:
    assert comparison.bitwise_equal_across_ranks
    assert comparison.passed


@pytest.mark.full
def test_absorbed_gemms_change_no_bit(gloo_ranks: GlooRanks, comparison: Comparison) -> None:
    absorbed = compare(gloo_ranks, "always")
    assert absorbed.counts == comparison.counts
    assert absorbed.passed
    assert absorbed.errors == comparison.errors
