"""How our joint GEMM is cut into tiles: how wide they are, and how many are narrow, so that the last wave is full.

The kernel (``kernels/gemm/joint_mm.cu``) computes pairs of tiles over each other, of 256 rows, on clusters of two SMs. Whole
pairs come first. Then come narrow pairs, of half of the columns. Low pairs come last: they have the last rows, where these are
128 or fewer. It is fixed which cluster computes what, so the time can be counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

WIDTHS = (256, 224, 192)
"""Columns of a tile that the kernel is compiled for, in multiples of 32."""
PAIR_ROWS = 256
MOST_JOINT = 3
"""The most matrices that the kernel takes."""
_EDGE = 16
"""A tile costs as much as if it were this many columns wider."""
_NARROW, _LOW = 0.6, 0.65
"""The time of a narrow and of a low pair, as a share of that of a whole pair."""


@dataclass(frozen=True)
class Tiling:
    """Pairs of tiles, ``width`` columns each, on clusters of two SMs.

    Attributes:
        whole: Pairs that are neither narrow nor low.
        narrow: Pairs of half of the columns.
        low: Pairs of the last rows, where these are 128 or fewer.
        pairs: The time of the busiest cluster, in whole pairs.
    """

    width: int
    whole: int
    narrow: int
    low: int
    pairs: float


@lru_cache(maxsize=4096)
def tiling(rows: int, columns: tuple[int, ...], clusters: int) -> Tiling:
    """The fastest tiling for ``rows`` rows and matrices of ``columns`` columns; ``rows`` and ``clusters`` are positive."""
    tilings = (candidate for width in WIDTHS for candidate in of_width(rows, columns, clusters, width))
    return min(tilings, key=lambda candidate: candidate.pairs * (candidate.width + _EDGE))


def of_width(rows: int, columns: Sequence[int], clusters: int, width: int) -> list[Tiling]:
    """Tilings with tiles of ``width`` columns that differ in how many pairs are narrow.

    Either no pair is narrow, or all pairs that do not fill a wave, or the pairs of the last full wave, too.
    """
    wide = sum(-(-matrix // width) for matrix in columns)
    high = (rows + PAIR_ROWS // 2 - 1) // PAIR_ROWS
    pairs, low = high * wide, wide if rows > high * PAIR_ROWS else 0
    full = pairs // clusters * clusters
    tilings = []
    for whole in dict.fromkeys((pairs, full, max(full - clusters, 0))):
        narrow = 2 * (pairs - whole)
        # Longer pairs come first. Whole pairs fill waves, or all other pairs are low. So the busiest cluster is the first one,
        # or the one with the first low pair.
        busiest = max(_pairs(cluster, clusters, whole, narrow, low) for cluster in (0, (whole + narrow) % clusters))
        tilings.append(Tiling(width, whole, narrow, low, busiest))
    return tilings


def _pairs(cluster: int, clusters: int, whole: int, narrow: int, low: int) -> float:
    """What ``cluster`` computes, in whole pairs, if all clusters take the pairs in turn."""
    until_whole, until_narrow, until_low = (
        max(-((cluster - count) // clusters), 0) for count in (whole, whole + narrow, whole + narrow + low)
    )
    return until_whole + (until_narrow - until_whole) * _NARROW + (until_low - until_narrow) * _LOW
