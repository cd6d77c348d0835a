"""Quantisations of hidden states: by given scales, by a scale for each row, or by one scale that is computed from all rows.

The last kind is not row-wise. Half of the tokens would have another scale, and so other codes.
"""

from __future__ import annotations

from tw_compile.passes.operators import (
    MadeQuantOperator,
    MadeScaleArguments,
    OneScaleOperator,
    QuantOperator,
    RowWiseOperator,
)

LEAST_SCALE = 1 / (448 * 512)
"""The least scale of a token, and of a group of columns in a norm's result."""

QUANTISATIONS = (
    # static_scaled_fp8_quant(result!, input, scale, group_shape)
    QuantOperator("_C::static_scaled_fp8_quant", rows="input", scale="scale", group_shape="group_shape"),
    RowWiseOperator("_C::static_scaled_int8_quant", reads=("input",), results=("result",), scales=("scale",)),
    # dynamic_per_token_scaled_fp8_quant(result!, input, scale!, scale_ub)
    MadeQuantOperator(
        "_C::dynamic_per_token_scaled_fp8_quant",
        rows="input",
        made_scales=MadeScaleArguments(min_scale=LEAST_SCALE, upper_bound="scale_ub"),
    ),
    RowWiseOperator("_C::dynamic_scaled_int8_quant", reads=("input",), results=("result", "scale", "azp")),
    # A scale for each token and group of columns; stored row by row, or column by column.
    # per_token_group_fp8_quant(input, output_q!, output_s!, group_size, eps, fp8_min, fp8_max, scale_ue8m0,
    #     dummy_is_scale_transposed, dummy_is_tma_aligned)
    MadeQuantOperator(
        "_C::per_token_group_fp8_quant",
        rows="input",
        made_scales=MadeScaleArguments(
            group_size="group_size",
            min_amax="eps",
            power_of_two=("scale_ue8m0",),
            other_layout=("dummy_is_scale_transposed", "dummy_is_tma_aligned"),
            least=("fp8_min",),
            greatest=("fp8_max",),
        ),
    ),
    RowWiseOperator("_C::per_token_group_quant_int8", reads=("input",), results=("output_q", "output_s")),
    RowWiseOperator("vllm::triton_per_token_group_quant_fp8", reads=("x",), writes=False),
    # dynamic_scaled_fp8_quant(result!, input, scale!)
    OneScaleOperator("_C::dynamic_scaled_fp8_quant"),
)
