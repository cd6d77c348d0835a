"""How many tokens a call must have so that the GEMMs behind it gain if they are fed its rows (``passes/feed.py``).

Measured on two H200 with Llama's sizes (``benchmarks/kernel-notes.md``, section 8). A call that leaves its rows to a GEMM ends
earlier. The GEMM takes longer: it sends rows, and it waits for other ranks' rows if it has too few tiles of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from tw_compile.planning.joint_tiles import BOX, PAIR_ROWS, WIDTHS, tiles_beside

_SMS = 132
"""As H100 (SXM) and H200 have. A Hopper GPU with fewer SMs would gain with fewer tokens, too."""
_LEAST_ROWS, _OF_SIZE = 512, 8192
"""Rows that a rank sends, and their hidden_size. Of shorter rows a rank must send more: a GEMM's time grows with the square of
hidden_size, as its matrices do, and what feeding costs hardly grows. Fitted to two sizes: 512 rows of 8192 gained 0.2% to
0.8% in five runs, and 1024 rows of 4096 lost 0.2%. Two compilations of one graph differ by as much, or more."""


def tokens_to_send(hidden_size: int, world_size: int) -> int:
    """The fewest tokens ``[tokens, hidden_size]`` in bfloat16 of which a rank sends enough for a gain.

    ``world_size`` is 2 or more.
    """
    rows = -(-_LEAST_ROWS * _OF_SIZE**2 // hidden_size**2)
    return -(-rows * world_size // (world_size - 1))


def tokens_to_fill(columns: Iterable[int], world_size: int) -> int:
    """The fewest tokens of which a rank's own rows fill all SMs, with GEMMs of ``columns`` columns that one launch computes.

    With fewer, some SMs wait for other ranks' rows from the start. This counts whole pairs of tiles, as if each rank's rows
    began with one. With up to 255 tokens a rank more, ranks whose rows begin inside a pair may have one pair fewer.
    """
    return -(-(_SMS // 2) // tiles_beside(columns, WIDTHS[0], BOX)) * PAIR_ROWS * world_size
