"""Other models of vLLM's than Llama: which sums are fused, by pieces and by groups of layers, and what they compute."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_vllm import LAYERS, MAX_TOKENS, MODEL, decoder, dispatch, engine_config
from one_rank import one_rank  # noqa: F401

from tw_compile import collect_reports
from tw_compile.report import GraphReport

pytestmark = pytest.mark.usefixtures("groups", "one_rank", "cold", "wide_residuals")

LONG_FROM = 24
COUNTS = (MAX_TOKENS, LONG_FROM, LONG_FROM - 1, 3)
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}


@dataclass(frozen=True)
class Family:
    """``where``: module and class of the model; ``config``: what differs from :data:`fake_vllm.MODEL`.

    ``embedding``: whether its all_reduce is followed by a norm. ``first``: layers before those that are alike.
    """

    where: str
    config: dict[str, Any]
    embedding: bool = True
    first: int = 0
    engine: dict[str, Any] = field(default_factory=dict)


FAMILIES = {
    "qwen2": Family("qwen2.Qwen2Model", {"architectures": ["Qwen2ForCausalLM"]}),
    "qwen3": Family("qwen3.Qwen3Model", {"architectures": ["Qwen3ForCausalLM"]}),
    "mistral": Family("llama.LlamaModel", {"architectures": ["MistralForCausalLM"], "sliding_window": 64}),
    "gemma2": Family(
        "gemma2.Gemma2Model",
        {
            "architectures": ["Gemma2ForCausalLM"],
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 50.0,
            "sliding_window": 64,
        },
        embedding=False,
    ),
    "mixtral": Family(
        "mixtral.MixtralModel", {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, **EXPERTS}
    ),
    "qwen3_moe": Family(
        "qwen3_moe.Qwen3MoeModel",
        {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "norm_topk_prob": True, **EXPERTS},
    ),
    "gpt_oss": Family(
        "gpt_oss.GptOssModel",
        {"architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "sliding_window": 64, **EXPERTS},
    ),
    "granite": Family("granite.GraniteModel", {"architectures": ["GraniteForCausalLM"], "residual_multiplier": 0.22}),
    "glm4": Family("glm4.Glm4Model", {"architectures": ["Glm4ForCausalLM"], "partial_rotary_factor": 0.5}),
    "glm4_moe": Family(
        "glm4_moe.Glm4MoeModel",
        {
            "architectures": ["Glm4MoeForCausalLM"],
            "partial_rotary_factor": 0.5,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "num_hidden_layers": LAYERS + 1,
            **EXPERTS,
        },
        first=1,
    ),
    "deepseek_v2": Family(
        "deepseek_v2.DeepseekV2Model",
        {
            "architectures": ["DeepseekV2ForCausalLM"],
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "num_hidden_layers": LAYERS + 1,
            **EXPERTS,
        },
        first=1,
        engine={"attention_backend": "FLASH_ATTN_MLA"},
    ),
}


@pytest.fixture(autouse=True)
def experts(groups: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models with experts have a group for them, here the same; shared ones a stream of their own, which takes a GPU."""
    from vllm.distributed import parallel_state

    monkeypatch.setattr("tw_compile.hosts.vllm.plan.MOST_SHORT_TOKENS", LONG_FROM - 1)
    monkeypatch.setattr(parallel_state, "_EP", parallel_state._TP)
    for module in ("vllm.utils.torch_utils", "vllm.model_executor.layers.fused_moe.runner.shared_experts"):
        monkeypatch.setattr(f"{module}.aux_stream", lambda: None)


def run(folder: Path, family: Family, **options: Any) -> tuple[list[torch.Tensor], list[GraphReport]]:
    module, name = family.where.split(".")
    model_class = getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), name)
    config = engine_config(
        folder,
        compilation={"pass_config": {"fuse_allreduce_rms": False}},
        additional_config={"tw_compile": {"strict": True, **options}},
        model=str(folder / family.where),
        **family.engine,
    )
    with collect_reports() as reports, decoder(model_class, config) as model:
        return [model(count) for count in COUNTS], reports


@pytest.mark.parametrize("name", FAMILIES)
def test_sums_of_layers_are_fused_by_pieces_and_groups_and_compute_the_same(folder: Path, name: str) -> None:
    if (name, dispatch()) == ("glm4_moe", "vllm-0.33"):
        pytest.skip("Dynamo recurses without end while it traces this model here, before any pass")
    family = FAMILIES[name]
    (folder / family.where).mkdir(exist_ok=True)
    (folder / family.where / "config.json").write_text(json.dumps({**MODEL, "model_type": name, **family.config}))
    unfused, _ = run(folder, family, fuse=False)
    found, reports = run(folder, family)
    for graph in reports:
        counts = dict(graph.counts)
        if not family.embedding and counts["all_reduce"] == 1:
            assert counts["refused"] == 1
        else:
            assert counts["fused"] == counts["all_reduce"] > 0, graph.refusals
    head, group = [graph.counts["all_reduce"] for graph in reports if graph.tokens == (LONG_FROM, MAX_TOKENS)]
    assert (head, group) == (1 + 2 * family.first, 2)
    for one, other in zip(found, unfused, strict=True):
        torch.testing.assert_close(one, other, rtol=0.06, atol=0.06)
