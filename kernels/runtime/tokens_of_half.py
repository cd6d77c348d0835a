"""The number of tokens in one half of a symbolic number of tokens, computed when the graph runs.

    tokens_of_half(rows, tokens, half, low, high, numerator, denominator, multiple, constant) -> number

Half 0 has ``tokens * numerator // denominator`` rounded down to ``multiple``, plus ``constant``; half 1 has the rest. ``rows``
[tokens, ...] is not read. It is an operand because Inductor takes an operator's device from its operands.

The compiler only knows the bounds of the result, as for a number that ``item()`` returns (an "unbacked" symbol of PyTorch's
``ShapeEnv``). If the halves of ``s`` tokens were expressions of ``s``, the compiler would ask questions such as
``s - s//2 > 1``. It would answer them for the current count, and then assume the answer for every graph that shares the symbol.
About unbacked symbols it can assume only what the bounds prove. The bounds hold for ``low`` to ``high`` tokens; other counts
are a ``ValueError``.
"""

from __future__ import annotations

from typing import Any

import torch

from tw_compile import compat
from tw_compile.kernels.runtime.operator import define
from tw_compile.planning.halves import FirstHalf, tokens_of_first_half


def arguments_of(first: FirstHalf) -> tuple[int, ...]:
    """The operator's arguments after ``half``."""
    return first.low, first.high, first.numerator, first.denominator, first.multiple, first.constant


def _tokens_of_half(
    rows: torch.Tensor,
    tokens: int,
    half: int,
    low: int,
    high: int,
    numerator: int,
    denominator: int,
    multiple: int,
    constant: int,
) -> int:
    if not low <= tokens <= high:
        raise ValueError(f"tokens: expected {low} to {high}, for which the graph was split, got {tokens}")
    first = tokens_of_first_half(tokens, numerator, denominator, multiple, constant)
    return tokens - first if half else first


def _tokens_of_half_fake(
    rows: torch.Tensor, tokens: Any, half: int, low: int, high: int, *formula: int
) -> int | torch.SymInt:
    if isinstance(tokens, int):
        return _tokens_of_half(rows, tokens, half, low, high, *formula)
    halves = FirstHalf(low, high, *formula)
    example = min(compat.example_of(tokens, high), high)  # other counts than this graph's may share the symbol
    return compat.new_size(rows, *halves.bounds[half], example - halves(example) if half else halves(example))


tokens_of_half = define(
    "tokens_of_half(Tensor rows, SymInt tokens, int half, int low, int high, "
    "int numerator, int denominator, int multiple, int constant) -> SymInt",
    _tokens_of_half,
    _tokens_of_half_fake,
)
