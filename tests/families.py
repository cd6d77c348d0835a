"""Tiny configurations of decoder families that have a tensor-parallel plan in transformers or ours; sizes divide by 8.

The word embeddings are tied because transformers 5.17 shards only tied ones, later versions all.

Left out: stablelm has no tensor-parallel plan of its layers; jamba and qwen3_next compile, but their scans unroll to thousands
of nodes.
"""

from __future__ import annotations

from typing import Any

_BASE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 256,
    "tie_word_embeddings": True,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
}
_MLA: dict[str, Any] = {
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}

# Fields that differ from _BASE, by ``model_type``.
_FAMILIES: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "cohere": {},
    "cohere2": {},
    "deepseek_v2": _DEEPSEEK | _MLA | {"topk_method": "greedy"},
    "deepseek_v3": _DEEPSEEK | _MLA,
    "dots1": _DEEPSEEK,
    "ernie4_5": {},
    "ernie4_5_moe": {
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_intermediate_size": 64,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "exaone4": {},
    "flex_olmo": _EXPERTS,
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16},
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "glm4_moe": _DEEPSEEK | {"head_dim": 16},
    "gpt_neox": {},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16},
    "granite": {},
    "helium": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "llama": {},
    "llama4_text": {
        "num_local_experts": 8,
        "intermediate_size_mlp": 256,
        "head_dim": 16,
        "interleave_moe_layer_step": 2,
    },
    "minimax": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16},
    "ministral": {"head_dim": 16},
    "mistral": {},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "phi": {},
    "phi3": {},
    "qwen2": {},
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 64},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": _EXPERTS | {"head_dim": 16},
    "seed_oss": {"head_dim": 16},
    "smollm3": {},
    "starcoder2": {},
    "vaultgemma": {"head_dim": 16},
}

FAMILIES: dict[str, dict[str, Any]] = {
    name: _BASE | {"model_type": name} | fields for name, fields in sorted(_FAMILIES.items())
}
