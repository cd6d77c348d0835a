"""Says where a kernel of our own, instead of cuDNN's, computes causal attention of a part of a sequence.

A call of cuDNN's costs a memset and the gaps around it, and a suffix costs two calls and a merge
(``passes/split/rules/attention.py``). With few tokens that is more than the attention itself. With many tokens cuDNN's faster
arithmetic outweighs it. The token split uses this module to decide what it puts into the graph, and the planner to predict how
long that takes.
"""

from __future__ import annotations

from collections.abc import Callable

REPLACED = "cudnn"
"""The kernel that our own kernel replaces."""
KERNEL = "suffix"
"""The name of our own kernel in device profiles."""
MOST_KEYS = 4096
"""The most keys, earlier ones included, for which our own kernel pays. Measured on an H200, 16 heads of 128: 2048 queries
behind 2048 keys take 121 us instead of 148, 4096 behind 4096 take 479 instead of 443
(``benchmarks/results/2026-11-22-h200-attention-suffix.txt``)."""
MOST_HEAD_DIM = 128
"""Accumulators of 256 columns would not fit into registers."""


def pays(keys: int, head_dim: int, known: Callable[[bool], bool] = bool) -> bool:
    """Whether our own kernel is better for queries that are the last of ``keys`` keys, in 16 bits.

    Sizes may be symbolic: ``known`` says whether a comparison is sure to hold.
    """
    return known(head_dim <= MOST_HEAD_DIM) and known(keys <= MOST_KEYS)
