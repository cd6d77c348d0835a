"""How the joint GEMM's tiles lie: every element has one, and the time is that of the busiest cluster."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tw_compile.planning import joint_tiles as module
from tw_compile.planning.joint_tiles import MOST_JOINT, PAIR_ROWS, WIDTHS, Tiling, of_width, tiling

SHAPES = {
    "rows": st.integers(1, 3000),
    "columns": st.lists(st.integers(1, 600).map(lambda blocks: 8 * blocks), min_size=1, max_size=MOST_JOINT).map(tuple),
    "clusters": st.integers(1, 80),
}


def weight(tiles: Tiling) -> float:
    """What is least for the tiling that is chosen."""
    return tiles.pairs * (tiles.width + module._EDGE)


def busiest(tiles: Tiling, clusters: int) -> float:
    """As the kernel deals: one pair after the other, each to the next cluster."""
    times = [1.0] * tiles.whole + [module._NARROW] * tiles.narrow + [module._LOW] * tiles.low
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
        in_tiles = [len(range(0, one, width)) for one in columns]
        for tiles in of_width(rows, columns, clusters, width):
            high, odd = divmod(2 * tiles.whole + tiles.narrow, 2 * sum(in_tiles))
            assert odd == 0 and tiles.narrow % 2 == 0 and min(tiles.whole, tiles.narrow, tiles.low) >= 0
            assert tiles.low in (0, sum(in_tiles))
            covered = PAIR_ROWS * high + PAIR_ROWS // 2 * (tiles.low > 0)
            assert rows <= covered < rows + PAIR_ROWS // 2


@settings(max_examples=300, deadline=None)
@given(**SHAPES)
def test_narrow_pairs_are_no_more_than_those_of_two_waves(rows: int, columns: tuple[int, ...], clusters: int) -> None:
    """One of no narrow ones, one of those that do not fill a wave, one of the wave before, too; none of them twice."""
    for width in WIDTHS:
        plain, *others = of_width(rows, columns, clusters, width)
        assert plain.narrow == 0
        assert all(one.whole % clusters == 0 for one in others)
        assert all(0 < one.narrow < 4 * clusters for one in others)
        assert len({one.whole for one in (plain, *others)}) == 1 + len(others)


@settings(max_examples=300, deadline=None)
@given(**SHAPES)
def test_the_fastest_of_all_widths_is_chosen(rows: int, columns: tuple[int, ...], clusters: int) -> None:
    chosen = tiling(rows, columns, clusters)
    found = [one for width in WIDTHS for one in of_width(rows, columns, clusters, width)]
    assert chosen in found and weight(chosen) == min(map(weight, found))


@pytest.mark.parametrize(
    ("rows", "columns", "clusters", "expected"),
    [
        (1024, (7168, 7168), 64, Tiling(224, whole=256, narrow=0, low=0, pairs=4.0)),
        (1024, (2048, 256, 256), 63, Tiling(192, whole=60, narrow=0, low=0, pairs=1.0)),
        (512, (8192,), 66, Tiling(256, whole=64, narrow=0, low=0, pairs=1.0)),
        (1024, (4096,), 63, Tiling(192, whole=63, narrow=50, low=0, pairs=1.6)),
        (300, (512,), 2, Tiling(256, whole=2, narrow=0, low=2, pairs=1.65)),
    ],
    ids=["four full waves", "one wave of three matrices", "one wave", "a wave and some narrow pairs", "low pairs"],
)
def test_known_shapes(rows: int, columns: tuple[int, ...], clusters: int, expected: Tiling) -> None:
    found = tiling(rows, columns, clusters)
    assert found.pairs == pytest.approx(expected.pairs)
    assert (found.width, found.whole, found.narrow, found.low) == (
        expected.width,
        expected.whole,
        expected.narrow,
        expected.low,
    )


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


def test_a_matrix_has_tiles_of_its_own() -> None:
    assert of_width(256, (256, 256), 66, 256)[0].whole == of_width(256, (512,), 66, 256)[0].whole == 2
    assert of_width(256, (264, 248), 66, 256)[0].whole == 3
