"""Attention. These operators find the cache and the step's requests by the layer's name."""

from __future__ import annotations

from tw_compile.passes.operators import AttentionOperator

# unified_attention_with_output(query, key, value, output!, layer_name, ...). On Hopper its kernels are FlashAttention 3's.
ATTENTION = AttentionOperator(
    "vllm::unified_attention_with_output", query="query", half="tw_compile::vllm_attention_half", kernel="flash3"
)
# unified_mla_attention_with_output(q, kv_c_normed, k_pe, output!, layer_name, ...): attention of latent keys and values. Its
# steps are planned on the host, from data that only the runner has.
LATENT_ATTENTION = AttentionOperator(
    "vllm::unified_mla_attention_with_output", query="q", half=None, kernel="flash3_latent"
)
