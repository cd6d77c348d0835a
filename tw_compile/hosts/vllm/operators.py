"""vLLM's operators that passes must know, by name; those of 0.24, and of 0.20 and 0.33 where they have the same."""

from __future__ import annotations

from tw_compile.passes.operators import (
    AllReduceOperator,
    AttentionOperator,
    NormOperator,
    QuantOperator,
    RowWiseOperator,
)

# all_reduce(tensor, group_name): out of place, ready when it returns; the group has a name of vLLM's, as ``tp:0``.
ALL_REDUCE = AllReduceOperator("vllm::all_reduce")
# rms_norm(x, weight, eps, variance_size)
NORM = NormOperator("vllm_ir::rms_norm", rows=0, weight=1, eps=2, variance_size=3)
# fused_add_rms_norm(x, residual, weight, eps, variance_size) -> (hidden, x + residual)
ADD_NORM = NormOperator("vllm_ir::fused_add_rms_norm", rows=0, residual=1, weight=2, eps=3, variance_size=4)
# rms_norm_static_fp8_quant(hidden!, input, weight, scale, epsilon)
QUANTISING_NORM = NormOperator(
    "_C::rms_norm_static_fp8_quant", rows="input", weight="weight", eps="epsilon", scale="scale", writes=True
)
# fused_add_rms_norm_static_fp8_quant(hidden!, input, residual!, weight, scale, epsilon)
QUANTISING_ADD_NORM = NormOperator(
    "_C::fused_add_rms_norm_static_fp8_quant",
    rows="input",
    residual="residual",
    weight="weight",
    eps="epsilon",
    scale="scale",
    writes=True,
)
# static_scaled_fp8_quant(result!, input, scale, group_shape)
QUANT = QuantOperator("_C::static_scaled_fp8_quant", rows="input", scale="scale", group_shape="group_shape")
# unified_attention_with_output(query, key, value, output!, layer_name, ...); kernels are FlashAttention 3's on Hopper.
ATTENTION = AttentionOperator(
    "vllm::unified_attention_with_output", query="query", half="tw_compile::vllm_attention_half", kernel="flash3"
)
ROW_WISE = (
    RowWiseOperator("_C::silu_and_mul", reads=("input",), results=("result",)),
    RowWiseOperator("_C::rms_norm", reads=("input",), results=("result",)),
    RowWiseOperator("_C::rotary_embedding", reads=("positions", "query", "key")),
    RowWiseOperator("_C::vocab_parallel_embedding", reads=("input_ids",), results=("out",)),
)

OPERATORS = (ALL_REDUCE, NORM, ADD_NORM, QUANTISING_NORM, QUANTISING_ADD_NORM, QUANT, ATTENTION, *ROW_WISE)
