"""A GEMM in waves of output tiles: every SM computes one tile at a time, and a wave ends when its last tile does.

Tiles that leave SMs idle are split along their depth, as cuBLAS does: several CTAs compute a part each, and another kernel adds
the parts up.

Smart splitting after TokenWeave (Gond et al., 2025), section 3.1.1: two halves need not cost more waves than the whole, if the
first one fills its waves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from tw_compile.planning.communication import ELEMENT_BYTES
from tw_compile.planning.device import DeviceProfile, GemmRates, Tile


@dataclass(frozen=True)
class Gemm:
    """``[rows, depth] @ [depth, columns]`` in 16 bits, on one rank.

    Attributes:
        experts: Weight matrices that the rows are distributed over; 1 is a plain GEMM.
        experts_per_token: How many of them compute each token.
    """

    name: str
    columns: int
    depth: int
    experts: int = 1
    experts_per_token: int = 1

    def groups(self, tokens: int) -> tuple[float, float]:
        """How many experts are expected to get any token, and how many rows each of these gets; routing is taken as uniform."""
        active = self.experts * (1.0 - (1.0 - self.experts_per_token / self.experts) ** tokens)
        return active, tokens * self.experts_per_token / active


@dataclass(frozen=True)
class GemmTime:
    """How one GEMM is predicted to run on ``sms`` SMs; ``tiles`` are CTAs, so a tile of three parts counts as three."""

    sms: int
    tile: Tile
    tiles: int
    waves: int
    us: float


def waves(tiles: int, sms: int) -> int:
    """Rounds of at most ``sms`` tiles."""
    return -(-tiles // sms)


def gemm_time(profile: DeviceProfile, gemm: Gemm, tokens: int, sms: int) -> GemmTime:
    """The tile shape that is predicted fastest, and its time: launch, then waves or memory, whichever takes longer.

    Waves after ``GemmRates.long_us`` are slower.
    """
    rates = profile.gemm
    active, rows = gemm.groups(tokens)
    most_parts = rates.most_parts if gemm.experts == 1 else 1
    few = sms // 2 if most_parts > 1 else 0  # so many tiles can be split
    fastest = math.inf
    for height, tiles_of_height in _tiles_by_rows(rates, gemm):
        down = round(active * -(-rows // height))
        for tile, columns, wave_us, depth_us in tiles_of_height:
            tiles = down * columns
            us = -(-tiles // sms) * wave_us
            if tiles <= few:
                parts = min(sms // tiles, most_parts)
                split_us = wave_us - depth_us + depth_us / parts + rates.split_us
                if split_us < us:
                    tiles, us = tiles * parts, split_us
            if us < fastest:
                fastest, best_tile, best_tiles = us, tile, tiles
    fastest += (rates.long_factor - 1.0) * max(fastest - rates.long_us, 0.0)
    elements = active * (gemm.columns * gemm.depth + rows * (gemm.columns + gemm.depth))
    memory_us = elements * ELEMENT_BYTES / (rates.memory_gb_per_s * 1e3)
    us = profile.launch_us + max(fastest, memory_us)
    return GemmTime(sms, best_tile, best_tiles, waves(best_tiles, sms), us)


@lru_cache(maxsize=1024)
def _tiles_by_rows(rates: GemmRates, gemm: Gemm) -> tuple[tuple[int, list[tuple[Tile, int, float, float]]], ...]:
    """By the rows of tiles: each tile, how many are side by side, microseconds of one, and of its depth in them."""
    per_us = rates.tflops_per_sm * 1e6 * (rates.grouped_efficiency if gemm.experts > 1 else 1.0)
    found: dict[int, list[tuple[Tile, int, float, float]]] = {}
    for tile in rates.tiles:
        depth_us = 2.0 * (tile.rows + rates.edge) * (tile.columns + rates.edge) * gemm.depth / per_us
        columns = -(-gemm.columns // tile.columns)
        found.setdefault(tile.rows, []).append((tile, columns, rates.tile_us + depth_us, depth_us))
    return tuple(found.items())


def full_wave_tokens(gemm: Gemm, tile: Tile, sms: int, tokens: int) -> tuple[int, ...]:
    """Token counts next to ``tokens``, one below and one above, that fill their waves as well as whole rows of tiles can.

    One more row of tiles would begin another wave. Counts of less than a row of tiles are left out.
    """
    columns = -(-gemm.columns // tile.columns) * gemm.experts
    rows = tile.rows * gemm.experts // gemm.experts_per_token
    reached = max(tokens // rows, 1) * columns // sms
    return tuple(wave * sms // columns * rows for wave in (reached, reached + 1) if wave * sms >= columns)
