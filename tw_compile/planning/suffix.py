"""Says where a kernel of our own, instead of cuDNN's, computes causal attention of a part of a sequence.

A call of cuDNN's costs a memset and the gaps around it, and a suffix two calls and a merge
(``passes/split/rules/attention.py``). With few tokens that is more than the attention itself; with many, cuDNN's faster
arithmetic outweighs it. The token split decides by this what it puts into the graph, the planner how long that takes.
"""

from __future__ import annotations

from collections.abc import Callable

REPLACED = "cudnn"
"""The kernel whose place it takes."""
KERNEL = "suffix"
"""The name of this kernel in device profiles."""
MOST_KEYS = 4096
"""Earlier ones included. Measured on an H200, 16 heads of 128: 2048 queries behind 2048 keys take 121 us instead of 148,
4096 behind 4096 take 479 instead of 443 (``benchmarks/results/2026-11-22-h200-attention-suffix.txt``)."""
MOST_HEAD_DIM = 128
"""Accumulators of 256 columns would not fit into registers."""


def pays(keys: int, head_dim: int, known: Callable[[bool], bool] = bool) -> bool:
    """Whether queries that are the last of ``keys`` keys are better off with it, in 16 bits.

    Sizes may be symbolic: ``known`` says of a comparison whether it is sure to hold.
    """
    return known(head_dim <= MOST_HEAD_DIM) and known(keys <= MOST_KEYS)
