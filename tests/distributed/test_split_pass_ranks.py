"""The split as torch.compile does it, on two gloo ranks: within the budget of the unsplit model, all ranks identical."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES

from tw_compile.models.config import config_from_dict
from tw_compile.models.decoder import Decoder, build_decoder
from tw_compile.testing import GlooRanks, compare_on_gloo


def llama(rank: int) -> Decoder:
    torch.manual_seed(rank)
    return build_decoder(config_from_dict(FAMILIES["llama"]), device="cpu", dtype=torch.bfloat16)


def prompt(rank: int, call: int) -> tuple[torch.Tensor]:
    return (torch.randint(0, 120, (1, 63), generator=torch.Generator().manual_seed(call)),)


@pytest.mark.full
@pytest.mark.parametrize("split", ["off", "1", "32"])
def test_compiled_model_stays_within_its_budget(gloo_ranks: GlooRanks, split: str) -> None:
    options = {"tw_compile.split": split, "tw_compile.strict": True}
    comparison = compare_on_gloo(llama, prompt, calls=2, ranks=gloo_ranks, options=options, dynamic=False)
    assert comparison.passed, comparison
    assert comparison.counts["fused"] == comparison.counts["all_reduce"] > 0
