"""The split as torch.compile does it, on two gloo ranks: within the budget of the unsplit model, all ranks identical."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from families import FAMILIES

from tw_compile.models.config import config_from_dict, load_config, tensor_parallel_plan
from tw_compile.models.decoder import Decoder, build_decoder
from tw_compile.passes.split.analysis import choose
from tw_compile.planning import Mode, Off, Plan, layer_shape, load_profile, plan_layer
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


LONG = 64
"""From so many tokens on a split gains, says the planner here."""
LENGTHS = (20, 100, 33, 257, LONG, LONG - 1)


def llama_that_gains_when_long(rank: int) -> Decoder:
    config = load_config("llama-3.3-70b")
    plan = plan_layer(load_profile("H200"), layer_shape(config, tensor_parallel_plan(config), 2), 4096)

    def planned(profile: Any, layer: Any, tokens: int, *, first: int | None, **options: Any) -> Plan:
        predicted = replace(plan.predicted, split_us=900.0 if tokens >= LONG else 1100.0, fused_us=1000.0)
        half = first or tokens // 2
        if tokens < LONG:
            return replace(plan, tokens=tokens, predicted=predicted, mode=Mode.OFF, sizes=(tokens,), off=Off.NOT_FASTER)
        return replace(plan, tokens=tokens, predicted=predicted, sizes=(half, tokens - half))

    choose.plan_layer = planned  # type: ignore[attr-defined]  # this process is for this test alone
    return llama(rank)


def prompt_of_another_length(rank: int, call: int) -> tuple[torch.Tensor]:
    return (torch.randint(0, 120, (1, LENGTHS[call]), generator=torch.Generator().manual_seed(call)),)


@pytest.mark.full
def test_prompts_of_all_lengths_have_one_graph_that_is_split_and_one_that_is_not() -> None:
    options = {"tw_compile.device_profile": "H200", "tw_compile.strict": True}
    comparison = compare_on_gloo(
        llama_that_gains_when_long, prompt_of_another_length, calls=len(LENGTHS), options=options, dynamic=True
    )
    assert comparison.passed, comparison
    assert (comparison.graphs, comparison.split) == (2, 1)
