"""How the joint GEMM's tiles lie: every element has one, and the time is that of the busiest cluster."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tw_compile.planning import joint_tiles as module
from tw_compile.planning.joint_tiles import (
    BOX,
    MOST_JOINT,
    PAIR_ROWS,
    WIDTHS,
    Tiling,
    begins,
    of_width,
    tiles_beside,
    tiling,
)

SHAPES = {
    "rows": st.integers(1, 3000),
    "columns": st.lists(st.integers(1, 600).map(lambda blocks: 8 * blocks), min_size=1, max_size=MOST_JOINT).map(tuple),
    "clusters": st.integers(1, 80),
}


def pairs(tiles: Tiling) -> int:
    return tiles.whole + tiles.narrow + tiles.low


def busiest(tiles: Tiling, clusters: int) -> float:
    """As the kernel deals: one pair after the other, each to the next cluster."""
    low = module._LOW if tiles.multiple == tiles.width else module._LOW_OF_TWO
    times = [1.0] * tiles.whole + [module._NARROW] * tiles.narrow + [low] * tiles.low
    return max(sum(times[cluster::clusters]) for cluster in range(clusters))


@settings(max_examples=300, deadline=None)
@given(**SHAPES)
def test_the_busiest_cluster_is_that_of_all(rows: int, columns: tuple[int, ...], clusters: int) -> None:
    for width in WIDTHS:
        for tiles in of_width(rows, columns, clusters, width):
            assert tiles.pairs == pytest.approx(busiest(tiles, clusters))


@settings(max_examples=300, deadline=None)
@given(**SHAPES)
def test_pairs_cover_all_rows_and_columns(rows: int, columns: tuple[int, ...], clusters: int) -> None:
    """Each row of each tile of columns is in one pair; less than half a pair's rows are in vain."""
    for width in WIDTHS:
        for tiles in of_width(rows, columns, clusters, width):
            wide = tiles_beside(columns, width, tiles.multiple)
            *first, end = begins(columns, tiles.multiple)
            assert all(begin % tiles.multiple == 0 for begin in first) and tiles.multiple in (width, BOX)
            assert all(
                0 <= until - begin - one < tiles.multiple
                for begin, until, one in zip(first, [*first[1:], end], columns, strict=True)
            )
            assert end <= wide * width < end + width
            high, odd = divmod(2 * tiles.whole + tiles.narrow, 2 * wide)
            assert odd == 0 and tiles.narrow % 2 == 0 and min(tiles.whole, tiles.narrow, tiles.low) >= 0
            assert tiles.low in (0, wide)
            covered = PAIR_ROWS * high + PAIR_ROWS // 2 * (tiles.low > 0)
            assert rows <= covered < rows + PAIR_ROWS // 2


@settings(max_examples=300, deadline=None)
@given(**SHAPES)
def test_narrow_pairs_are_no_more_than_those_of_two_waves(rows: int, columns: tuple[int, ...], clusters: int) -> None:
    """One of no narrow ones, one of those that do not fill a wave, one of the wave before, too; none of them twice."""
    for width, multiple in product(WIDTHS, (0, BOX)):
        found = [one for one in of_width(rows, columns, clusters, width) if one.multiple == (multiple or width)]
        if len(columns) == 1 and multiple:
            assert not found, "one matrix begins at 0 in any case"
            continue
        plain, *others = found
        assert plain.narrow == 0
        assert all(one.whole % clusters == 0 for one in others)
        assert all(0 < one.narrow < 4 * clusters for one in others)
        assert all(width // 2 % min(width // 2, one.multiple) == 0 for one in others), "a narrow tile has whole boxes"
        assert len({one.whole for one in found}) == len(found)


@settings(max_examples=300, deadline=None)
@given(**SHAPES)
def test_the_fastest_of_all_widths_is_chosen(rows: int, columns: tuple[int, ...], clusters: int) -> None:
    chosen = tiling(rows, columns, clusters)
    found = [one for width in WIDTHS for one in of_width(rows, columns, clusters, width)]
    assert chosen in found and chosen.time == min(one.time for one in found)
    assert all(pairs(chosen) <= pairs(one) for one in found if one.time == chosen.time)


@pytest.mark.parametrize(
    ("rows", "columns", "clusters", "expected"),
    [
        (1024, (7168, 7168), 64, Tiling(224, 224, whole=256, narrow=0, low=0, pairs=4.0)),
        (1024, (2048, 256, 256), 63, Tiling(192, BOX, whole=56, narrow=0, low=0, pairs=1.0)),
        (1024, (2048, 512, 512), 66, Tiling(192, BOX, whole=64, narrow=0, low=0, pairs=1.0)),
        (1536, (2048, 512, 512), 66, Tiling(192, BOX, whole=66, narrow=60, low=0, pairs=1.62)),
        (512, (4096, 512, 512), 66, Tiling(160, BOX, whole=64, narrow=0, low=0, pairs=1.0)),
        (1536, (1792, 256, 256), 66, Tiling(224, BOX, whole=66, narrow=0, low=0, pairs=1.0)),
        (512, (8192,), 66, Tiling(256, 256, whole=64, narrow=0, low=0, pairs=1.0)),
        (1024, (4096,), 63, Tiling(192, 192, whole=63, narrow=50, low=0, pairs=1.62)),
        (300, (512,), 2, Tiling(256, 256, whole=2, narrow=0, low=2, pairs=1.55)),
    ],
    ids=[
        "four full waves",
        "one wave of three matrices",
        "one wave if a tile has columns of two matrices",
        "narrow pairs of two matrices",
        "one wave of the smallest tiles",
        "seven boxes",
        "one wave",
        "a wave and some narrow pairs",
        "low pairs",
    ],
)
def test_known_shapes(rows: int, columns: tuple[int, ...], clusters: int, expected: Tiling) -> None:
    found = tiling(rows, columns, clusters)
    assert found.pairs == pytest.approx(expected.pairs)
    assert replace(found, pairs=expected.pairs) == expected


@pytest.mark.parametrize("rows", [256, 512, 1024])
@pytest.mark.parametrize("more", [1, 64, 128])
def test_rows_behind_the_last_256_are_low_pairs_where_they_are_128_or_fewer(rows: int, more: int) -> None:
    without, with_low, with_pair = (tiling(count, (512,), 66) for count in (rows, rows + more, rows + 129))
    assert without.low == with_pair.low == 0 < with_low.low
    for width in WIDTHS:
        low = of_width(rows + more, (512, 8), 66, width)[0]
        whole = of_width(rows, (512, 8), 66, width)[0]
        assert (low.whole, low.low) == (whole.whole, whole.whole // (rows // PAIR_ROWS))


@pytest.mark.parametrize("rows", [1, 128])
def test_so_few_rows_are_low_pairs_alone(rows: int) -> None:
    found = tiling(rows, (1000,), 66)
    assert (found.whole, found.narrow) == (0, 0) and found.low == -(-1000 // found.width)
    assert tiling(129, (1000,), 66).low == 0


def test_a_matrix_has_tiles_of_its_own_or_shares_them() -> None:
    assert of_width(256, (256, 256), 66, 256)[0].whole == of_width(256, (512,), 66, 256)[0].whole == 2
    assert {one.multiple: one.whole for one in of_width(256, (288, 224), 1, 256) if not one.narrow} == {256: 3, BOX: 2}
    assert {one.multiple: one.whole for one in of_width(256, (264, 248), 1, 256) if not one.narrow} == {256: 3, BOX: 3}
