"""A GEMM in waves of output tiles: every SM computes one tile at a time, and a wave ends when its last tile does.

Smart splitting after TokenWeave (Gond et al., 2025), section 3.1.1: two halves need not cost more waves than the whole, if the
first one fills its waves.
"""

from __future__ import annotations

from dataclasses import dataclass

from tw_compile.planning.communication import ELEMENT_BYTES
from tw_compile.planning.device import DeviceProfile, Tile


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
    """How one GEMM is predicted to run on ``sms`` SMs."""

    sms: int
    tile: Tile
    tiles: int
    waves: int
    us: float


def waves(tiles: int, sms: int) -> int:
    """Rounds of at most ``sms`` tiles."""
    return -(-tiles // sms)


def tiles_of(gemm: Gemm, tile: Tile, tokens: int) -> int:
    """Output tiles for ``tokens`` tokens."""
    columns = -(-gemm.columns // tile.columns)
    if gemm.experts == 1:
        return -(-tokens // tile.rows) * columns
    active, rows = gemm.groups(tokens)
    return max(round(active * -(-rows // tile.rows)), 1) * columns


def gemm_time(profile: DeviceProfile, gemm: Gemm, tokens: int, sms: int) -> GemmTime:
    """The tile shape that is predicted fastest, and its time: launch, then waves or memory, whichever takes longer."""
    rates = profile.gemm
    grouped = gemm.experts > 1
    per_us = rates.tflops_per_sm * 1e6 * (rates.grouped_efficiency if grouped else 1.0)
    best: GemmTime | None = None
    for tile in rates.tiles:
        tiles = tiles_of(gemm, tile, tokens)
        rounds = waves(tiles, sms)
        us = rounds * 2.0 * tile.rows * tile.columns * gemm.depth / (per_us * tile.efficiency)
        if best is None or us < best.us:
            best = GemmTime(sms, tile, tiles, rounds, us)
    assert best is not None, "profiles have tiles"
    active = gemm.groups(tokens)[0] if grouped else 1.0
    rows = tokens * gemm.experts_per_token
    elements = active * gemm.columns * gemm.depth + rows * (gemm.columns + gemm.depth)
    memory_us = elements * ELEMENT_BYTES / (rates.memory_gb_per_s * 1e3)
    return GemmTime(best.sms, best.tile, best.tiles, best.waves, profile.launch_us + max(best.us, memory_us))


def full_wave_tokens(gemm: Gemm, tile: Tile, sms: int, tokens: int) -> tuple[int, ...]:
    """Token counts next to ``tokens``, one below and one above, that fill their waves as well as whole rows of tiles can.

    One more row of tiles would begin another wave. Counts of less than a row of tiles are left out.
    """
    columns = -(-gemm.columns // tile.columns) * gemm.experts
    rows = tile.rows * gemm.experts // gemm.experts_per_token
    reached = max(tokens // rows, 1) * columns // sms
    return tuple(wave * sms // columns * rows for wave in (reached, reached + 1) if wave * sms >= columns)
