"""How our joint GEMM is cut into tiles: how wide they are, and how many are narrow, so that the last wave is full.

The kernel (``kernels/gemm/joint_mm.cu``) computes pairs of tiles over each other, of 256 rows, on clusters of two SMs. Whole
pairs come first. Then come narrow pairs, of half of the columns. Low pairs come last: they have the last rows, where these are
128 or fewer. All matrices' columns lie beside each other, and a tile may have columns of two matrices or more. It is fixed
which cluster computes what, so the time can be counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

WIDTHS = (256, 224, 192, 160)
"""Columns of a tile that the kernel is compiled for, in multiples of ``BOX``."""
BOX = 32
"""The fewest columns that are loaded together."""
PAIR_ROWS = 256
MOST_JOINT = 3
"""The most matrices that the kernel takes."""
_EDGE, _FIRST = 20, 4
"""A cluster's first _FIRST pairs cost as much as if their tiles were _EDGE columns wider. A GPU with more to do is at its power
limit. Then it gains from each pause, and edges cost nothing."""
_NARROW, _LOW, _LOW_OF_TWO = 0.62, 0.55, 0.65
"""The time of a narrow and of a low pair, as a share of that of a whole pair. The last number is for low pairs whose tiles may
have columns of two matrices, as more boxes are loaded for them. All these numbers are fitted to GEMMs of an H200
(``benchmarks/split-notes.md``, "GEMMs of one input")."""


@dataclass(frozen=True)
class Tiling:
    """Pairs of tiles, ``width`` columns each, on clusters of two SMs.

    Attributes:
        multiple: Each matrix begins at a multiple of so many columns: of ``width``, so that a tile has columns of one matrix,
            or of ``BOX``.
        whole: Pairs that are neither narrow nor low.
        narrow: Pairs of half of the columns.
        low: Pairs of the last rows, where these are 128 or fewer.
        pairs: The time of the busiest cluster, in whole pairs.
    """

    width: int
    multiple: int
    whole: int
    narrow: int
    low: int
    pairs: float

    @property
    def first(self) -> float:
        """Those of ``pairs`` that are computed before the GPU is at its power limit."""
        return min(self.pairs, _FIRST)

    @property
    def time(self) -> float:
        """The busiest cluster's time, in columns of whole tiles."""
        return self.pairs * self.width + self.first * _EDGE


def begins(columns: Iterable[int], multiple: int) -> list[int]:
    """Where matrices of ``columns`` columns begin that lie beside each other, and where they end: multiples of ``multiple``."""
    return list(accumulate((-(-one // multiple) * multiple for one in columns), initial=0))


def tiles_beside(columns: Iterable[int], width: int, multiple: int) -> int:
    """How many tiles of ``width`` columns lie beside each other."""
    return -(-begins(columns, multiple)[-1] // width)


@lru_cache(maxsize=4096)
def tiling(rows: int, columns: tuple[int, ...], clusters: int) -> Tiling:
    """The fastest tiling for ``rows`` rows and matrices of ``columns`` columns; ``rows`` and ``clusters`` are positive.

    Of several that are as fast it is the one with the fewest pairs. Fewer pairs take less of the memory's rate, and less power.
    """
    tilings = (candidate for width in WIDTHS for candidate in of_width(rows, columns, clusters, width))
    return min(tilings, key=lambda tiles: (tiles.time, tiles.whole + tiles.narrow + tiles.low))


def of_width(rows: int, columns: Sequence[int], clusters: int, width: int) -> list[Tiling]:
    """Tilings with tiles of ``width`` columns. They differ in where matrices begin, and in how many pairs are narrow.

    Either no pair is narrow, or all pairs that do not fill a wave, or the pairs of the last full wave, too. Narrow tiles have
    whole boxes.
    """
    tilings = []
    for multiple in dict.fromkeys((width, BOX)) if len(columns) > 1 else (width,):
        wide = tiles_beside(columns, width, multiple)
        high = (rows + PAIR_ROWS // 2 - 1) // PAIR_ROWS
        pairs, low = high * wide, wide if rows > high * PAIR_ROWS else 0
        full = pairs // clusters * clusters
        can_be_narrow = multiple == width or width % (2 * BOX) == 0
        for whole in dict.fromkeys((pairs, full, max(full - clusters, 0)) if can_be_narrow else (pairs,)):
            narrow = 2 * (pairs - whole)
            # Whole pairs come first. They fill waves, or all other pairs are low. So the busiest cluster is the first
            # one, or the one with the first low pair.
            weights = (1.0, _NARROW, _LOW if multiple == width else _LOW_OF_TWO)
            ends = list(accumulate((whole, narrow, low)))
            busiest = max(_pairs(cluster, clusters, ends, weights) for cluster in (0, ends[1] % clusters))
            tilings.append(Tiling(width, multiple, whole, narrow, low, busiest))
    return tilings


def _pairs(cluster: int, clusters: int, ends: Sequence[int], weights: Sequence[float]) -> float:
    """What ``cluster`` computes if all clusters take pairs in turn. Pairs until each of ``ends`` have one of ``weights``."""
    until = [max(-((cluster - end) // clusters), 0) for end in ends]
    return sum((last - first) * weight for first, last, weight in zip([0, *until], until, weights, strict=False))
