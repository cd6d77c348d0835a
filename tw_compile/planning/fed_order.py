"""In which order a fed GEMM computes its tiles: for how long it computes rows of its own rank alone."""

from __future__ import annotations

import math

from tw_compile.planning.joint_tiles import PAIR_ROWS

_START_US = 5.0
_BYTES_PER_US = 300e3
"""What arrives at a rank: the links carry 370 GB/s, and the copies of a GEMM's CTAs wait between their chunks."""
_FLOP_PER_US = 5.5e6
"""Of an SM of an H100 or H200."""


def lead_columns(rows: int, depth: int, world_size: int, own_pairs: int, width: int, clusters: int) -> int:
    """Columns of tiles that are computed for the ``own_pairs`` pairs of own rows before all others.

    All tiles of ``width`` columns that begin before the others' rows have arrived are of own rows then, if the matrices have so
    many columns. ``rows`` and ``depth`` are those of the GEMM, which runs on ``clusters`` pairs of SMs.
    """
    if not own_pairs:
        return 0
    arrived_us = _START_US + rows * (world_size - 1) / world_size * depth * 2 / _BYTES_PER_US
    pair_us = PAIR_ROWS * width * depth / _FLOP_PER_US  # two operations a product, on two SMs
    return math.ceil(math.ceil(arrived_us / pair_us) * clusters / own_pairs)
