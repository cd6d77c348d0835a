"""How many tokens a call must have so that the GEMMs behind it gain if they are fed its rows (``passes/feed.py``).

Measured on two H200 with Llama's sizes (``benchmarks/kernel-notes.md``, section 8). A call that leaves its rows to a GEMM ends
earlier. The GEMM takes longer: it sends rows, and it waits for other ranks' rows if it has too few tiles of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from tw_compile.planning.joint_tiles import PAIR_ROWS, WIDTHS

_SMS = 132
"""As H100 (SXM) and H200 have. A Hopper GPU with fewer SMs would gain with fewer tokens, too."""
_LEAST_BYTES = 8 * 2**20
"""Of rows that a rank sends. With half of that gate and up of Llama-3.1-8B lost 10 us, and the call gained 7."""


def tokens_to_send(hidden_size: int, world_size: int) -> int:
    """The fewest tokens ``[tokens, hidden_size]`` in bfloat16 of which a rank sends enough for a gain.

    ``world_size`` is 2 or more.
    """
    return -(-_LEAST_BYTES * world_size // ((world_size - 1) * hidden_size * 2))


def tokens_to_fill(columns: Iterable[int], world_size: int) -> int:
    """The fewest tokens of which a rank's own rows fill all SMs, with GEMMs of ``columns`` columns that one launch computes.

    With fewer, some SMs wait for other ranks' rows from the start. This counts whole pairs of tiles, as if each rank's rows
    began with one. With up to 255 tokens a rank more, ranks whose rows begin inside a pair may have one pair fewer.
    """
    wide = sum(-(-one // WIDTHS[0]) for one in columns)
    return -(-(_SMS // 2) // wide) * PAIR_ROWS * world_size
