"""The operator's arguments as one value, and how token rows are shared out between ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

ResidualOut = Literal["none", "sharded", "replicated"]

SUPPORTED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rows_per_rank(tokens: Any, world_size: int) -> Any:
    """Rows of a shard: ``ceil(tokens / world_size)``; works on SymInts. The last shards may hold fewer valid rows."""
    return (tokens + world_size - 1) // world_size


def row_range(tokens: int, world_size: int, rank: int) -> tuple[int, int]:
    """The half-open range of token rows that ``rank`` owns; empty for trailing ranks of tiny messages."""
    per_rank = rows_per_rank(tokens, world_size)
    begin = min(rank * per_rank, tokens)
    return begin, min(begin + per_rank, tokens)


@dataclass(frozen=True)
class NormSpec:
    """What happens to the reduced sum, everything in float32 unless said otherwise.

    ``h = scale * sum + bias + residual`` is rounded to ``residual_dtype`` when it is kept. With
    ``y = h * rsqrt(mean(h^2) + eps)``,

    - no weight: ``hidden = y``
    - ``cast_before_weight`` is None: ``hidden = y * (weight_offset + weight)`` (torch RMSNorm; Gemma with offset 1)
    - else ``hidden = y.to(cast_before_weight) * weight`` (Hugging Face Llama),

    rounded to ``hidden_dtype``.
    """

    eps: float
    weight_offset: float
    cast_before_weight: torch.dtype | None
    hidden_dtype: torch.dtype
    residual_dtype: torch.dtype
    scale: float = 1.0


@dataclass(frozen=True)
class Request:
    """One call: ``x [tokens, hidden]`` is this rank's partial sum; tensors are contiguous.

    ``residual`` is ``[tokens, hidden]``, or ``[rows_per_rank, hidden]`` (this rank's rows) when ``residual_sharded``.
    ``bias`` and ``weight`` are ``[hidden]``. ``residual_out`` says which rows of ``h`` the caller wants back.
    """

    x: torch.Tensor
    residual: torch.Tensor | None
    bias: torch.Tensor | None
    weight: torch.Tensor | None
    norm: NormSpec
    residual_sharded: bool
    residual_out: ResidualOut
    group_name: str
    slot: int

    def allocate(self, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Uninitialised ``(hidden, residual_out)``; the latter has 0 rows when it is not wanted."""
        tokens, hidden_size = self.x.shape
        rows = {"none": 0, "sharded": rows_per_rank(tokens, world_size), "replicated": tokens}[self.residual_out]
        hidden = self.x.new_empty((tokens, hidden_size), dtype=self.norm.hidden_dtype)
        return hidden, self.x.new_empty((rows, hidden_size), dtype=self.norm.residual_dtype)
