"""From which number of tokens on GEMMs gain if they are fed rows (``passes/feed.py``): what they do while rows travel.

Measured on two H200 with Llama's sizes (``benchmarks/kernel-notes.md``, section 8). A call that leaves its rows to a GEMM ends
earlier. The GEMM takes longer: it sends rows, and waits for other ranks' rows where it has too few tiles of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from tw_compile.planning.joint_tiles import PAIR_ROWS, WIDTHS

_SMS = 132
"""Of an H100 or H200. No GEMM on another GPU is fed."""
_LEAST_BYTES = 8 * 2**20
"""Of rows that a rank sends. Half of that took the GEMM of gate and up as long as the call before it gained."""


def tokens_to_send(hidden_size: int, world_size: int) -> int:
    """The fewest tokens ``[tokens, hidden_size]`` in bfloat16 of which a rank sends enough for a gain."""
    return -(-_LEAST_BYTES * world_size // ((world_size - 1) * hidden_size * 2))


def tokens_to_fill(columns: Iterable[int], world_size: int) -> int:
    """The fewest tokens of which a rank's own rows fill all SMs, with GEMMs of ``columns`` columns that one launch computes.

    With fewer, some SMs wait for other ranks' rows from the begin on.
    """
    wide = sum(-(-one // WIDTHS[0]) for one in columns)
    return -(-(_SMS // 2) // wide) * PAIR_ROWS * world_size
