"""The 40 most-used text models of vLLM's registry, and Llama with quantised weights, as tiny configurations.

Sizes are small and still what quantised kernels accept: columns are multiples of 128 on each of two ranks. Fields are those of
each family's ``config.json``; those that a family calls otherwise are given under its own names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

HIDDEN, WIDTH, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 512, 1024, 8, 4, 64, 2

BASE = {
    "hidden_act": "silu", "dtype": "bfloat16", "hidden_size": HIDDEN, "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
    "vocab_size": 512, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
}  # fmt: skip
ABSENT = object()
"""Stands for a field of :data:`BASE` that a family's configuration does not have."""
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 256}
_DEEPSEEK = {
    "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "num_hidden_layers": LAYERS + 1, "hidden_size": 2 * HIDDEN, **EXPERTS,
}  # fmt: skip
"""Hidden states have more columns than latent keys, so that norms of these are not taken for a layer's."""


@dataclass(frozen=True)
class Model:
    """``architecture`` as vLLM's registry has it; ``config``: what differs from :data:`BASE`.

    ``known``: whether transformers has a configuration class for it. ``engine``: arguments of the engine.
    """

    name: str
    architecture: str
    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    known: bool = True
    engine: dict[str, Any] = field(default_factory=dict)


_MLA = {"attention_backend": "FLASH_ATTN_MLA"}
_GRANITE = {
    "residual_multiplier": 0.22, "attention_multiplier": 0.125, "embedding_multiplier": 12.0, "logits_scaling": 8.0,
}  # fmt: skip

MODELS = (
    Model("Llama 2, 3, Yi, SmolLM", "LlamaForCausalLM", "llama"),
    Model("Qwen2, Qwen2.5", "Qwen2ForCausalLM", "qwen2"),
    Model("Qwen2-MoE", "Qwen2MoeForCausalLM", "qwen2_moe", {
        "num_experts": 4, "shared_expert_intermediate_size": 512, "norm_topk_prob": False, "decoder_sparse_step": 1,
        "mlp_only_layers": [], **EXPERTS}),
    Model("Qwen3", "Qwen3ForCausalLM", "qwen3"),
    Model("Qwen3-MoE", "Qwen3MoeForCausalLM", "qwen3_moe", {
        "num_experts": 4, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], **EXPERTS}),
    Model("Mistral", "MistralForCausalLM", "mistral", {"sliding_window": None}),
    Model("Mixtral", "MixtralForCausalLM", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Model("Gemma", "GemmaForCausalLM", "gemma", {"hidden_activation": "gelu_pytorch_tanh"}),
    Model("Gemma 2", "Gemma2ForCausalLM", "gemma2", {
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 64, "attn_logit_softcapping": 50.0,
        "sliding_window": 1024}),
    Model("Gemma 3", "Gemma3ForCausalLM", "gemma3_text", {
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 64, "sliding_window": 1024}),
    Model("Phi-3, Phi-4", "Phi3ForCausalLM", "phi3", {"pad_token_id": 0, "original_max_position_embeddings": 4096}),
    Model("Phi-3.5-MoE", "PhiMoEForCausalLM", "phimoe", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True,
        "router_jitter_noise": 0.01, "input_jitter_noise": 0.01, "sliding_window": None}),
    Model("gpt-oss", "GptOssForCausalLM", "gpt_oss", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 128}),
    Model("DeepSeek-V2", "DeepseekV2ForCausalLM", "deepseek_v2", {"topk_method": "greedy", **_DEEPSEEK}, engine=_MLA),
    Model("DeepSeek-V3, R1, Kimi-K2", "DeepseekV3ForCausalLM", "deepseek_v3", {
        **_DEEPSEEK, "q_lora_rank": 256, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
        "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5}, engine=_MLA),
    Model("GLM-4 (0414)", "Glm4ForCausalLM", "glm4", {"partial_rotary_factor": 0.5}),
    Model("GLM-4.5, 4.6", "Glm4MoeForCausalLM", "glm4_moe", {
        "partial_rotary_factor": 0.5, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1, "num_hidden_layers": LAYERS + 1, **EXPERTS}),
    Model("Granite", "GraniteForCausalLM", "granite", _GRANITE),
    Model("Granite-MoE", "GraniteMoeForCausalLM", "granitemoe", {
        "num_local_experts": 4, "num_experts_per_tok": 2, **_GRANITE}),
    Model("OLMo", "OlmoForCausalLM", "olmo", {"clip_qkv": None}),
    Model("OLMo 2, 3", "Olmo2ForCausalLM", "olmo2"),
    Model("OLMoE", "OlmoeForCausalLM", "olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False}),
    Model("Falcon", "FalconForCausalLM", "falcon", {
        "new_decoder_architecture": True, "num_kv_heads": KV_HEADS, "multi_query": True, "parallel_attn": True,
        "bias": False, "alibi": False, "layer_norm_epsilon": 1e-5, "head_dim": ABSENT}),
    Model("StarCoder2", "Starcoder2ForCausalLM", "starcoder2", {
        "hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, "use_bias": True, "sliding_window": None}),
    Model("Command-R", "CohereForCausalLM", "cohere", {"logit_scale": 0.0625, "layer_norm_eps": 1e-5}),
    Model("Command-A, R7B", "Cohere2ForCausalLM", "cohere2", {
        "logit_scale": 0.0625, "layer_norm_eps": 1e-5, "sliding_window": 1024}),
    Model("InternLM 2", "InternLM2ForCausalLM", "internlm2", {
        "bias": False, "rope_theta": 10000.0, "tie_word_embeddings": False}, known=False),
    Model("InternLM 3", "InternLM3ForCausalLM", "internlm3", {"qkv_bias": False, "bias": False}),
    Model("Baichuan 2", "BaichuanForCausalLM", "baichuan", {
        "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128,
        "tie_word_embeddings": False, "rope_theta": 10000.0}, known=False),
    Model("MiniCPM", "MiniCPMForCausalLM", "minicpm", {
        "scale_depth": 1.4, "scale_emb": 12, "dim_model_base": 256, "tie_word_embeddings": False,
        "rope_theta": 10000.0}, known=False),
    Model("MiniCPM 3", "MiniCPM3ForCausalLM", "minicpm3", {
        "q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 64,
        "num_key_value_heads": HEADS, "scale_depth": 1.4, "scale_emb": 12, "dim_model_base": 256}),
    Model("Nemotron", "NemotronForCausalLM", "nemotron", {"hidden_act": "relu2", "norm_eps": 1e-5}),
    Model("EXAONE 3", "ExaoneForCausalLM", "exaone", {
        "num_layers": LAYERS, "activation_function": "silu", "layer_norm_epsilon": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": False}, known=False),
    Model("StableLM 2", "StableLmForCausalLM", "stablelm", {
        "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "use_qkv_bias": False}),
    Model("GPT-NeoX, Pythia", "GPTNeoXForCausalLM", "gpt_neox", {
        "hidden_act": "gelu", "layer_norm_eps": 1e-5, "rotary_pct": 0.25, "use_parallel_residual": True}),
    Model("OPT", "OPTForCausalLM", "opt", {
        "ffn_dim": WIDTH, "word_embed_proj_dim": HIDDEN, "activation_function": "relu", "do_layer_norm_before": True}),
    Model("BLOOM", "BloomForCausalLM", "bloom", {"n_layer": LAYERS, "n_head": HEADS}),
    Model("MPT", "MPTForCausalLM", "mpt", {
        "d_model": HIDDEN, "n_heads": HEADS, "n_layers": LAYERS, "expansion_ratio": 2, "max_seq_len": 4096,
        "no_bias": True, "attn_config": {"alibi": True, "attn_type": "multihead_attention"}}),
    Model("DBRX", "DbrxForCausalLM", "dbrx", {
        "d_model": HIDDEN, "n_heads": HEADS, "n_layers": LAYERS, "max_seq_len": 4096,
        "attn_config": {"kv_n_heads": KV_HEADS, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 256, "moe_num_experts": 4, "moe_top_k": 2}}),
    Model("Jamba", "JambaForCausalLM", "jamba", {
        "num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
        "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
        "mamba_dt_rank": 32}),
)  # fmt: skip
"""40 of them."""

FURTHER = (
    Model("GLM-4 (9B-chat-hf)", "GlmForCausalLM", "glm", {"partial_rotary_factor": 0.5}),
    Model("EXAONE 4", "Exaone4ForCausalLM", "exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * LAYERS}),
)  # fmt: skip


def _compressed(weights: dict[str, Any], inputs: dict[str, Any] | None, form: str) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": form,
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        }
    }


def _number(bits: int, kind: str, strategy: str, **rest: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False, **rest}


def _llama(name: str, config: dict[str, Any], **engine: Any) -> Model:
    return Model(f"Llama, {name}", "LlamaForCausalLM", "llama", config, engine=engine)


_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
QUANTISED = (
    _llama("FP8, one static scale", {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}),
    _llama(
        "FP8, quantised while loading", {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
    ),
    _llama(
        "FP8, dynamic scales by token",
        _compressed(
            _number(8, "float", "channel"), _number(8, "float", "token") | {"dynamic": True}, "float-quantized"
        ),
    ),
    _llama(
        "FP8, blocks of 128",
        {
            "quantization_config": {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
            }
        },
    ),
    _llama(
        "INT8, dynamic scales by token",
        _compressed(_number(8, "int", "channel"), _number(8, "int", "token") | {"dynamic": True}, "int-quantized"),
    ),
    _llama("AWQ by Marlin", {"quantization_config": _AWQ}),
    _llama("AWQ", {"quantization_config": _AWQ}, quantization="awq", dtype="float16"),
    _llama("GPTQ by Marlin", {"quantization_config": _GPTQ}),
    _llama("GPTQ", {"quantization_config": _GPTQ}, quantization="gptq", dtype="float16"),
    _llama(
        "4-bit weights by Machete",
        _compressed(_number(4, "int", "group", group_size=128), None, "pack-quantized"),
    ),
)

_LINEAR = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 4,
    "linear_num_value_heads": 8, "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}  # fmt: skip
_MAMBA = {
    "mamba_d_state": 64, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_n_groups": 2, "mamba_n_heads": 16,
    "mamba_d_head": 64,
}  # fmt: skip
_NEMOTRON = {
    "mamba_num_heads": 16, "mamba_head_dim": 64, "ssm_state_size": 64, "conv_kernel": 4, "n_groups": 2, "expand": 2,
    "layer_norm_epsilon": 1e-5, "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "use_bias": False,
    "use_conv_bias": True, "mlp_bias": False, "num_hidden_layers": 5,
}  # fmt: skip
_GRANITE_H = {
    "shared_intermediate_size": 512, "num_experts_per_tok": 2, "position_embedding_type": "nope", **_GRANITE, **_MAMBA,
}  # fmt: skip
_GRANITE_LAYERS = {"hf_overrides": {"layer_types": ["mamba", "attention"]}}
"""Behind transformers, of which some versions rename the types to what vLLM 0.24 does not know."""
_MAMBA_2 = {
    "num_heads": 16, "head_dim": 64, "state_size": 64, "expand": 2, "conv_kernel": 4, "layer_norm_epsilon": 1e-5,
    "use_bias": False, "use_conv_bias": True,
}  # fmt: skip
_LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_ROPE = {"rope_theta": 10000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_VISION = {
    "depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": HIDDEN, "patch_size": 16,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16, "deepstack_visual_indexes": [],
}  # fmt: skip
_TEXT_ONLY = {"language_model_only": True}
_LFM = {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "conv_bias": False, "norm_eps": 1e-5}

WITH_STATE = (
    Model("Qwen3-Next", "Qwen3NextForCausalLM", "qwen3_next", {
        "num_experts": 4, "shared_expert_intermediate_size": 512, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [], **_LINEAR, **EXPERTS}),
    Model("Qwen3.5", "Qwen3_5ForConditionalGeneration", "qwen3_5", {
        "text_config": {**BASE, **_LINEAR, "model_type": "qwen3_5_text"}, "vision_config": _VISION}, engine=_TEXT_ONLY),
    Model("Qwen3.5, with experts", "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", {
        "text_config": {
            **BASE, **_LINEAR, **EXPERTS, "model_type": "qwen3_5_moe_text", "num_experts": 4,
            "shared_expert_intermediate_size": 512},
        "vision_config": _VISION}, engine=_TEXT_ONLY),
    Model("Kimi-Linear", "KimiLinearForCausalLM", "kimi_linear", {
        "num_hidden_layers": 3, "hidden_size": 2 * HIDDEN, "q_lora_rank": None, "mla_use_nope": True,
        "linear_attn_config": {
            "kda_layers": [1, 2], "full_attn_layers": [3], "num_heads": 8, "head_dim": 64, "short_conv_kernel_size": 4},
        "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 256, "num_shared_experts": 1,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_key_value_heads": HEADS, **_LATENT}, engine=_MLA),
    Model("Ling 2.5, Ring 2.5", "BailingMoeV2_5ForCausalLM", "bailing_moe_v2_5", {
        "num_hidden_layers": 4, "hidden_size": 2 * HIDDEN, "q_lora_rank": 256, "layer_group_size": 2,
        "group_norm_size": 2, "num_experts": 4, "num_shared_experts": 1, "moe_shared_expert_intermediate_size": 256,
        "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True, "router_dtype": "fp32", "routed_scaling_factor": 2.5,
        "tie_word_embeddings": False, "use_bias": False, "use_qkv_bias": False, "use_qk_norm": True, **_ROPE, **_LATENT,
        **EXPERTS}, known=False, engine=_MLA),
    Model("Nemotron-H", "NemotronHForCausalLM", "nemotron_h", {"hybrid_override_pattern": "M-M*-", **_NEMOTRON}),
    Model("Nemotron 3, with experts", "NemotronHForCausalLM", "nemotron_h", {
        "hybrid_override_pattern": "MEM*E", "n_routed_experts": 4, "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": 512, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, **_NEMOTRON, **EXPERTS}),
    Model("Granite-4-H", "GraniteMoeHybridForCausalLM", "granitemoehybrid", {
        "num_local_experts": 0, **_GRANITE_H}, engine=_GRANITE_LAYERS),
    Model("Granite-4-H, with experts", "GraniteMoeHybridForCausalLM", "granitemoehybrid", {
        "num_local_experts": 4, **_GRANITE_H}, engine=_GRANITE_LAYERS),
    Model("Falcon-H1", "FalconH1ForCausalLM", "falcon_h1", {
        "mamba_d_ssm": 2 * HIDDEN, "mamba_rms_norm": False, "mlp_multipliers": [1.0, 1.0], "ssm_multipliers": [1.0] * 5,
        **_MAMBA}),
    Model("LFM2", "Lfm2ForCausalLM", "lfm2", {
        "block_auto_adjust_ff_dim": False, "block_ff_dim": WIDTH, "conv_dim": HIDDEN, "block_dim": HIDDEN, **_LFM}),
    Model("LFM2-MoE", "Lfm2MoeForCausalLM", "lfm2_moe", {
        "num_dense_layers": 1, "num_experts": 4, "norm_topk_prob": True, "use_expert_bias": True,
        "routed_scaling_factor": 1.0, **_LFM, **EXPERTS}),
    Model("OLMo Hybrid", "OlmoHybridForCausalLM", "olmo_hybrid", {**_LINEAR, "linear_num_key_heads": HEADS}),
    Model("PLaMo 2", "Plamo2ForCausalLM", "plamo2", {
        "mamba_d_state": 64, "mamba_d_conv": 4, "mamba_num_heads": HEADS, "hidden_size_per_head": HEAD_DIM,
        "mamba_step": 2, "mamba_chunk_size": 64, "mamba_enabled": True, "tie_word_embeddings": False, **_ROPE},
        known=False),
    Model("Zamba 2", "Zamba2ForCausalLM", "zamba2", {
        "hidden_act": "gelu", "layers_block_type": ["mamba", "hybrid"], "hybrid_layer_ids": [1], "num_mem_blocks": 1,
        "mamba_d_state": 64, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_ngroups": 1, "n_mamba_heads": 16,
        "mamba_headdim": 64, "attention_hidden_size": 2 * HIDDEN, "attention_head_dim": 2 * HEAD_DIM,
        "num_key_value_heads": HEADS, "use_mem_rope": True, "adapter_rank": 128}),
    Model("Mamba 2", "Mamba2ForCausalLM", "mamba2", {"n_groups": 2, **_MAMBA_2}),
    Model("Mamba 2, one group for both ranks", "Mamba2ForCausalLM", "mamba2", {"n_groups": 1, **_MAMBA_2}),
    Model("Mamba, Falcon-Mamba", "FalconMambaForCausalLM", "falcon_mamba", {
        "state_size": 16, "expand": 2, "conv_kernel": 4, "time_step_rank": 32, "use_bias": False, "use_conv_bias": True,
        "layer_norm_epsilon": 1e-5, "mixer_rms_eps": 1e-6}),
)  # fmt: skip
"""Their layers keep a state from token to token. Each kind of layer of a family is there at least once."""
