"""Activations, with and without a product of two halves of the columns, and with a quantisation behind them."""

from __future__ import annotations

from tw_compile.passes.operators import RowWiseOperator


def _gated(name: str) -> RowWiseOperator:
    return RowWiseOperator(f"_C::{name}", reads=("input",), results=("result",))


def _into_out(name: str) -> RowWiseOperator:
    return RowWiseOperator(f"_C::{name}", reads=("input",), results=("out",))


ACTIVATIONS = (
    _gated("silu_and_mul"),
    _gated("silu_and_mul_with_clamp"),
    *map(
        _into_out,
        (
            "mul_and_silu",
            "gelu_and_mul",
            "gelu_tanh_and_mul",
            "fatrelu_and_mul",
            "swigluoai_and_mul",
            "gelu_new",
            "gelu_fast",
            "gelu_quick",
        ),
    ),
    _gated("silu_and_mul_quant"),  # quantises by one scale, which it is given
    RowWiseOperator("_C::silu_and_mul_per_block_quant", reads=("input",), results=("out", "scales")),
)
