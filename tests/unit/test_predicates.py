"""Questions about nodes: what is a cast, a constant, the same values, the default layout."""

from __future__ import annotations

import pytest
import torch
from graph_builder import GraphBuilder, aten

from tw_compile.graph.predicates import constant, has_default_strides, is_cast, views_and_casts_of


def test_a_copy_that_changes_more_than_the_dtype_is_no_cast() -> None:
    b = GraphBuilder()
    x = b.input(2, 3)
    assert is_cast(b.call(aten._to_copy.default, x, dtype=torch.bfloat16))
    assert not is_cast(b.call(aten._to_copy.default, x, dtype=torch.bfloat16, device="meta"))


def test_the_same_values_do_not_pass_a_rounding() -> None:
    b = GraphBuilder()
    x = b.input(2, 3)
    flat, rounded, wide = b.view(x, 6), b.cast(x, torch.bfloat16), b.cast(x, torch.float64)
    assert set(views_and_casts_of(x)) == {x, flat, wide} and rounded in x.users


@pytest.mark.parametrize(
    ("shape", "number", "dtype", "expected"),
    [
        ([], 2, torch.float32, 2.0),
        ([1], 2, torch.int64, 2.0),
        ([], 1.5, torch.float32, 1.5),
        ([], 1.5, torch.int64, None),
        ([2], 2, torch.float32, None),
    ],
)
def test_a_filled_tensor_is_a_constant_if_it_is_that_one_number(
    shape: list[int], number: float, dtype: torch.dtype, expected: float | None
) -> None:
    b = GraphBuilder()
    assert constant(b.call(aten.full.default, shape, number, dtype=dtype)) == expected


def test_a_truth_value_is_no_number() -> None:
    assert constant(True) is None and constant(1) == 1.0


@pytest.mark.parametrize(
    ("stride", "expected"), [((3, 7, 1), True), ((3, 3, 1), True), ((6, 3, 1), False), ((1, 1, 2), False)]
)
def test_strides_of_a_dim_of_one_do_not_matter(stride: tuple[int, ...], expected: bool) -> None:
    assert has_default_strides(torch.empty_strided((2, 1, 3), stride)) == expected
