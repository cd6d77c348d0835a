"""The token rule of attention: whole requests, or the prefix and the suffix of a sequence.

    half 1:  attention(q1, k1, v1), causal
    half 2:  attention(q2, [k1, k2], [v1, v2]), causal from the bottom right: its query i sees keys 0 to first + i

Half 2 needs keys and values of half 1, which exist before half 1's attention, and nothing of its result. ``is_causal`` of SDPA
is aligned to the top left, and so are the kernels behind it but for one, which makes the suffix another call:

    flash      itself, which aligns to the bottom right (since FlashAttention 2.1)
    cuDNN      flash, as torch's operator has no way to ask cuDNN for the bottom right
    efficient  its inner operator, with the mask type of the bottom right
    CPU        a mask of sizes alone, made once a graph; so does an SDPA that is not decomposed

The first and the third are what ``torch.nn.attention.bias.causal_lower_right`` calls. A mask that is given is sliced, if it
provably hides later tokens (``causal_mask``). Where a half ends inside of one of several requests, it makes one call for its
whole requests and one for its part of the cut one; with a mask that joins, and so does FlexAttention, whose block masks are
functions.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from tw_compile.graph.predicates import aten, same_size
from tw_compile.passes.base import JoinReason
from tw_compile.passes.split.causal_mask import hides_later_keys
from tw_compile.passes.split.layout import HalfBuilder, Rows, RowWise, Slice, Verdict
from tw_compile.passes.split.registry import Call, token_rule

SDPA = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
    aten.scaled_dot_product_attention.default,
)

CAUSAL_FROM_BOTTOM_RIGHT = 2
"""``custom_mask_type`` of ``aten._efficient_attention_forward``, as torch.nn.attention.bias.CausalVariant.LOWER_RIGHT."""

_END = 9223372036854775807
_MASKS = ("attn_bias", "attn_mask")


@token_rule(*SDPA)
def _attention(call: Call) -> Verdict:
    """``[batch, heads, seq, head_dim]``; requests do not see each other, within one tokens see those before them."""
    query = call.args[0]
    rows = call.rows(query)
    rank = len(call.shape(query))
    if call.argument("dropout_p") != 0.0:
        return call.join(JoinReason.ATTENTION, "dropout")
    if any(user.args[1] != 0 for user in call.node.users if not isinstance(call.node.meta["val"], torch.Tensor)):
        return call.join(JoinReason.ATTENTION, "more than the attention's output is read")
    if rows is None or rows.order is not None or rank < 3 or not same_size(rows.per_unit, 1):
        return call.join(JoinReason.ATTENTION)
    if rows.dim == 0:
        return _whole_requests(call, rows)
    if rows.dim != rank - 2 or (rows.outer is not None and (rows.outer, rank) != (0, 4)):
        return call.join(JoinReason.ATTENTION)
    return _prefix_and_suffix(call, rows)


@token_rule("higher_order::flex_attention")
def _flex_attention(call: Call) -> Verdict:
    return call.join(JoinReason.ATTENTION_MASK, "a block mask says what is seen by whole blocks")


def _whole_requests(call: Call, rows: Rows) -> Verdict:
    query, key, value = call.args[:3]
    slices: dict[fx.Node, Slice] = {}
    mask = _mask(call)
    for one in (key, value, *(() if mask is None else (mask,))):
        given = call.rows(one)
        if given is not None and not given.same_as(rows):
            return call.join(JoinReason.ATTENTION)
        if given is None and (one is not mask or _has_batch(call, mask, rows)):
            if not call.fits(one, rows):
                return call.join(JoinReason.ATTENTION)
            slices |= call.slice_of(one, rows)
    results = call.node.meta["val"]
    if isinstance(results, torch.Tensor):
        return RowWise(rows, slices)
    batch = call.shape(query)[0]
    layouts = [
        rows if isinstance(one, torch.Tensor) and one.dim() >= 3 and same_size(one.shape[0], batch) else None
        for one in results
    ]
    return RowWise(tuple(layouts), slices)


def _has_batch(call: Call, mask: fx.Node, rows: Rows) -> bool:
    """Whether a mask differs between requests: it has the dim of the batch, and not just to be broadcast."""
    shape = call.shape(mask)
    return len(shape) == 4 and not same_size(shape[rows.dim], 1)


def _mask(call: Call) -> Any:
    names = {argument.name for argument in call.node.target._schema.arguments}  # type: ignore[union-attr]
    return next((call.argument(name) for name in _MASKS if name in names), None)


def _prefix_and_suffix(call: Call, rows: Rows) -> Verdict:
    key, value = call.args[1:3]
    for one in (key, value):
        given = call.rows(one)
        agrees = call.layout(one) is None and call.fits(one, rows) if given is None else given.same_as(rows)
        if not agrees:
            return call.join(JoinReason.ATTENTION, "keys or values are not those of the queries' tokens")
    mask, causal = _mask(call), call.argument("is_causal")
    seq = call.shape(call.args[0])[-2]
    if rows.outer is not None and (mask is not None or not isinstance(call.units, int) or not isinstance(seq, int)):
        what = "with a mask" if mask is not None else "of unknown length"
        return call.join(JoinReason.ATTENTION_REQUESTS, f"a half ends inside of one of several requests {what}")
    if mask is not None:
        if causal or call.layout(mask) is not None or not hides_later_keys(mask):
            return call.join(JoinReason.ATTENTION_MASK, f"{mask.name} is not proven to hide later tokens")
        suffix: _Build | None = _masked
    elif not causal:
        return call.join(JoinReason.ATTENTION, "tokens see later ones")
    else:
        suffix = _suffix_of(call)
    if suffix is None:
        return call.join(JoinReason.ATTENTION_KERNEL, "no kernel known to align its causal mask to the bottom right")
    if call.join_attention:
        return call.join(JoinReason.ATTENTION_PLANNED, "once for all tokens is predicted to be faster")

    def build(builder: HalfBuilder, half: int) -> fx.Node:
        if rows.outer is not None:
            return _requests(call, builder, half, rows, suffix)
        make = _masked if mask is not None else _first_result if half == 0 else suffix
        first, second, tokens = builder.units
        begin, queries, count = (0, first, first) if half == 0 else (first, second, tokens)
        keys, values = (builder.rows_until(one, half, rows) for one in (key, value))
        piece = Piece(begin, queries, count, builder.rows(call.args[0], half, rows), keys, values)
        return make(call, builder, half, piece)

    results = call.node.meta["val"]
    several = not isinstance(results, torch.Tensor)
    return RowWise((rows, *(None,) * (len(results) - 1)) if several else rows, build=build)


@dataclass(frozen=True)
class Piece:
    """A piece of a sequence: ``queries`` tokens from ``begin`` on, the last of ``keys``; sizes are numbers or nodes."""

    begin: Any
    queries: Any
    keys: Any
    query: fx.Node
    key: fx.Node
    value: fx.Node


def _requests(call: Call, builder: HalfBuilder, half: int, rows: Rows, suffix: _Build) -> fx.Node:
    """Whole requests in one call, the part of the one that is cut in another.

    Operands and result are ``[1, heads, tokens of the half, head_dim]``.
    """
    shapes = [call.shape(one) for one in call.args[:3]]
    seq = shapes[0][2]
    first, second, _ = builder.units
    part = first % seq
    own = [builder.rows(one, half, rows) for one in call.args[:3]]

    def between(node: fx.Node, begin: int, end: int) -> fx.Node:
        return builder.call(half, aten.slice.Tensor, node, 2, begin, end)

    pieces = []
    if part and half == 1:
        rest = seq - part
        earlier = [between(builder.rows(one, 0, rows), first - part, first) for one in call.args[1:3]]
        query, *later = (between(one, 0, rest) for one in own)
        joined = (builder.call(half, aten.cat.default, list(pair), 2) for pair in zip(earlier, later, strict=True))
        pieces.append(suffix(call, builder, half, Piece(part, rest, seq, query, *joined)))
    begin, end = (0, first - part) if half == 0 else (-first % seq, second)
    count = (end - begin) // seq
    if count:
        whole = [
            builder.call(half, aten.reshape.default, between(one, begin, end), [shape[1], count, seq, shape[3]])
            for one, shape in zip(own, shapes, strict=True)
        ]
        query, *others = (builder.call(half, aten.permute.default, one, [1, 0, 2, 3]) for one in whole)
        made = _first_result(call, builder, half, Piece(0, seq, seq, query, *others))
        made = builder.call(half, aten.permute.default, made, [1, 0, 2, 3])
        pieces.append(builder.call(half, aten.reshape.default, made, [1, shapes[0][1], count * seq, shapes[2][3]]))
    if part and half == 0:
        query, key, value = (between(one, end, first) for one in own)
        pieces.append(_first_result(call, builder, half, Piece(0, part, part, query, key, value)))
    return pieces[0] if len(pieces) == 1 else builder.call(half, aten.cat.default, pieces, 2)


_Build = Callable[[Call, HalfBuilder, int, Piece], fx.Node]


def _suffix_of(call: Call) -> _Build | None:
    """How the attention of queries that are the last of their keys is computed; None where nothing is proven to."""
    target = call.node.target
    if target is aten._scaled_dot_product_flash_attention.default:
        return _first_result
    if target is aten._scaled_dot_product_cudnn_attention.default:
        return _by_flash if _flash_serves(call) else None
    if target is aten._scaled_dot_product_efficient_attention.default:
        return _by_inner_efficient
    if target in (aten._scaled_dot_product_flash_attention_for_cpu.default, aten.scaled_dot_product_attention.default):
        return _by_mask
    return None


def _flash_serves(call: Call) -> bool:
    """The conditions of the flash kernel that those of cuDNN do not imply, and whether the user lets it be used."""
    query, _, value = (one.meta["val"] for one in call.args[:3])
    head_dim = query.shape[-1]
    return (
        query.dtype in (torch.float16, torch.bfloat16)
        and same_size(head_dim, value.shape[-1])
        and isinstance(head_dim, int)
        and head_dim % 8 == 0
        and head_dim <= 256
        and torch.backends.cuda.flash_sdp_enabled()
    )


def _first_result(call: Call, builder: HalfBuilder, half: int, piece: Piece, **changes: Any) -> fx.Node:
    """The same operator on these operands."""
    args, kwargs = call.with_arguments(query=piece.query, key=piece.key, value=piece.value, **changes)
    return _first(builder, half, builder.call(half, call.node.target, *args, **kwargs))


def _first(builder: HalfBuilder, half: int, made: fx.Node) -> fx.Node:
    if isinstance(made.meta["val"], torch.Tensor):
        return made
    return builder.call(half, operator.getitem, made, 0)


def _by_flash(call: Call, builder: HalfBuilder, half: int, piece: Piece) -> fx.Node:
    target = aten._scaled_dot_product_flash_attention.default
    made = builder.call(half, target, piece.query, piece.key, piece.value, 0.0, True, scale=call.argument("scale"))
    return _first(builder, half, made)


def _by_inner_efficient(call: Call, builder: HalfBuilder, half: int, piece: Piece) -> fx.Node:
    """The inner operator takes ``[batch, seq, heads, head_dim]``."""
    turned = [
        builder.call(half, aten.permute.default, one, [0, 2, 1, 3]) for one in (piece.query, piece.key, piece.value)
    ]
    made = builder.call(
        half,
        aten._efficient_attention_forward.default,
        *turned,
        None,
        None,
        None,
        None,
        None,
        0.0,
        CAUSAL_FROM_BOTTOM_RIGHT,
        scale=call.argument("scale"),
    )
    return builder.call(half, aten.permute.default, _first(builder, half, made), [0, 2, 1, 3])


def _by_mask(call: Call, builder: HalfBuilder, half: int, piece: Piece) -> fx.Node:
    sizes = (piece.begin, piece.queries, piece.keys)
    key = ("suffix", call.node.target, piece.query.meta["val"].dtype, sizes)
    mask = builder.once(key, lambda: _suffix_mask(call, builder, *sizes))
    return _first_result(call, builder, half, piece, is_causal=False, attn_mask=mask)


def _suffix_mask(call: Call, builder: HalfBuilder, begin: Any, queries: Any, keys: Any) -> fx.Node:
    """``[queries, keys]``: 0, or minus infinity where the key is behind the query; for SDPA itself a bool."""
    like = call.args[0].meta["val"]

    def positions(length: Any, start: Any) -> fx.Node:
        options = {"step": 1, "dtype": torch.int64, "device": like.device, "requires_grad": False}
        return builder.call(None, torch.ops.prims.iota.default, length, start=start, **options)

    def number(of: float) -> fx.Node:
        return builder.call(None, aten.full.default, [], of, dtype=like.dtype, device=like.device, pin_memory=False)

    rows = builder.call(None, aten.unsqueeze.default, positions(queries, begin), 1)
    seen = builder.call(None, aten.le.Tensor, positions(keys, 0), rows)
    if call.node.target is aten.scaled_dot_product_attention.default:
        return seen
    return builder.call(None, aten.where.self, seen, number(0.0), number(-math.inf))


def _masked(call: Call, builder: HalfBuilder, half: int, piece: Piece) -> fx.Node:
    """With a half's rows of the given mask; half 1 without the keys behind it, which the mask hides."""
    mask = _mask(call)
    rank = len(call.shape(mask))
    first = builder.units[0]
    # cuDNN wants the address of a mask aligned, which that of a row need not be.
    copied = call.node.target is aten._scaled_dot_product_cudnn_attention.default

    def part() -> fx.Node:
        bounds = (0, first) if half == 0 else (first, _END)
        made = builder.call(None, aten.slice.Tensor, mask, rank - 2, *bounds)
        if half == 0:
            made = builder.call(None, aten.slice.Tensor, made, rank - 1, 0, first)
        return builder.call(None, aten.clone.default, made) if copied else made

    made = builder.once((mask, half, copied), part)
    names = {declared.name for declared in call.node.target._schema.arguments}  # type: ignore[union-attr]
    return _first_result(call, builder, half, piece, **{name: made for name in _MASKS if name in names})
