"""How our plain GEMM's tiles lie: how wide they are, and how many are cut so that the last wave is full.

The kernel (``joint_mm.cu``) computes pairs of tiles over each other, 256 rows, on clusters of two SMs, whole ones first, then
cut ones of 128 rows. Rows beyond the last 256 are cut pairs where there are 128 or fewer. Which cluster computes what is fixed,
so how long it takes can be counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

WIDTHS = (256, 224, 192)
"""Columns of a tile that the kernel is compiled for, in multiples of 32."""
PAIR_ROWS = 256
_FIXED_COLUMNS = 10
"""A tile costs as much as if it were so many columns wider: its first loads and its stores."""
_CUT = 0.55
"""The time of a cut pair of that of a whole one."""


@dataclass(frozen=True)
class Tiling:
    """Pairs of tiles, ``width`` columns each, on so many clusters of two SMs.

    Attributes:
        whole: Pairs that are not cut.
        cut: Halves of pairs that are.
        columns: What the busiest cluster computes, in columns of tiles of 256 rows, with what a tile costs beyond its columns.
    """

    width: int
    whole: int
    cut: int
    columns: float


@lru_cache(maxsize=4096)
def tiling(rows: int, columns: Sequence[int], clusters: int) -> Tiling:
    """The fastest for ``rows`` rows and matrices of ``columns`` columns, a tuple; ``rows`` and ``clusters`` are positive."""
    return min(
        (one for width in WIDTHS for one in _of_width(rows, columns, clusters, width)), key=lambda one: one.columns
    )


def _of_width(rows: int, columns: Sequence[int], clusters: int, width: int) -> list[Tiling]:
    """With nothing cut, and with all cut that do not fill a wave, or the last one."""
    wide = sum(-(-one // width) for one in columns)
    high = (rows + PAIR_ROWS // 2 - 1) // PAIR_ROWS
    pairs, rest = high * wide, wide if rows > high * PAIR_ROWS else 0
    full = pairs // clusters * clusters
    found = []
    for whole in dict.fromkeys((pairs, full, max(full - clusters, 0))):
        cut = 2 * (pairs - whole) + rest
        busiest = max(
            _columns(cluster, whole, cut, clusters, width) for cluster in {0, (whole - 1) % clusters, whole % clusters}
        )
        found.append(Tiling(width, whole, cut, busiest))
    return found


def _columns(cluster: int, whole: int, cut: int, clusters: int, width: int) -> float:
    """What ``cluster`` computes of pairs that clusters take in turns."""
    own_whole = -((cluster - whole) // clusters) if whole > cluster else 0
    own = -((cluster - whole - cut) // clusters) if whole + cut > cluster else 0
    return (own_whole + (own - own_whole) * _CUT) * (width + _FIXED_COLUMNS)
