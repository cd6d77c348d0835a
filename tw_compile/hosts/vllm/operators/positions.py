"""Operators that depend on a token's position, or on its number in the vocabulary: rotary embeddings and lookups."""

from __future__ import annotations

from tw_compile.passes.operators import RowWiseOperator

POSITIONS = (
    RowWiseOperator("_C::rotary_embedding", reads=("positions", "query", "key")),
    RowWiseOperator("vllm::flashinfer_rotary_embedding", reads=("positions", "query", "key")),
    # Norms of the heads of queries and keys, then the rotation, in place.
    RowWiseOperator("_C::fused_qk_norm_rope", reads=("qkv", "position_ids")),
    RowWiseOperator("_C::vocab_parallel_embedding", reads=("input_ids",), results=("out",)),
)
