"""How GEMMs of few rows are cut into tiles whose depth is split, and where that is faster than whole depths.

The kernel (``kernels/gemm/split_k_mm.cu``) computes tiles of 128 rows on clusters of two or four SMs. Each SM of a cluster
multiplies a part of the depth. More SMs share the work than with tiles of whole depths (``joint_tiles.py``), but their sums
must be added. All tiles must run at once: a second wave would take as long as the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tw_compile.planning.joint_tiles import BOX, tiles_beside, tiling

TILE_ROWS = 128
PARTS = (2, 4)
"""SMs of a cluster."""
WIDTHS = (192, 160, 128, 64)
"""Columns of a tile that the kernel is compiled for."""
MOST_ROWS = 768
"""More rows were not measured."""
MOST_SHARE = 0.9
"""The depth is split if that is predicted to take less than this share of the time of whole depths. By runs with all tiles
forced, those sizes take up to 0.9 of it, and the others 0.995 to 1.06 (``test_split_k_tiles.py``)."""
_STAGE = 64
"""The depth that an SM loads at a time."""
_BASE_US, _FOUR_US, _SUM_US = 1.14, 1.87, 0.00783
"""What a call takes besides multiplying: in any case, for clusters of four, and for each column whose sums are added."""
_STAGE_US, _STAGE_COLUMN_US = 0.149, (0.00123, 0.00188)
"""A stage: in any case, and for each column, where one warpgroup multiplies and where two do."""
_SAME_ROWS_US, _MOST_AT_ONCE, _SAME_ROWS_POWER = 0.00772, 16, 0.4
"""What a stage takes more for each tile, or pair of tiles, beyond _MOST_AT_ONCE, over that power of the rows: all of them load
the same few rows at once, which lie in one place of the L2 cache."""
_TB_PER_S = 3.49
"""The rate at which matrices come from the device's memory."""
_WHOLE_BASE_US, _WHOLE_STAGE_US, _WHOLE_COLUMN_US = 1.45, 0.0203, 0.00225
"""A GEMM of whole depths: in any case, for each stage, and for each stage of a column that ``joint_tiles.py`` counts. All these
numbers are fitted to GEMMs of an H200 (``benchmarks/split-notes.md``)."""


@dataclass(frozen=True)
class SplitK:
    """``tiles`` tiles of ``width`` columns, each on a cluster of ``parts`` SMs. ``us``: how long they take, as predicted."""

    width: int
    parts: int
    tiles: int
    us: float


@lru_cache(maxsize=4096)
def split_k(rows: int, depth: int, columns: tuple[int, ...], sms: int) -> SplitK | None:
    """The fastest tiles for ``rows`` rows and matrices of ``columns`` columns; None where whole depths are as fast.

    ``rows`` is positive. None also for more than ``MOST_ROWS``.
    """
    if rows > MOST_ROWS:
        return None
    found = min(candidates(rows, depth, columns, sms), key=lambda tiles: tiles.us, default=None)
    return found if found is not None and found.us < MOST_SHARE * whole_us(rows, depth, columns, sms) else None


def candidates(rows: int, depth: int, columns: Sequence[int], sms: int) -> Iterator[SplitK]:
    """All tiles that run at once, one for each width and number of parts."""
    high = -(-rows // TILE_ROWS)
    for width in WIDTHS:
        tiles = high * tiles_beside(columns, width, BOX)
        for parts in PARTS:
            if tiles <= clusters(parts, sms) and depth >= parts * _STAGE:
                yield SplitK(width, parts, tiles, _us(rows, depth, sum(columns), width, parts, tiles))


def clusters(parts: int, sms: int) -> int:
    """How many clusters of ``parts`` SMs run at once at least.

    A cluster lies in one of up to eight groups of SMs, whose sizes differ from one GPU to the next, so some SMs are left over.
    """
    return sms // parts - (4 if parts > 2 else 0)


def whole_us(rows: int, depth: int, columns: tuple[int, ...], sms: int) -> float:
    """Microseconds of ``joint_mm.cu`` for few rows, at least what the device's memory takes."""
    tiles = tiling(rows, columns, sms // 2)
    pairs = tiles.whole + tiles.narrow + tiles.low
    stage = _WHOLE_STAGE_US + _WHOLE_COLUMN_US * tiles.time + _same_rows_us(rows, pairs)
    return _WHOLE_BASE_US + max(depth / _STAGE * stage, _loading_us(depth, sum(columns)))


def _us(rows: int, depth: int, columns: int, width: int, parts: int, tiles: int) -> float:
    high = 1 if rows <= TILE_ROWS // 2 else 2  # warpgroups that multiply
    stage = _STAGE_US + _STAGE_COLUMN_US[high - 1] * width + _same_rows_us(rows, tiles)
    busy = max(depth / _STAGE / parts * stage, _loading_us(depth, columns))
    return _BASE_US + busy + _SUM_US * width * high + (_FOUR_US if parts == 4 else 0.0)


def _same_rows_us(rows: int, tiles: int) -> float:
    return float(_SAME_ROWS_US * max(tiles - _MOST_AT_ONCE, 0) / rows**_SAME_ROWS_POWER)


def _loading_us(depth: int, columns: int) -> float:
    return 2e-6 * depth * columns / _TB_PER_S
