"""FlashAttention's part of a step, in plain torch: keys and values in blocks, requests one behind the other."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from tw_compile import compat

if TYPE_CHECKING:
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

BLOCK = 4


@dataclass(frozen=True)
class Request:
    """``context`` tokens in the cache, ``query`` new ones."""

    context: int
    query: int


def metadata_of(requests: list[Request], padding: int = 0) -> FlashAttentionMetadata:
    """As vLLM makes it; a request's blocks are anywhere. ``padding`` rows behind the tokens belong to nobody."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

    starts = torch.tensor([0, *(one.query for one in requests)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    lengths = torch.tensor([one.context + one.query for one in requests], dtype=torch.int32)
    columns = -(-int(lengths.max()) // BLOCK)
    blocks = torch.randperm(len(requests) * columns, generator=torch.Generator().manual_seed(1)).int()
    table = blocks.view(len(requests), columns)
    slots = [
        table[index, place // BLOCK] * BLOCK + place % BLOCK
        for index, one in enumerate(requests)
        for place in range(one.context, one.context + one.query)
    ]
    planned = {  # so that a half that kept any of this would be noticed
        "use_cascade": True,
        "common_prefix_len": BLOCK,
        "cu_prefix_query_lens": starts[-1:],
        "prefix_kv_lens": lengths[:1],
        "suffix_kv_lens": lengths,
        "scheduler_metadata": starts,
        "prefix_scheduler_metadata": starts,
    }
    known = {one.name for one in fields(FlashAttentionMetadata)}
    return FlashAttentionMetadata(
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(one.query for one in requests),
        query_start_loc=starts,
        max_seq_len=int(lengths.max()),
        seq_lens=lengths,
        block_table=table,
        slot_mapping=torch.stack([*slots, *[torch.tensor(-1, dtype=torch.int32)] * padding]).long(),
        **{name: value for name, value in planned.items() if name in known},
    )


def cache_of(metadata: FlashAttentionMetadata, heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """``[blocks, 2, block, heads, head_dim]``, filled with what earlier steps left and with NaN where nothing was written."""
    made = torch.randn(
        (metadata.block_table.numel(), 2, BLOCK, heads, head_dim), generator=torch.Generator().manual_seed(2)
    )
    queries = metadata.query_start_loc.diff()
    for table, length, query in zip(metadata.block_table, metadata.seq_lens, queries, strict=True):
        for place in range(int(length - query), table.numel() * BLOCK):
            made[table[place // BLOCK], :, place % BLOCK] = torch.nan
    return made.to(dtype)


def update(impl: Any, layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: Any) -> None:
    """``FlashAttentionImpl.do_kv_cache_update``."""
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            cache[slot // BLOCK, 0, slot % BLOCK] = key[row]
            cache[slot // BLOCK, 1, slot % BLOCK] = value[row]


def attend(
    query: torch.Tensor, cache: torch.Tensor, metadata: FlashAttentionMetadata, scale: float, window: int | None = None
) -> torch.Tensor:
    """What FlashAttention is documented to compute: the last query of a request sees its last key."""
    made = query.new_zeros((*query.shape[:-1], cache.shape[-1]))
    starts = metadata.query_start_loc.tolist()
    assert starts[0] == 0 and starts[-1] <= metadata.num_actual_tokens <= query.shape[0]
    assert starts[-1] == metadata.num_actual_tokens or getattr(metadata, "padded", False)
    assert max(end - begin for begin, end in itertools.pairwise(starts)) <= metadata.max_query_len
    for index, (begin, end) in enumerate(itertools.pairwise(starts)):
        length = int(metadata.seq_lens[index])
        assert 0 <= length <= metadata.max_seq_len
        if begin == end:
            continue
        for row in range(begin, end):  # one by one, so that the bits don't depend on what else is in the batch
            own = length - (end - row)
            places = torch.arange(0 if window is None else max(own - window, 0), own + 1)
            seen = cache[metadata.block_table[index, places // BLOCK].long(), :, places % BLOCK].double()
            keys, values = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in seen.unbind(1))
            shares = (torch.einsum("hd,khd->hk", query[row].double(), keys) * scale).softmax(-1)
            made[row] = torch.einsum("hk,khd->hd", shares, values).to(made.dtype)
    return made


def forward(
    impl: Any,
    layer: Any,
    query: torch.Tensor,
    key: Any,
    value: Any,
    cache: torch.Tensor,
    metadata: Any,
    output: torch.Tensor,
    output_scale: Any = None,
    output_block_scale: Any = None,
) -> torch.Tensor:
    """``FlashAttentionImpl.forward``, which calls operators that do not work under a mode."""
    assert not compat.operators_are_watched()
    if metadata is None:
        return output.fill_(0)
    written = int(metadata.query_start_loc[-1])  # nobody writes rows behind the last request's
    output[:written].copy_(attend(query, cache, metadata, impl.scale)[:written])
    return output
