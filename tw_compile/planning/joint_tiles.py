"""How the tiles of our GEMM lie: how wide they are, and how many are narrow, so that the last wave is full.

The kernel (``kernels/gemm/joint_mm.cu``) computes pairs of tiles over each other, 256 rows, on clusters of two SMs: whole ones
first, then narrow ones of half of the columns, then low ones, of the last rows where these are 128 or fewer. Which cluster
computes what is fixed, so how long it takes can be counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

WIDTHS = (256, 224, 192)
"""Columns of a tile that the kernel is compiled for, in multiples of 32."""
PAIR_ROWS = 256
MOST_JOINT = 3
"""Matrices that the kernel takes."""
_EDGE = 16
"""A tile costs as much as if it were so many columns wider."""
_NARROW, _LOW = 0.6, 0.65
"""Times of such pairs of that of a whole one."""


@dataclass(frozen=True)
class Tiling:
    """Pairs of tiles, ``width`` columns each, on clusters of two SMs.

    Attributes:
        whole: Pairs that are neither narrow nor low.
        narrow: Pairs that are half of one.
        low: Pairs of the last rows.
        pairs: The time of the busiest cluster, in whole pairs.
    """

    width: int
    whole: int
    narrow: int
    low: int
    pairs: float


@lru_cache(maxsize=4096)
def tiling(rows: int, columns: tuple[int, ...], clusters: int) -> Tiling:
    """The fastest for ``rows`` rows and matrices of ``columns`` columns; ``rows`` and ``clusters`` are positive."""
    tilings = (candidate for width in WIDTHS for candidate in of_width(rows, columns, clusters, width))
    return min(tilings, key=lambda candidate: candidate.pairs * (candidate.width + _EDGE))


def of_width(rows: int, columns: Sequence[int], clusters: int, width: int) -> list[Tiling]:
    """With no pair narrow, with all that do not fill a wave, and with those of the last full wave, too."""
    wide = sum(-(-matrix // width) for matrix in columns)
    high = (rows + PAIR_ROWS // 2 - 1) // PAIR_ROWS
    pairs, low = high * wide, wide if rows > high * PAIR_ROWS else 0
    full = pairs // clusters * clusters
    tilings = []
    for whole in dict.fromkeys((pairs, full, max(full - clusters, 0))):
        narrow = 2 * (pairs - whole)
        # Longer pairs come first; whole ones fill waves, or all others are low: it is the first, or has the first low one.
        busiest = max(_pairs(cluster, clusters, whole, narrow, low) for cluster in (0, (whole + narrow) % clusters))
        tilings.append(Tiling(width, whole, narrow, low, busiest))
    return tilings


def _pairs(cluster: int, clusters: int, whole: int, narrow: int, low: int) -> float:
    """What ``cluster`` computes of pairs that all take in turns."""
    until_whole, until_narrow, until_low = (
        max(-((cluster - count) // clusters), 0) for count in (whole, whole + narrow, whole + narrow + low)
    )
    return until_whole + (until_narrow - until_whole) * _NARROW + (until_low - until_narrow) * _LOW
