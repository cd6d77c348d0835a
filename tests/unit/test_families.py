"""Every decoder family with a tensor-parallel plan is rewritten, or its refusals are explained; at 2 ranks, some at 8 too."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
import transformers
from families import FAMILIES

from tw_compile.config import Config
from tw_compile.kernels.collective import ops
from tw_compile.models.config import config_from_dict
from tw_compile.models.decoder import build_decoder
from tw_compile.passes.reasons import Refusal
from tw_compile.pipeline import TWCompilePass
from tw_compile.report import collect_reports
from tw_compile.testing.capture import capture_graphs, fake_cuda, fake_process_group

TRANSFORMERS_VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
ALL_REDUCES = (torch.ops._c10d_functional.all_reduce.default, torch.ops._c10d_functional.all_reduce_.default)


@dataclass(frozen=True)
class Expected:
    """What a family's two layers must give: all_reduces, fused sites, those that absorb their GEMM, refusals by reason."""

    all_reduce: int
    fused: int
    absorbed: int = 0
    refusals: dict[str, int] = field(default_factory=dict)


# One all_reduce of the word embeddings, one of each sharded attention, MLP, block of experts and shared expert.
# exaone4, flex_olmo, olmo2 and olmo3 norm after each block only, so the embeddings' all_reduce has no norm behind it; llama4's
# experts are added up after their all_reduce.
# Absorbed are the GEMMs that end attention and MLPs: not those of experts, which are grouped and summed up, nor those whose
# messages are added to another one (shared experts; cohere, gpt_neox and phi, whose attention and MLP are beside each other);
# embeddings have none.
EXPECTED: dict[str, Expected] = {
    "apertus": Expected(5, fused=5, absorbed=4),
    "arcee": Expected(5, fused=5, absorbed=4),
    "cohere": Expected(5, fused=5),
    "cohere2": Expected(5, fused=5),
    "deepseek_v2": Expected(6, fused=6, absorbed=3),
    "deepseek_v3": Expected(4, fused=4, absorbed=1),
    "dots1": Expected(6, fused=6, absorbed=3),
    "ernie4_5": Expected(5, fused=5, absorbed=4),
    "ernie4_5_moe": Expected(6, fused=6, absorbed=3),
    "exaone4": Expected(5, fused=4, absorbed=4, refusals={Refusal.NO_RMS_NORM: 1}),
    "flex_olmo": Expected(5, fused=4, absorbed=2, refusals={Refusal.NO_RMS_NORM: 1}),
    "gemma": Expected(5, fused=5, absorbed=4),
    "gemma2": Expected(5, fused=5, absorbed=4),
    "gemma3_text": Expected(5, fused=5, absorbed=4),
    "glm": Expected(5, fused=5, absorbed=4),
    "glm4": Expected(5, fused=5, absorbed=4),
    "glm4_moe": Expected(6, fused=6, absorbed=3),
    "gpt_neox": Expected(5, fused=5),
    "gpt_oss": Expected(3, fused=3, absorbed=2),
    "granite": Expected(5, fused=5, absorbed=4),
    "helium": Expected(5, fused=5, absorbed=4),
    "hunyuan_v1_dense": Expected(5, fused=5, absorbed=4),
    "llama": Expected(5, fused=5, absorbed=4),
    "llama4_text": Expected(6, fused=5, absorbed=4, refusals={Refusal.NO_RMS_NORM: 1}),
    "minimax": Expected(4, fused=4, absorbed=1),
    "minimax_m2": Expected(5, fused=5, absorbed=2),
    "ministral": Expected(5, fused=5, absorbed=4),
    "mistral": Expected(5, fused=5, absorbed=4),
    "mixtral": Expected(5, fused=5, absorbed=2),
    "nanochat": Expected(5, fused=5, absorbed=4),
    "nemotron": Expected(5, fused=5, absorbed=4),
    "olmo": Expected(5, fused=5, absorbed=4),
    "olmo2": Expected(5, fused=4, absorbed=4, refusals={Refusal.NO_RMS_NORM: 1}),
    "olmo3": Expected(5, fused=4, absorbed=4, refusals={Refusal.NO_RMS_NORM: 1}),
    "olmoe": Expected(5, fused=5, absorbed=2),
    "phi": Expected(5, fused=5),
    "phi3": Expected(5, fused=5, absorbed=4),
    "qwen2": Expected(5, fused=5, absorbed=4),
    "qwen2_moe": Expected(5, fused=5, absorbed=2),
    "qwen3": Expected(5, fused=5, absorbed=4),
    "qwen3_moe": Expected(5, fused=5, absorbed=2),
    "seed_oss": Expected(5, fused=5, absorbed=4),
    "smollm3": Expected(5, fused=5, absorbed=4),
    "starcoder2": Expected(5, fused=5, absorbed=4),
    "vaultgemma": Expected(5, fused=5, absorbed=4),
}

# Families of which an older transformers shards less, with the first version that shards as above. Before 5.24 it leaves the
# embeddings of gpt_neox whole. It has no plan of gpt_oss and hunyuan_v1_dense at all there, and ours does not shard embeddings.
EXPECTED_BEFORE: dict[str, tuple[tuple[int, int], Expected]] = {
    "gpt_neox": ((5, 24), Expected(4, fused=4)),
    "gpt_oss": ((5, 24), Expected(2, fused=2, absorbed=2)),
    "hunyuan_v1_dense": ((5, 24), Expected(4, fused=4, absorbed=4)),
    "qwen2_moe": ((5, 23), Expected(3, fused=3, absorbed=2)),
}


AT_8_RANKS = ("deepseek_v3", "gemma3_text", "gpt_oss", "llama", "llama4_text", "mixtral", "olmo2", "phi", "qwen2_moe")
"""One of each way to shard and to add up. Only sizes differ from two ranks."""

NEEDS_5_23 = {
    "gpt_oss": "the eager mask of transformers before 5.23 makes a real CUDA tensor, which needs a GPU",
    "nemotron": "transformers before 5.23 has no tensor-parallel plan of this family",
}


def expected(family: str) -> Expected:
    if family in EXPECTED_BEFORE:
        first_version, before = EXPECTED_BEFORE[family]
        if first_version > TRANSFORMERS_VERSION:
            return before
    return EXPECTED[family]


def test_every_family_has_an_expectation() -> None:
    assert EXPECTED.keys() == FAMILIES.keys()
    assert len(FAMILIES) >= 24


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "world_size"),
    [*((family, 2) for family in FAMILIES), *((family, 8) for family in AT_8_RANKS)],
    ids=lambda value: f"tp{value}" if isinstance(value, int) else value,
)
def test_family(family: str, world_size: int) -> None:
    if TRANSFORMERS_VERSION < (5, 23) and family in NEEDS_5_23:
        pytest.skip(NEEDS_5_23[family])
    config = config_from_dict(FAMILIES[family])
    with fake_process_group(world_size), fake_cuda():
        decoder = build_decoder(config, device="cuda", dtype=torch.bfloat16)
        with collect_reports() as reports:
            tokens = torch.zeros(2, 32, dtype=torch.long, device="cuda")
            (gm,) = capture_graphs(decoder, (tokens,), pass_=TWCompilePass(Config(strict=True)))
    want = expected(family)
    (report,) = reports
    left = sum(node.target in ALL_REDUCES for node in gm.graph.nodes)
    starts = sum(node.target in (*ops.STARTS, *ops.MM_STARTS) for node in gm.graph.nodes)
    absorbed = sum(node.target in ops.MM_STARTS for node in gm.graph.nodes)
    merged = sum("merged into" in site.form for site in report.sites)
    assert (report.counts["all_reduce"], report.counts["fused"]) == (want.all_reduce, want.fused)
    assert report.refusals == want.refusals
    assert (left, starts) == (want.all_reduce - want.fused, want.fused - merged)
    assert absorbed == sum(site.producer == "mm" for site in report.sites) == want.absorbed
    assert all(site.detail for site in report.sites)
