"""RMSNorms, alone and with a quantisation behind them."""

from __future__ import annotations

from tw_compile.hosts.vllm.operators.quantisations import LEAST_SCALE
from tw_compile.passes.operators import MadeScaleArguments, NormOperator, RowWiseOperator

# rms_norm(x, weight, eps, variance_size)
NORM = NormOperator("vllm_ir::rms_norm", rows=0, weight=1, eps=2, variance_size=3)
# fused_add_rms_norm(x, residual, weight, eps, variance_size) -> (hidden, x + residual)
ADD_NORM = NormOperator("vllm_ir::fused_add_rms_norm", rows=0, residual=1, weight=2, eps=3, variance_size=4)
# rms_norm_static_fp8_quant(hidden!, input, weight, scale, epsilon)
_QUANTISING_NORM = NormOperator(
    "_C::rms_norm_static_fp8_quant", rows="input", weight="weight", eps="epsilon", scale="scale", writes=True
)
# fused_add_rms_norm_static_fp8_quant(hidden!, input, residual!, weight, scale, epsilon)
_QUANTISING_ADD_NORM = NormOperator(
    "_C::fused_add_rms_norm_static_fp8_quant",
    rows="input",
    residual="residual",
    weight="weight",
    eps="epsilon",
    scale="scale",
    writes=True,
)
# These two have a scale for each token, or for each token and block of columns; `scale_ub` is one number.
# rms_norm_dynamic_per_token_quant(result!, input, weight, scale!, epsilon, scale_ub, residual!)
_PER_TOKEN_NORM = NormOperator(
    "_C::rms_norm_dynamic_per_token_quant",
    rows="input",
    residual="residual",
    weight="weight",
    eps="epsilon",
    made_scales=MadeScaleArguments(min_scale=LEAST_SCALE, upper_bound="scale_ub"),
    writes=True,
)
# rms_norm_per_block_quant(result!, input, weight, scale!, epsilon, scale_ub, residual!, group_size, is_scale_transposed)
_PER_GROUP_NORM = NormOperator(
    "_C::rms_norm_per_block_quant",
    rows="input",
    residual="residual",
    weight="weight",
    eps="epsilon",
    made_scales=MadeScaleArguments(
        group_size="group_size",
        min_scale=LEAST_SCALE,
        upper_bound="scale_ub",
        other_layout=("is_scale_transposed",),
    ),
    writes=True,
)

NORMS = (
    NORM,
    ADD_NORM,
    _QUANTISING_NORM,
    _QUANTISING_ADD_NORM,
    _PER_TOKEN_NORM,
    _PER_GROUP_NORM,
    RowWiseOperator("_C::rms_norm", reads=("input",), results=("result",)),
    RowWiseOperator("_C::fused_add_rms_norm", reads=("input", "residual")),
)
