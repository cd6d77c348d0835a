"""The split-K GEMM, as the host launches it, computes each product to the bit, for all kinds of rows, columns and depths."""

from __future__ import annotations

import pytest

from emulator.split_k import check
from tw_compile.planning.joint_tiles import BOX
from tw_compile.planning.split_k_tiles import PARTS, WIDTHS

DEPTH = 320
"""Five stages, so that parts differ."""


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("rows", [1, 16, 64, 65, 128, 129, 192, 193, 300])
def test_any_number_of_rows(rows: int, parts: int) -> None:
    check(rows, [128], DEPTH, seed=rows, width=128, parts=parts)


@pytest.mark.parametrize("columns", [[8], [248], [256], [264], [520, 8], [104, 256, 96], [24, 8, 40]])
def test_any_multiple_of_eight_columns(columns: list[int]) -> None:
    check(72, columns, DEPTH, seed=sum(columns), width=64, parts=2)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_tile_has_columns_of_two_matrices(width: int, parts: int, biased: bool) -> None:
    columns = (width + BOX, width - 8, 2 * BOX + 16)
    check(70, columns, DEPTH, seed=width, biased=biased, width=width, parts=parts)


@pytest.mark.parametrize("depth", [256, 448, 2048])
def test_any_number_of_stages_from_one_for_each_part_on(depth: int) -> None:
    """More than the ring has, too."""
    check(130, [128, 64], depth, seed=depth, width=128, parts=4)
