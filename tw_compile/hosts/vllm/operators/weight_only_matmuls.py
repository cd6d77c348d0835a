"""Matmuls of unquantised rows by weights of 4 or 8 bits: Marlin, Machete, AWQ, GPTQ; and small matmuls with their own kernels.

Each matmul computes a row of the result from the input's same row and the weights. A half may split the depth otherwise, so its
result is equal to within the rounding of that.
"""

from __future__ import annotations

from tw_compile.passes.operators import RowWiseOperator

WEIGHT_ONLY_MATMULS = (
    # marlin_gemm(a, c_or_none, b_q_weight, ..., a_scales, ..., workspace, ..., size_m, ...): the workspace holds locks. A call
    # leaves them as it found them, and calls on one stream never use the workspace at the same time.
    RowWiseOperator(
        "_C::marlin_gemm", reads=("a",), scales=("a_scales",), counts=("size_m",), absent=("c_or_none",), writes=False
    ),
    RowWiseOperator("_C::machete_mm", reads=("A",), scales=("token_scales",), writes=False),
    RowWiseOperator("_C::cutlass_w4a8_mm", reads=("A",), scales=("token_scales",), writes=False),
    RowWiseOperator("_C::awq_gemm", reads=("_in_feats",), writes=False),
    RowWiseOperator("_C::gptq_gemm", reads=("a",), writes=False),
    RowWiseOperator("_C::allspark_w8a16_gemm", reads=("a",), writes=False),
    RowWiseOperator("vllm::apply_bnb_4bit", reads=("x",), results=("out",)),
    # Unquantised matmuls for DeepSeek's widths: routers and the latent projection.
    RowWiseOperator("_C::dsv3_fused_a_gemm", reads=("mat_a",), results=("output",)),
    RowWiseOperator("_moe_C::dsv3_router_gemm", reads=("mat_a",), results=("output",)),
    RowWiseOperator("_C::fp32_router_gemm", reads=("mat_a",), results=("output",)),
    RowWiseOperator("vllm::fp32_router_gemm_dispatch", reads=("x",), writes=False),
    RowWiseOperator("vllm::min_latency_fused_qkv_a_proj", reads=("input_",), writes=False),
)
