"""The joint GEMM, as the host launches it, computes each product to the bit, for all kinds of rows and columns."""

from __future__ import annotations

import pytest

from emulator.joint import check, check_gated, narrow_behind
from tw_compile.planning.joint_tiles import BOX, WIDTHS, tiling

DEPTH = 192
"""Three stages' worth; the ring has four and more."""


@pytest.mark.parametrize("rows", [1, 64, 65, 128, 129, 256, 300, 400, 520])
def test_any_number_of_rows(rows: int) -> None:
    check(rows, [512], DEPTH, seed=rows)


@pytest.mark.parametrize("columns", [[8], [248], [256], [264], [520, 8], [104, 256, 96]])
def test_any_multiple_of_eight_columns(columns: list[int]) -> None:
    check(200, columns, DEPTH, seed=sum(columns))


@pytest.mark.parametrize("whole", range(5))
@pytest.mark.parametrize("width", WIDTHS)
def test_pairs_are_whole_or_narrow_or_low(width: int, whole: int) -> None:
    rows, columns = 300, (width, 2 * width - 8, 40)
    check(rows, columns, DEPTH, seed=whole, tiles=narrow_behind(whole, rows, columns, width))


TWO = {256: (288, 256), 224: (256, 200), 192: (224, 160, 200), 160: (64, 32, 352)}
"""By width: matrices of which tiles have columns of two, and once of three."""


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("width", "whole"),
    [(width, whole) for width in WIDTHS for whole in (0, 2, 99) if whole == 99 or width % (2 * BOX) == 0],
)
def test_a_tile_has_columns_of_two_matrices(width: int, whole: int, biased: bool) -> None:
    rows, columns = 300, TWO[width]
    check(rows, columns, DEPTH, seed=whole, biased=biased, tiles=narrow_behind(whole, rows, columns, width, BOX))


@pytest.mark.parametrize("whole", range(0, 5, 2))
@pytest.mark.parametrize("width", WIDTHS)
def test_biases_are_added_to_pairs_of_all_kinds(width: int, whole: int) -> None:
    rows, columns = 300, (width, 2 * width - 8, 40)
    check(rows, columns, DEPTH, seed=whole, biased=True, tiles=narrow_behind(whole, rows, columns, width))


def test_the_ring_goes_around_more_than_once() -> None:
    check(130, [256, 256], 704, seed=1)


def test_more_pairs_over_each_other_than_in_a_band() -> None:
    check(9 * 256 + 100, [192, 200], 64, seed=2, sms=6, tiles=narrow_behind(15, 9 * 256 + 100, (192, 200), 192))


@pytest.mark.parametrize("sms", [2, 5, 12])
def test_any_number_of_sms(sms: int) -> None:
    check(500, [384, 256], 64, seed=sms, sms=sms, resident=2)


def test_sms_are_left() -> None:
    check(500, [384, 256], 64, seed=3, sms=8, reserved_sms=3)
    assert tiling(500, (384, 256), 2) != tiling(500, (384, 256), 4)


@pytest.mark.parametrize("rows", [1, 128, 129, 300, 400])
def test_gated_products_of_any_number_of_rows(rows: int) -> None:
    check_gated(rows, 264, DEPTH, seed=rows)


@pytest.mark.parametrize("whole", range(3))
@pytest.mark.parametrize("width", WIDTHS)
def test_gated_pairs_are_whole_or_narrow_or_low(width: int, whole: int) -> None:
    check_gated(300, width - 8, DEPTH, seed=whole, tiles=narrow_behind(whole, 300, (2 * width - 16,), width))
