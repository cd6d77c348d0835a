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


def with_random_vectors(family: str) -> nn.Module:
    """Vectors of a fresh model are ones and zeros, which would show neither a weight nor a bias that is lost."""
    model = build_decoder(config_from_dict(FAMILIES[family]), device="cpu", dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.dim() == 1 and (isinstance(module, nn.LayerNorm) or name == "bias"):
                    parameter += 0.3 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return model


def phi(rank: int) -> nn.Module:
    """Attention and MLP are summed at once, each with a bias, and behind them is a LayerNorm with a weight and a bias."""
    return with_random_vectors("phi")


def starcoder2(rank: int) -> nn.Module:
    """Each sum has a bias, and behind it is a LayerNorm with a weight and a bias."""
    return with_random_vectors("starcoder2")


def tokens(rank: int, call: int) -> tuple[torch.Tensor]:
    return (torch.randint(3, 256, (2, 8 + call), generator=torch.Generator().manual_seed(call)),)


@pytest.mark.full
@pytest.mark.parametrize("family", [cohere, olmo, phi, starcoder2])
def test_a_family_is_fused_within_the_budget(gloo_ranks: GlooRanks, family: object) -> None:
    options = {"tw_compile.strict": True}
    comparison = compare_on_gloo(family, tokens, calls=2, ranks=gloo_ranks, options=options)  # type: ignore[arg-type]
    assert comparison.counts["fused"] == comparison.counts["all_reduce"] == 5
    assert comparison.passed, comparison
