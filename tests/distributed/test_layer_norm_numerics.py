"""A family with LayerNorm on two gloo ranks: generated CPU code, real reductions, errors against the model in float64."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES
from torch import nn

from tw_compile.models.config import config_from_dict
from tw_compile.models.decoder import build_decoder
from tw_compile.testing import GlooRanks, compare_on_gloo


def cohere(rank: int) -> nn.Module:
    """Its attention and MLP are summed at once, and behind them is a LayerNorm with a weight."""
    return build_decoder(config_from_dict(FAMILIES["cohere"]), device="cpu", dtype=torch.bfloat16)


def olmo(rank: int) -> nn.Module:
    """Its LayerNorms have no weight."""
    return build_decoder(config_from_dict(FAMILIES["olmo"]), device="cpu", dtype=torch.bfloat16)


def tokens(rank: int, call: int) -> tuple[torch.Tensor]:
    return (torch.randint(3, 256, (2, 8 + call), generator=torch.Generator().manual_seed(call)),)


@pytest.mark.full
@pytest.mark.parametrize("family", [cohere, olmo])
def test_a_family_is_fused_within_the_budget(gloo_ranks: GlooRanks, family: object) -> None:
    options = {"tw_compile.strict": True}
    comparison = compare_on_gloo(family, tokens, calls=2, ranks=gloo_ranks, options=options)  # type: ignore[arg-type]
    assert comparison.counts["fused"] == comparison.counts["all_reduce"] == 5
    assert comparison.passed, comparison
