"""A GEMM in waves of output tiles: every SM computes one tile at a time, and a wave ends when its last tile does.

Where the tiles leave SMs idle, they are split along their depth, as cuBLAS does: several CTAs compute a part each, and another
kernel adds the parts up.

Grouped GEMMs (mixture of experts) are those of ``torch._grouped_mm`` on Hopper (aten/src/ATen/native/cuda/GroupMM.cu): CTAs in
clusters of two, whose tiles stand over each other and hold rows of one expert. Where an expert's rows end, the rest of its last
tiles is wasted, so what counts is how many rows each expert gets. Halves have grouped GEMMs of our own
(``kernels/gemm/grouped_mm.cu``), whose clusters compute two tiles side by side where an expert has rows for one. In halves,
GEMMs of one input are also our own where that is faster, as one GEMM (``joint_tiles.py``).

Smart splitting after TokenWeave (Gond et al., 2025), section 3.1.1: two halves need not cost more waves than the whole, if the
first one fills its waves.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from tw_compile.planning.communication import ELEMENT_BYTES
from tw_compile.planning.device import DeviceProfile, GemmRates, Tile
from tw_compile.planning.joint_tiles import MOST_JOINT, PAIR_ROWS, tiles_beside, tiling

GROUPED_TILE, GROUPED_SHORT_TILE = Tile(128, 256), Tile(64, 128)
GROUPED_SHORT = 128
"""Tiles of grouped GEMMs are short if an expert has at most this many rows, or the matrix at most this many columns."""
OWN_DEPTH = 64
"""Our kernel takes depths that are multiples of this, and columns that are multiples of its tile's."""
CLUSTER = 2
"""CTAs of grouped GEMMs that compute rows of the same expert side by side."""
POWER_LIMITED = 1.1
"""At the power limit a joint GEMM's columns take so many times as long, and tiles' edges take no time. Tiles of 256 columns
then take what the fitted edges say, too."""
CERTAIN = 6.0
"""Events that are this many standard deviations away are taken to happen always or never."""


@dataclass(frozen=True)
class Gemm:
    """``[rows, depth] @ [depth, columns]`` in 16 bits, on one rank.

    Attributes:
        experts: Weight matrices that the rows are distributed over; 1 is a plain GEMM.
        experts_per_token: How many of them compute each token.
        own_kernel: Whether it is the grouped GEMM of ``kernels/gemm/grouped_mm.cu``, and not torch's.
        joint: Columns of the GEMMs of one input that ``kernels/gemm/joint_mm.cu`` computes as this one GEMM; else empty.
    """

    name: str
    columns: int
    depth: int
    experts: int = 1
    experts_per_token: int = 1
    own_kernel: bool = False
    joint: tuple[int, ...] = ()

    def of_half(self, profile: DeviceProfile) -> Gemm:
        """This GEMM as it is computed for a half of the tokens."""
        aligned = self.columns % GROUPED_TILE.columns == 0 and self.depth % OWN_DEPTH == 0
        return replace(self, own_kernel=self.experts > 1 and profile.gemm.own_gemms and aligned)

    def groups(self, tokens: int) -> tuple[float, float]:
        """How many experts are expected to get any token, and how many rows each of these gets; routing is taken as uniform."""
        active = self.experts * (1.0 - (1.0 - self.experts_per_token / self.experts) ** tokens)
        return active, tokens * self.experts_per_token / active


@dataclass(frozen=True)
class GemmTime:
    """How one GEMM is predicted to run on ``sms`` SMs; ``tiles`` are CTAs, so a tile of three parts counts as three.

    The tiles of a grouped GEMM are the expected number.
    """

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
    if gemm.experts > 1:
        return _grouped_time(profile, gemm, tokens, sms)
    if gemm.joint:
        return _joint_time(profile, gemm, tokens, sms)
    rates = profile.gemm
    few = sms // 2 if rates.most_parts > 1 else 0  # at most this many tiles can be split
    fastest = math.inf
    for height, tiles_of_height in _tiles_by_rows(rates, gemm):
        down = -(-tokens // height)
        for tile, columns, wave_us, depth_us in tiles_of_height:
            tiles = down * columns
            us = -(-tiles // sms) * wave_us
            if tiles <= few:
                parts = min(sms // tiles, rates.most_parts)
                split_us = wave_us - depth_us + depth_us / parts + rates.split_us
                if split_us < us:
                    tiles, us = tiles * parts, split_us
            if us < fastest:
                fastest, best_tile, best_tiles = us, tile, tiles
    us = profile.launch_us + _limited_us(rates, gemm, tokens, fastest)
    return GemmTime(sms, best_tile, best_tiles, waves(best_tiles, sms), us)


def _limited_us(rates: GemmRates, gemm: Gemm, tokens: int, us: float) -> float:
    """The time of waves that take ``us`` without a power limit, or of memory traffic if that takes longer."""
    active, rows = gemm.groups(tokens)
    elements = active * (gemm.columns * gemm.depth + rows * (gemm.columns + gemm.depth))
    memory_us = elements * ELEMENT_BYTES / (rates.memory_gb_per_s * 1e3)
    return max(us + (rates.long_factor - 1.0) * max(us - rates.long_us, 0.0), memory_us)


@lru_cache(maxsize=1024)
def _tiles_by_rows(rates: GemmRates, gemm: Gemm) -> tuple[tuple[int, list[tuple[Tile, int, float, float]]], ...]:
    """The tiles, grouped by their rows. Each comes with how many cover the columns, the microseconds of one tile, and the part
    of these that depends on the depth."""
    by_rows: dict[int, list[tuple[Tile, int, float, float]]] = {}
    for tile in rates.tiles:
        depth_us = _depth_us(rates, gemm, tile)
        columns = -(-gemm.columns // tile.columns)
        by_rows.setdefault(tile.rows, []).append((tile, columns, rates.tile_us + depth_us, depth_us))
    return tuple(by_rows.items())


def _depth_us(rates: GemmRates, gemm: Gemm, tile: Tile) -> float:
    return 2.0 * (tile.rows + rates.edge) * (tile.columns + rates.edge) * gemm.depth / (rates.tflops_per_sm * 1e6)


def _grouped_time(profile: DeviceProfile, gemm: Gemm, tokens: int, sms: int) -> GemmTime:
    """Waves of the expected number of clusters, each of which computes a tile on each of its SMs."""
    rates = profile.gemm
    few = tokens * gemm.experts_per_token // gemm.experts <= GROUPED_SHORT or gemm.columns <= GROUPED_SHORT
    short = few and not gemm.own_kernel
    tile = GROUPED_SHORT_TILE if short else GROUPED_TILE
    clusters = _clusters(gemm, tile, tokens)
    rounds = waves(clusters, _slots(sms))
    # Where tiles are short, two tiles of an SM take turns: one is stored while the other's depth is computed.
    wave_us = rates.grouped_tile_us * tile.rows / GROUPED_TILE.rows
    wave_us += _depth_us(rates, gemm, tile) / (rates.grouped_short_efficiency if short else rates.grouped_efficiency)
    first_us = profile.launch_us + (0.0 if gemm.own_kernel else rates.grouped_us)
    us = first_us + _limited_us(rates, gemm, tokens, rounds * wave_us)
    return GemmTime(sms, tile, clusters * CLUSTER, rounds, us)


def joint_gemm(profile: DeviceProfile, gemms: Sequence[Gemm]) -> Gemm | None:
    """GEMMs of one input as one GEMM of our own kernel; None where the kernel can't compute them."""
    first = gemms[0]
    if not profile.gemm.own_gemms or len(gemms) > MOST_JOINT:
        return None
    if any(gemm.experts > 1 or gemm.columns % 8 or gemm.depth % OWN_DEPTH for gemm in gemms):
        return None
    columns = tuple(gemm.columns for gemm in gemms)
    return Gemm(first.name, sum(columns), first.depth, joint=columns)


def _joint_time(profile: DeviceProfile, gemm: Gemm, tokens: int, sms: int) -> GemmTime:
    rates = profile.gemm
    joint = tiling(tokens, gemm.joint, _slots(sms))
    tile = Tile(GROUPED_TILE.rows, joint.width)
    depth_us = _depth_us(rates, gemm, tile)
    limited_us = POWER_LIMITED * depth_us * tile.columns / (tile.columns + rates.edge)
    us = joint.first * (rates.tile_us + depth_us) + (joint.pairs - joint.first) * limited_us
    tiles = CLUSTER * (joint.whole + joint.narrow + joint.low)
    return GemmTime(sms, tile, tiles, math.ceil(joint.pairs), profile.launch_us + _limited_us(rates, gemm, tokens, us))


def _slots(sms: int) -> int:
    """How many clusters run at a time. For a single SM the result is 1: a number, but not a real speed."""
    return max(sms // CLUSTER, 1)


def _clusters(gemm: Gemm, tile: Tile, tokens: int) -> int:
    """How many times a cluster is expected to compute a tile for each of its CTAs, over all experts."""
    height = tile.rows if gemm.own_kernel else CLUSTER * tile.rows
    down = expected_tiles(gemm.experts, gemm.experts_per_token, tokens, height)
    return round(down * height / (CLUSTER * tile.rows) * -(-gemm.columns // tile.columns))


@lru_cache(maxsize=4096)
def expected_tiles(experts: int, per_token: int, tokens: int, height: int) -> float:
    """How many tiles of ``height`` rows all experts' rows are expected to fill or begin.

    Each token's experts are drawn at random, so the number of an expert's rows is binomial. An expert has more than ``k`` tiles
    where it has more than ``k * height`` rows. The result is the sum of this probability over ``k`` from 0 on. Near the mean
    the normal distribution gives the probability, with half a row for its steps.
    """
    share = per_token / experts
    if share == 1.0:
        return float(experts * -(-tokens // height))
    mean = tokens * share
    deviation = math.sqrt(mean * (1.0 - share))
    first = max(int((mean - CERTAIN * deviation) / height), 1)  # an expert surely has more than any smaller number
    last = int((mean + CERTAIN * deviation) / height)
    any_row = 1.0 - (1.0 - share) ** tokens
    more = (0.5 * math.erfc((k * height + 0.5 - mean) / (deviation * math.sqrt(2.0))) for k in range(first, last + 1))
    return experts * (any_row + (first - 1) + sum(more))


def full_wave_tokens(gemm: Gemm, tile: Tile, sms: int, tokens: int) -> tuple[int, ...]:
    """Token counts next to ``tokens``, one below and one above, that fill their waves as well as whole rows of tiles can.

    ``tile`` is not used for joint GEMMs, which have a tiling.

    One more row of tiles would begin another wave; with a grouped GEMM, one more token would, by the expected number of tiles.
    Counts of less than a row of tiles are left out.
    """
    if gemm.experts > 1:
        return _full_wave_tokens_of_groups(gemm, tile, _slots(sms), tokens)
    if gemm.joint:
        joint = tiling(max(tokens, 1), gemm.joint, _slots(sms))
        return _filled(tiles_beside(gemm.joint, joint.width, joint.multiple), PAIR_ROWS, _slots(sms), tokens)
    return _filled(-(-gemm.columns // tile.columns), tile.rows, sms, tokens)


def _filled(columns: int, rows: int, sms: int, tokens: int) -> tuple[int, ...]:
    """:func:`full_wave_tokens` for ``columns`` tiles beside each other, each of ``rows`` rows."""
    reached = max(tokens // rows, 1) * columns // sms
    return tuple(wave * sms // columns * rows for wave in (reached, reached + 1) if wave * sms >= columns)


def _full_wave_tokens_of_groups(gemm: Gemm, tile: Tile, slots: int, tokens: int) -> tuple[int, ...]:
    """The most tokens whose expected tiles need no further wave of ``slots`` clusters."""
    height, columns = CLUSTER * tile.rows, -(-gemm.columns // tile.columns)
    reached = _clusters(gemm, tile, tokens) // slots
    borders = []
    for clusters in (reached * slots, (reached + 1) * slots):
        # Each expert wastes less than a tile's height: that bounds where to look.
        per_token = columns * gemm.experts_per_token
        least = max(clusters * height // per_token - gemm.experts * height // gemm.experts_per_token, 0)
        counts = range(least, clusters * height // per_token + 2)
        borders.append(least + bisect_right(counts, clusters, key=lambda count: _clusters(gemm, tile, count)) - 1)
    return tuple(count for count in borders if count > 0)
