"""Matmuls of quantised rows by quantised weights. Each row has a scale of its own, or all rows share one.

Each matmul computes a row of the result from the input's same row and the weights. As with cuBLAS, the number of rows may
decide how the depth is split over CTAs. So a half has the same result to within rounding. (``aten._scaled_mm`` has a rule of
its own.)
"""

from __future__ import annotations

from tw_compile.passes.operators import RowWiseOperator

SCALED_MATMULS = (
    # cutlass_scaled_mm(out!, a, b, a_scales, b_scales, bias): float8 or int8, scales by row or by row and block.
    RowWiseOperator("_C::cutlass_scaled_mm", reads=("a",), results=("out",), scales=("a_scales",)),
    # cutlass_scaled_mm_azp(out!, a, b, a_scales, b_scales, azp_adj, azp, bias): azp is None, or the zero of each row.
    RowWiseOperator("_C::cutlass_scaled_mm_azp", reads=("a",), results=("out",), scales=("a_scales", "azp")),
    RowWiseOperator("vllm::w8a8_triton_block_scaled_mm_func", reads=("qx", "x_scale"), writes=False),
    # fp8_gemm_nt_op(q_input, input_scale, weight, weight_scale, output!, ...) is DeepGEMM's.
    RowWiseOperator("vllm::fp8_gemm_nt_op", reads=("q_input", "input_scale"), results=("output",)),
    # These two quantise their rows themselves, by token and group of columns. The second chooses one of two kernels by the
    # number of rows.
    RowWiseOperator("vllm::flashinfer_fp8_blockscale_gemm", reads=("input",), writes=False),
    RowWiseOperator("vllm::dynamic_flashinfer_deepgemm_blockscale_gemm", reads=("input",), writes=False),
)
