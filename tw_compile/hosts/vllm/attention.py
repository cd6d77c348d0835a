"""vLLM's attention for one half of a step's tokens, without the runner's help.

    half 1:  write k1, v1 to the cache; attend with q1, each request's keys ending where the half does
    half 2:  write k2, v2 to the cache; attend with q2, to all of each request's keys

The runner makes one set of metadata for each step. For FlashAttention, a half's metadata follows from the step's by arithmetic
on the GPU: its kernels take requests without queries, count keys per request, and align causal masks to the last key. The
halves' metadata are computed once a step for all layers. Other backends plan on the host, with data that only the runner has,
so their attention stays whole.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from copy import copy
from dataclasses import fields
from typing import Any

import torch
from vllm.forward_context import ForwardContext, get_forward_context
from vllm.model_executor.layers.attention.attention import Attention, get_attention_context
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name, direct_register_custom_op
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl, FlashAttentionMetadata

from tw_compile import compat
from tw_compile.hosts.vllm.reasons import WholeAttention
from tw_compile.kernels.runtime.operator import callable_directly, library

_PLANNED_FOR_ALL = {
    "use_cascade": False,
    "common_prefix_len": 0,
    "cu_prefix_query_lens": None,
    "prefix_kv_lens": None,
    "suffix_kv_lens": None,
    "scheduler_metadata": None,
    "prefix_scheduler_metadata": None,
}
"""Fields that vLLM has planned for all tokens, and the values that they get for a half. The kernel then plans by itself, and
each request reads a shared prefix by itself."""
_SAME_FOR_HALVES = {"block_table", "max_seq_len", "causal", "max_num_splits"}
_OF_A_HALF = {"num_actual_tokens", "max_query_len", "query_start_loc", "seq_lens", "slot_mapping"}
_ATTENTION_TYPE = AttentionType.DECODER
_UNUSED: dict[str, tuple[Any, ...]] = {
    "max_dcp_context_kv_len": (None, 0),
    "dcp_context_kv_lens": (None,),
    "num_decode_reqs": (0,),
    "num_prefill_reqs": (0,),
    "num_decode_tokens": (0,),
    "num_prefill_tokens": (0,),
    "mm_prefix_range_tensor": (None,),
    "mm_prefix_query_range_tensor": (None,),
    "rswa_prefix_lens": (None,),
    "rswa_window": (None,),
    "rswa_window_tensor": (None,),
}
"""Fields that must have one of these values: contexts over several ranks, prefixes that see later tokens, windows behind a
prefix. A version of vLLM has only some of these fields, and only some of those in ``_PLANNED_FOR_ALL``."""


def whole_attention(layers: Iterable[Any]) -> tuple[WholeAttention, str] | None:
    """Why attention of these layers is not split, whatever the engine's configuration, by name and in words; else None."""
    unknown = {one.name for one in fields(FlashAttentionMetadata)} - known_fields()
    if unknown:
        detail = f"FlashAttention's has fields that are not known: {', '.join(sorted(unknown))}"
        return WholeAttention.ATTENTION_METADATA, detail
    impls = [one.impl for one in layers if isinstance(one, Attention)]
    others = [one for one in impls if not isinstance(one, FlashAttentionImpl) or one.attn_type != _ATTENTION_TYPE]
    if others or not impls:
        names = ", ".join(sorted({type(one).__name__ for one in others})) or "none"
        detail = f"{len(others)} of {len(impls)} layers are not causal FlashAttention: {names}"
        return WholeAttention.ATTENTION_BACKEND, detail
    return None


def known_fields() -> set[str]:
    """The fields of ``FlashAttentionMetadata`` that this module knows."""
    return {*_PLANNED_FOR_ALL, *_SAME_FOR_HALVES, *_OF_A_HALF, *_UNUSED}


def half_of(metadata: FlashAttentionMetadata, begin: int, tokens: int) -> FlashAttentionMetadata:
    """The metadata of tokens ``begin`` to ``begin + tokens`` of a step. They keep all requests of the step.

    A request with no tokens in this half has no queries. A request that is cut has, in half 1, as many keys as its last query
    there sees.

    Raises:
        RuntimeError: The metadata is not FlashAttention's, the step is not causal, or a field of ``_UNUSED`` is in use, as for
            keys on several ranks.
    """
    _check(metadata)
    end = min(begin + tokens, metadata.num_actual_tokens)
    begin = min(begin, end)
    bounds = metadata.query_start_loc
    later = (bounds[1:] - bounds[:-1].clamp(min=end)).clamp(min=0)
    half = copy(metadata)  # not replaced: some of vLLM's subclasses have another constructor
    vars(half).update(
        num_actual_tokens=end - begin,
        max_query_len=min(metadata.max_query_len, end - begin),
        query_start_loc=bounds.clamp(begin, end) - begin,
        seq_lens=metadata.seq_lens - later,
        slot_mapping=metadata.slot_mapping[begin:end],
        **{name: value for name, value in _PLANNED_FOR_ALL.items() if hasattr(metadata, name)},
    )
    return half


def is_plain(metadata: Any) -> bool:
    """Whether metadata are FlashAttention's, of causal queries, without anything that was planned for a shared prefix."""
    if not isinstance(metadata, FlashAttentionMetadata) or getattr(metadata, "use_cascade", False):
        return False
    return metadata.causal is True and all(_is_unused(metadata, name) for name in _UNUSED)


def _is_unused(metadata: FlashAttentionMetadata, name: str) -> bool:
    given = getattr(metadata, name, _UNUSED[name][0])
    return any(given is one or (isinstance(given, int) and given == one) for one in _UNUSED[name])


def _check(metadata: FlashAttentionMetadata) -> None:
    if not isinstance(metadata, FlashAttentionMetadata):
        raise RuntimeError(f"metadata: expected FlashAttentionMetadata, got {type(metadata).__name__}")
    if metadata.causal is not True:
        raise RuntimeError(f"metadata.causal: expected True, got {metadata.causal}")
    for name, expected in _UNUSED.items():
        if not _is_unused(metadata, name):
            raise RuntimeError(f"metadata.{name}: expected {expected[-1]}, got {getattr(metadata, name)}")


class _Step:
    """The halves' metadata of the running step, by the step's metadata and the half's tokens. Layers of one kind share them."""

    def __init__(self) -> None:
        self._context: weakref.ref[ForwardContext] | None = None
        self._halves: dict[tuple[int, int, int], tuple[Any, Any]] = {}

    def half(self, metadata: Any, begin: int, tokens: int) -> Any:
        context = get_forward_context()
        if self._context is None or self._context() is not context:
            self._context, self._halves = weakref.ref(context), {}
        key = (id(metadata), begin, tokens)
        if key not in self._halves:
            self._halves[key] = metadata, half_of(metadata, begin, tokens)
        return self._halves[key][1]


_step = _Step()


def attend_half(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer_name: LayerNameType,
    begin: int,
    value_head_dim: int,
    dtype: torch.dtype,
    write: bool,
    after: list[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of tokens from ``begin`` on, ``[tokens, heads, head_dim]``, and an empty tensor.

    The empty tensor says that these tokens are in the cache.

    Args:
        write: Whether the layer has a cache of its own, into which ``key`` and ``value`` are written.
        after: The empty tensors that the calls for earlier tokens returned.
    """
    metadata, layer, cache, slots = get_attention_context(_resolve_layer_name(layer_name))
    tokens, heads, _ = query.shape
    own = None if slots is None or not write else slots[begin : begin + tokens]
    if own is not None and own.numel():
        layer.impl.do_kv_cache_update(layer, key, value, cache, own)
    half = None if metadata is None else _step.half(metadata, begin, tokens)
    # A padded step's last rows have no queries, so no kernel writes them.
    new = query.new_zeros if getattr(half, "padded", False) else query.new_empty
    output = new((tokens, heads, value_head_dim), dtype=dtype)
    if half is None or half.num_actual_tokens:
        layer.impl.forward(layer, query, key, value, cache, half, output=output)
    return output, query.new_empty(0)


def _attend_half_fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer_name: LayerNameType,
    begin: int,
    value_head_dim: int,
    dtype: torch.dtype,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, _ = query.shape
    return query.new_empty((tokens, heads, value_head_dim), dtype=dtype), query.new_empty(0)


direct_register_custom_op(
    "vllm_attention_half", attend_half, mutates_args=[], fake_impl=_attend_half_fake, target_lib=library
)


def _directly(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`attend_half`, out of sight of a mode that watches operators.

    torch watches the operators of compiled code's first call, and FlashAttention 3's fails while watched. We believe that the
    reason are undefined tensors among those that it returns. The dispatcher shows a mode this operator alone.
    """
    if compat.operators_are_watched():
        return torch.ops.tw_compile.vllm_attention_half.default(*arguments)
    return attend_half(*arguments)


callable_directly(torch.ops.tw_compile.vllm_attention_half.default, _directly)
