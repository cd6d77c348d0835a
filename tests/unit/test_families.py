"""Every decoder family with a tensor-parallel plan is captured without graph breaks, at 2 and 8 ranks on fake GPUs."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
import transformers
from families import FAMILIES

from tw_compile.models import build_decoder
from tw_compile.models.config import config_from_dict
from tw_compile.testing.capture import capture_graphs, fake_cuda, fake_process_group

TRANSFORMERS_VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
ALL_REDUCES = (torch.ops._c10d_functional.all_reduce.default, torch.ops._c10d_functional.all_reduce_.default)


@dataclass(frozen=True)
class Expected:
    """What a family's two layers must give: all_reduces in the graph, fused sites, refusals by reason."""

    all_reduce: int
    fused: int | None = None
    refusals: dict[str, int] = field(default_factory=dict)


# One all_reduce of the word embeddings, one of each sharded attention, MLP, block of experts and shared expert.
EXPECTED: dict[str, Expected] = {
    "apertus": Expected(all_reduce=5),
    "arcee": Expected(all_reduce=5),
    "cohere": Expected(all_reduce=5),
    "cohere2": Expected(all_reduce=5),
    "deepseek_v2": Expected(all_reduce=6),
    "deepseek_v3": Expected(all_reduce=4),
    "dots1": Expected(all_reduce=6),
    "ernie4_5": Expected(all_reduce=5),
    "ernie4_5_moe": Expected(all_reduce=6),
    "exaone4": Expected(all_reduce=5),
    "flex_olmo": Expected(all_reduce=5),
    "gemma": Expected(all_reduce=5),
    "gemma2": Expected(all_reduce=5),
    "gemma3_text": Expected(all_reduce=5),
    "glm": Expected(all_reduce=5),
    "glm4": Expected(all_reduce=5),
    "glm4_moe": Expected(all_reduce=6),
    "gpt_neox": Expected(all_reduce=4),
    "gpt_oss": Expected(all_reduce=2),
    "granite": Expected(all_reduce=5),
    "helium": Expected(all_reduce=5),
    "llama": Expected(all_reduce=5),
    "llama4_text": Expected(all_reduce=6),
    "minimax": Expected(all_reduce=4),
    "minimax_m2": Expected(all_reduce=5),
    "ministral": Expected(all_reduce=5),
    "mistral": Expected(all_reduce=5),
    "mixtral": Expected(all_reduce=5),
    "nanochat": Expected(all_reduce=5),
    "nemotron": Expected(all_reduce=5),
    "olmo": Expected(all_reduce=5),
    "olmo2": Expected(all_reduce=5),
    "olmo3": Expected(all_reduce=5),
    "olmoe": Expected(all_reduce=5),
    "phi": Expected(all_reduce=5),
    "phi3": Expected(all_reduce=5),
    "qwen2": Expected(all_reduce=5),
    "qwen2_moe": Expected(all_reduce=5),
    "qwen3": Expected(all_reduce=5),
    "qwen3_moe": Expected(all_reduce=5),
    "seed_oss": Expected(all_reduce=5),
    "smollm3": Expected(all_reduce=5),
    "starcoder2": Expected(all_reduce=5),
    "vaultgemma": Expected(all_reduce=5),
}

# Families of which an older transformers shards less.
EXPECTED_BEFORE_5_23: dict[str, Expected] = {
    "qwen2_moe": Expected(all_reduce=3),
}


ADDED_IN_5_23 = {"nemotron"}


def expected(family: str) -> Expected:
    if TRANSFORMERS_VERSION < (5, 23) and family in EXPECTED_BEFORE_5_23:
        return EXPECTED_BEFORE_5_23[family]
    return EXPECTED[family]


def test_every_family_has_an_expectation() -> None:
    assert EXPECTED.keys() == FAMILIES.keys()
    assert len(FAMILIES) >= 24


@pytest.mark.parametrize("world_size", [2, 8], ids="tp{}".format)
@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str, world_size: int) -> None:
    if TRANSFORMERS_VERSION < (5, 23) and family in ADDED_IN_5_23:
        pytest.skip("transformers has no tensor-parallel plan of this family before 5.23")
    config = config_from_dict(FAMILIES[family])
    with fake_process_group(world_size), fake_cuda():
        decoder = build_decoder(config, device="cuda", dtype=torch.bfloat16)
        (graph,) = capture_graphs(decoder, (torch.zeros(2, 32, dtype=torch.long, device="cuda"),))
    count = sum(node.target in ALL_REDUCES for node in graph.graph.nodes)
    assert count == expected(family).all_reduce
