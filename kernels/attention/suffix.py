"""Causal attention of the last tokens of a sequence. The keys and values of earlier tokens are separate tensors.

    attention_suffix(query, key, value, earlier_key, earlier_value, scale) -> [batch, heads, queries, head_dim]

``query`` ``[batch, heads, queries, head_dim]``; ``key`` and ``value`` ``[batch, kv_heads, queries, head_dim]`` of the same
tokens; ``earlier_key`` and ``earlier_value`` ``[batch, kv_heads, earlier, head_dim]`` of the tokens before them, or None if
there are none. Query i sees all earlier keys, and keys 0 to i of ``key``. ``heads`` is a multiple of ``kv_heads``. All tensors
have the same dtype and any strides. ``scale`` None means ``head_dim ** -0.5``. The result is laid out as ``[batch, queries,
heads, head_dim]``, as projections read it. It equals attention with ``torch.nn.attention.bias.causal_lower_right``, but nobody
has to join the keys.

On CUDA devices a Triton kernel (``suffix_kernel.py``, imported at the first call) serves bfloat16 and float16 and
head dims up to 128; others are a ``ValueError``. On a CPU the reference serves any dtype.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from tw_compile.kernels.runtime.operator import define
from tw_compile.planning.suffix import MOST_HEAD_DIM

DTYPES = (torch.bfloat16, torch.float16)
"""The dtypes that the kernel supports."""


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    earlier_key: torch.Tensor | None = None,
    earlier_value: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """The operator's result, computed in float32 and rounded once."""
    scale = _checked(query, key, value, earlier_key, earlier_value, scale)
    keys, values = (
        (own if earlier is None else torch.cat([earlier, own], 2)).float().repeat_interleave(_group(query, key), 1)
        for own, earlier in ((key, earlier_key), (value, earlier_value))
    )
    queries = query.shape[2]
    seen = torch.ones(queries, keys.shape[2], dtype=torch.bool, device=query.device).tril(keys.shape[2] - queries)
    scores = (query.float() @ keys.mT * scale).masked_fill(~seen, -math.inf)
    out = _result(query)
    return out.copy_(scores.softmax(-1) @ values)


def attend_on_cuda(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    earlier_key: torch.Tensor | None = None,
    earlier_value: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    from tw_compile.kernels.attention.suffix_kernel import blocks_for, launch

    scale = _checked(query, key, value, earlier_key, earlier_value, scale)
    if query.dtype not in DTYPES:
        raise ValueError(f"query: expected bfloat16 or float16, got {query.dtype}")
    if query.shape[3] > MOST_HEAD_DIM:
        raise ValueError(f"query: expected a head_dim of at most {MOST_HEAD_DIM}, got {query.shape[3]}")
    out = _result(query)
    if out.numel():
        query, key, value = (_with_dense_rows(one) for one in (query, key, value))
        earlier = None
        if earlier_key is not None and earlier_value is not None:
            earlier = _with_dense_rows(earlier_key), _with_dense_rows(earlier_value)
        keys = query.shape[2] + (0 if earlier is None else earlier[0].shape[2])
        blocks = blocks_for(query.shape[2], keys, query.shape[0] * query.shape[1])
        launch(query, (key, value), earlier, scale, out.transpose(1, 2), blocks)
    return out


def _run(query: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    return (attend_on_cuda if query.is_cuda else reference)(query, *rest, **options)


def _fake(query: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    return _result(query)


def _result(query: torch.Tensor) -> torch.Tensor:
    batch, heads, queries, head_dim = query.shape
    return query.new_empty(batch, queries, heads, head_dim).transpose(1, 2)


def _with_dense_rows(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.stride(3) == 1 else rows.contiguous()


def _group(query: torch.Tensor, key: torch.Tensor) -> int:
    """Query heads that share a head of keys."""
    return query.shape[1] // key.shape[1]


def _checked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    earlier_key: torch.Tensor | None,
    earlier_value: torch.Tensor | None,
    scale: float | None,
) -> float:
    """The scale; ValueError unless the operands fit together."""
    if query.dim() != 4:
        raise ValueError(f"query: expected [batch, heads, queries, head_dim], got {list(query.shape)}")
    batch, heads, queries, head_dim = query.shape
    if key.dim() != 4 or not key.shape[1] or heads % key.shape[1]:
        raise ValueError(f"key: expected 4 dims and a number of heads that divides {heads}, got {list(key.shape)}")
    expected = [batch, key.shape[1], queries, head_dim]
    if (earlier_key is None) != (earlier_value is None):
        raise ValueError("earlier_value: expected a tensor where earlier_key is one, and None where it is None")
    named = {"key": key, "value": value}
    if earlier_key is not None and earlier_value is not None:
        named |= {"earlier_key": earlier_key, "earlier_value": earlier_value}
    for name, one in named.items():
        if name.startswith("earlier"):
            expected[2] = named["earlier_key"].shape[2]
        if list(one.shape) != expected:
            raise ValueError(f"{name}: expected {expected}, got {list(one.shape)}")
        if one.dtype != query.dtype:
            raise ValueError(f"{name}: expected the dtype of query, {query.dtype}, got {one.dtype}")
    if scale is None:
        return head_dim**-0.5
    if scale <= 0.0:
        raise ValueError(f"scale: expected a positive number, got {scale}")
    return scale


attention_suffix = define(
    "attention_suffix(Tensor query, Tensor key, Tensor value, Tensor? earlier_key=None, Tensor? earlier_value=None, "
    "float? scale=None) -> Tensor",
    _run,
    _fake,
    tags=(torch.Tag.flexible_layout,),  # operands may have any strides, so Inductor need not copy them
)
