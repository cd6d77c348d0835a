"""GEMMs that are fed on two gloo ranks, where the operator waits: generated CPU code, errors against float64."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES
from torch import nn

from tw_compile.models.config import config_from_dict
from tw_compile.models.decoder import build_decoder
from tw_compile.report import collect_reports
from tw_compile.testing import GlooRanks, compare_on_gloo

TOKENS = 64
OPTIONS = {"tw_compile.strict": True, "tw_compile.feed_mm": "always"}
"""A model of as many tokens as are fed by default takes a CPU minutes."""


def qwen(rank: int) -> nn.Module:
    """Its queries, keys and values have biases."""
    config = config_from_dict({**FAMILIES["qwen2"], "hidden_size": 64, "intermediate_size": 128})
    return build_decoder(config, device="cpu", dtype=torch.bfloat16)


def tokens(rank: int, call: int) -> tuple[torch.Tensor]:
    return (torch.randint(3, 120, (1, TOKENS + call), generator=torch.Generator().manual_seed(call)),)


def consumers(rank: int) -> list[tuple[str, str]]:
    """Of each site of the compiled model."""
    torch._dynamo.reset()
    with torch.no_grad(), collect_reports() as reports:
        torch.compile(qwen(rank), backend="tw_compile", options=OPTIONS)(*tokens(rank, 0))
    return [(site.consumer, site.feed_refusal) for report in reports for site in report.sites]


@pytest.mark.full
def test_a_fed_model_is_within_the_budget(gloo_ranks: GlooRanks) -> None:
    comparison = compare_on_gloo(qwen, tokens, calls=2, ranks=gloo_ranks, options=OPTIONS)
    assert comparison.passed, comparison
    for found in gloo_ranks.run(consumers):
        assert found == [("fed", "")] * 4 + [("other", "residual_on_all_ranks")]
