"""The Triton kernel of :mod:`tw_compile.kernels.attention.suffix`, and its launch shapes.

FlashAttention-2 (Dao, 2023): a CTA has a block of queries of one head and walks over blocks of keys, with a running maximum and
sum for each row. Here one loop walks over two pairs of tensors, so its pipeline never drains. The earlier keys come first;
every query sees all of them. Scores are masked in two places only: where the earlier keys end, and at the diagonal. The blocks
of the last queries, which see the most keys, are scheduled first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_WIDE_PAIRS = 48 * 2**20
"""The number of pairs of a query and a key that it sees, over all heads, from which on blocks are wide.

In wide blocks more rows share the keys; small blocks make the last CTAs shorter. Measured: small blocks take 0.92x as long at
34 million pairs, wide blocks take 0.92x as long at 100 million.
"""


@dataclass(frozen=True)
class Blocks:
    """How many queries (``rows``) and keys a block has, and the launch options that go with them."""

    rows: int
    keys: int
    warps: int
    stages: int


SMALL, WIDE = Blocks(64, 64, 4, 3), Blocks(128, 64, 8, 3)
"""The fastest two of seven (``benchmarks/results/2026-11-22-h200-attention-suffix.txt``). On sm_90 neither spills registers."""


def blocks_for(queries: int, keys: int, heads: int) -> Blocks:
    """The blocks for a launch. ``keys``: how many keys the last query sees. ``heads``: the number of heads of all requests."""
    return SMALL if heads * queries * (2 * keys - queries) < 2 * _WIDE_PAIRS else WIDE


def width_of(head_dim: int) -> int:
    """Columns of a block. Only the first ``head_dim`` of them hold data."""
    return max(16, triton.next_power_of_2(head_dim))


@triton.jit(do_not_specialize=["queries", "earlier"])
def attention_suffix_kernel(
    query,
    key,
    value,
    earlier_key,
    earlier_value,
    out,
    query_batch,
    query_head,
    query_row,
    key_batch,
    key_head,
    key_row,
    value_batch,
    value_head,
    value_row,
    earlier_key_batch,
    earlier_key_head,
    earlier_key_row,
    earlier_value_batch,
    earlier_value_head,
    earlier_value_row,
    queries,
    earlier,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_EARLIER: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """One block of queries of one head per program: axis 0 is ``batch * HEADS``, axis 1 the blocks.

    The numbers of heads are constants because blocks of 128 columns have few registers to spare.

    ``scale`` is the scale of the scores times log2(e). ``GROUP`` query heads share a head of keys. ``WIDTH`` is
    :func:`width_of` ``HEAD_DIM``. Strides are in elements; ``out`` is contiguous ``[batch, queries, HEADS, HEAD_DIM]``.
    """
    batch = (tl.program_id(0) // HEADS).to(tl.int64)
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    first_row = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_ROWS
    rows = first_row + tl.arange(0, BLOCK_ROWS)
    places = tl.arange(0, BLOCK_KEYS)
    columns = tl.arange(0, WIDTH)
    in_head = columns[None, :] < HEAD_DIM
    in_rows = (rows[:, None] < queries) & in_head

    query += batch * query_batch + head * query_head
    key += batch * key_batch + head // GROUP * key_head
    value += batch * value_batch + head // GROUP * value_head
    if HAS_EARLIER:
        earlier_key += batch * earlier_key_batch + head // GROUP * earlier_key_head
        earlier_value += batch * earlier_value_batch + head // GROUP * earlier_value_head

    q = tl.load(query + rows[:, None].to(tl.int64) * query_row + columns[None, :], mask=in_rows, other=0.0)
    most = tl.full([BLOCK_ROWS], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    result = tl.zeros([BLOCK_ROWS, WIDTH], tl.float32)

    earlier_blocks = tl.cdiv(earlier, BLOCK_KEYS)
    own_blocks = tl.cdiv(tl.minimum(first_row + BLOCK_ROWS, queries), BLOCK_KEYS)
    for block in range(earlier_blocks + own_blocks):
        keys_at, values_at, key_stride, value_stride = key, value, key_row, value_row
        begin, count, last_seen, whole_until = block * BLOCK_KEYS, queries, rows, first_row + 1
        if HAS_EARLIER:
            own = block >= earlier_blocks
            keys_at, values_at = tl.where(own, key, earlier_key), tl.where(own, value, earlier_value)
            key_stride = tl.where(own, key_row, earlier_key_row)
            value_stride = tl.where(own, value_row, earlier_value_row)
            begin = tl.where(own, block - earlier_blocks, block) * BLOCK_KEYS
            count = tl.where(own, queries, earlier)
            last_seen = tl.where(own, rows, earlier - 1)
            whole_until = tl.where(own, first_row + 1, earlier)
        in_keys = (begin + places[:, None] < count) & in_head
        keys_at += tl.cast(begin, tl.int64) * key_stride
        values_at += tl.cast(begin, tl.int64) * value_stride
        k = tl.load(keys_at + places[:, None] * key_stride + columns[None, :], mask=in_keys, other=0.0)
        scores = tl.dot(q, k.T)
        if begin + BLOCK_KEYS > whole_until:
            scores = tl.where(begin + places[None, :] <= last_seen[:, None], scores, -float("inf"))
        # Every row sees the first key of the walk, so the maximum is finite from then on.
        higher = tl.maximum(most, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - higher[:, None])
        decay = tl.exp2(most - higher)
        total = total * decay + tl.sum(weights, 1)
        most = higher
        v = tl.load(values_at + places[:, None] * value_stride + columns[None, :], mask=in_keys, other=0.0)
        result = tl.dot(weights.to(v.dtype), v, result * decay[:, None])

    result /= total[:, None]
    to = (batch * queries + rows[:, None]) * HEADS + head
    tl.store(out + to * HEAD_DIM + columns[None, :], result.to(out.dtype.element_ty), mask=in_rows)


def launch(
    query: torch.Tensor,
    own: tuple[torch.Tensor, torch.Tensor],
    earlier: tuple[torch.Tensor, torch.Tensor] | None,
    scale: float,
    out: torch.Tensor,
    blocks: Blocks,
) -> None:
    """Write attention of ``query [batch, heads, queries, head_dim]`` to ``out [batch, queries, heads, head_dim]``.

    The last dimension of all tensors is contiguous.
    """
    batch, heads, queries, head_dim = query.shape
    pairs = (*own, *(earlier or (None, None)))
    strides = [(0, 0, 0) if one is None else one.stride()[:3] for one in (query, *pairs)]
    attention_suffix_kernel[(batch * heads, -(-queries // blocks.rows))](
        query,
        *pairs,
        out,
        *(stride for three in strides for stride in three),
        queries,
        0 if earlier is None else earlier[0].shape[2],
        scale * math.log2(math.e),
        HEADS=heads,
        GROUP=heads // own[0].shape[1],
        HEAD_DIM=head_dim,
        WIDTH=width_of(head_dim),
        HAS_EARLIER=earlier is not None,
        BLOCK_ROWS=blocks.rows,
        BLOCK_KEYS=blocks.keys,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
