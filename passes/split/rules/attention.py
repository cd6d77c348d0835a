"""The token rule of attention: whole requests, or the prefix and the suffix of a sequence.

    half 1:  attention(q1, k1, v1), causal
    half 2:  attention(q2, [k1, k2], [v1, v2]), causal from the bottom right: its query i sees keys 0 to first + i

Half 2 needs keys and values of half 1, which exist before half 1's attention. It needs nothing of the result of half 1's
attention. ``is_causal`` of SDPA is aligned to the top left, and so are the kernels behind it, except one. So the suffix needs
another call:

    flash      flash itself, which aligns to the bottom right (since FlashAttention 2.1)
    efficient  its inner operator, with the mask type of the bottom right
    cuDNN      a kernel of our own, attention_suffix, where that pays (planning.suffix); it then also computes half 1. Else
               two merged calls of cuDNN, as torch's operator has no way to ask cuDNN for the bottom right
    CPU        a mask that depends on sizes alone, made once a graph; the same for an SDPA that is not decomposed

The first two are what ``torch.nn.attention.bias.causal_lower_right`` calls. Of two cuDNN calls, one attends to the earlier
keys, none of which is hidden. The other attends to the suffix's own keys, which are as many as its queries. Each result is
weighted by the sum of its exponentials. A given mask is sliced, if it provably hides later tokens (``causal_mask``); padding in
the mask stays as it is. Where a half ends inside of one of several requests, it makes one call for its whole requests and one
for its part of the cut request.
FlexAttention joins, as its block masks are functions.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from tw_compile import compat
from tw_compile.graph.predicates import aten, same_size
from tw_compile.kernels.attention.suffix import DTYPES, attention_suffix
from tw_compile.passes.reasons import JoinReason
from tw_compile.passes.split.analysis.causal_mask import objection_to
from tw_compile.passes.split.analysis.layout import HalfBuilder, Rows, RowWise, Slice, Verdict
from tw_compile.passes.split.rules.registry import OperatorCall, declare_attention, token_rule
from tw_compile.planning.suffix import pays

SDPA = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
    aten.scaled_dot_product_attention.default,
)

declare_attention(
    *SDPA,
    aten._efficient_attention_forward.default,
    aten._flash_attention_forward.default,
    attention_suffix,
    "higher_order::flex_attention",
)

CAUSAL_FROM_BOTTOM_RIGHT = 2
"""``custom_mask_type`` of ``aten._efficient_attention_forward``, as torch.nn.attention.bias.CausalVariant.LOWER_RIGHT."""

_MASKS = ("attn_bias", "attn_mask")
_TURNED = [0, 2, 1, 3]


@token_rule(*SDPA)
def _attention(call: OperatorCall) -> Verdict:
    """Queries are ``[batch, heads, seq, head_dim]``. Requests don't see each other; a token sees those before it in its own."""
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
def _flex_attention(call: OperatorCall) -> Verdict:
    return call.join(JoinReason.ATTENTION_MASK, "a block mask says what is seen by whole blocks")


def _whole_requests(call: OperatorCall, rows: Rows) -> Verdict:
    query, key, value = call.args[:3]
    slices: dict[fx.Node, Slice] = {}
    mask = _mask(call)
    for one in (key, value, *(() if mask is None else (mask,))):
        given = call.rows(one)
        # A mask with fewer dims than the queries has no batch dim: its rows are those of heads, queries or keys.
        if given is not None and not (given.same_as(rows) and len(call.shape(one)) == len(call.shape(query))):
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


def _has_batch(call: OperatorCall, mask: fx.Node, rows: Rows) -> bool:
    """Whether a mask differs between requests: it has a batch dim, which is not only there to be broadcast."""
    shape = call.shape(mask)
    return len(shape) == len(call.shape(call.args[0])) and not same_size(shape[rows.dim], 1)


def _mask(call: OperatorCall) -> Any:
    names = {argument.name for argument in call.node.target._schema.arguments}  # type: ignore[union-attr]
    return next((call.argument(name) for name in _MASKS if name in names), None)


def _prefix_and_suffix(call: OperatorCall, rows: Rows) -> Verdict:
    key, value = call.args[1:3]
    for one in (key, value):
        given = call.rows(one)
        agrees = call.layout(one) is None and call.fits(one, rows) if given is None else given.same_as(rows)
        if not agrees:
            return call.join(JoinReason.ATTENTION, "keys or values are not those of the queries' tokens")
    mask, causal = _mask(call), call.argument("is_causal")
    seq = call.shape(call.args[0])[-2]
    if rows.outer is not None and not (isinstance(call.units, int) and isinstance(seq, int)):
        return call.join(
            JoinReason.ATTENTION_REQUESTS, "a half ends inside of one of several requests of unknown length"
        )
    if mask is not None:
        objection = _objection_to(call, mask)
        if objection is not None:
            return call.join(JoinReason.ATTENTION_MASK, f"{mask.name} {objection}")
    elif not causal:
        return call.join(JoinReason.ATTENTION, "tokens see later ones")
    attend_suffix = suffix_of(call)
    if attend_suffix is None:
        return call.join(JoinReason.ATTENTION_KERNEL, "no kernel known to align its causal mask to the bottom right")
    if call.join_attention:
        return call.join(JoinReason.ATTENTION_PLANNED, "once for all tokens is predicted to be faster")

    def build(builder: HalfBuilder, half: int) -> fx.Node:
        if rows.outer is not None:
            return _requests(call, builder, half, rows, attend_suffix)
        query = builder.rows(call.args[0], half, rows)

        def seen() -> Pair:
            return [builder.rows_until(one, half, rows) for one in (key, value)]

        def parts() -> tuple[Pair, Pair]:
            earlier, own = ([builder.rows(one, part, rows) for one in (key, value)] for part in (0, 1))
            return earlier, own

        if half == 0:
            return _attend_prefix(call, builder, query, seen(), None, builder.units[0])
        return attend_suffix(call, builder, Suffix(*builder.units, query, seen, parts))

    results = call.node.meta["val"]
    several = not isinstance(results, torch.Tensor)
    return RowWise((rows, *(None,) * (len(results) - 1)) if several else rows, build=build)


def _objection_to(call: OperatorCall, mask: fx.Node) -> str | None:
    if call.argument("is_causal"):
        return "is given beside is_causal"
    if not same_size(call.shape(mask)[-1], call.shape(call.args[0])[-2]):
        return "is not of the queries' tokens"
    # A mask that was split along its keys, as padding is, is put together again; it needs nothing of the halves' tokens.
    layout = call.layout(mask)
    if layout is not None and (not isinstance(layout, Rows) or layout.order is not None):
        return "means something only within its half"
    return objection_to(mask)


Pair = Sequence[fx.Node]
"""Keys and values."""


@dataclass(frozen=True)
class Suffix:
    """The last ``queries`` of a sequence of ``keys`` tokens, behind ``begin`` others, in half 2; sizes are numbers or nodes.

    ``seen`` gives the keys and values of the whole sequence, which it joins if needed. ``parts`` gives those of the other
    tokens, and those of the suffix. ``request`` is the sequence's number, if there are several requests.
    """

    begin: Any
    queries: Any
    keys: Any
    query: fx.Node
    seen: Callable[[], Pair]
    parts: Callable[[], tuple[Pair, Pair]]
    request: int | None = None


_AttendSuffix = Callable[[OperatorCall, HalfBuilder, Suffix], fx.Node]


def _requests(call: OperatorCall, builder: HalfBuilder, half: int, rows: Rows, attend_suffix: _AttendSuffix) -> fx.Node:
    """Attention to whole requests in one call, and to the half's part of the cut request in another.

    Operands and result are ``[1, heads, tokens of the half, head_dim]``.
    """
    shapes = [call.shape(one) for one in call.args[:3]]
    seq = shapes[0][2]
    first, second, _ = builder.units
    cut, part = divmod(first, seq)
    own = [builder.rows(one, half, rows) for one in call.args[:3]]

    def between(node: fx.Node, begin: int, end: int) -> fx.Node:
        return builder.call(half, aten.slice.Tensor, node, 2, begin, end)

    pieces = []
    if part and half == 1:
        rest = seq - part
        earlier = [between(builder.rows(one, 0, rows), first - part, first) for one in call.args[1:3]]
        query, *later = (between(one, 0, rest) for one in own)

        def seen() -> Pair:
            return [builder.call(half, aten.cat.default, list(pair), 2) for pair in zip(earlier, later, strict=True)]

        suffix = Suffix(part, rest, seq, query, seen, lambda: (earlier, later), cut)
        pieces.append(attend_suffix(call, builder, suffix))
    begin, end = (0, first - part) if half == 0 else (-first % seq, second)
    count = (end - begin) // seq
    if count:
        whole = [
            builder.call(half, aten.reshape.default, between(one, begin, end), [shape[1], count, seq, shape[3]])
            for one, shape in zip(own, shapes, strict=True)
        ]
        query, *others = (builder.call(half, aten.permute.default, one, [1, 0, 2, 3]) for one in whole)
        begins = 0 if half == 0 else cut + bool(part)
        masked = _mask_part(call, builder, range(begins, begins + count), 0, seq)
        made = _attend(call, builder, half, query, others, **masked)
        made = builder.call(half, aten.permute.default, made, [1, 0, 2, 3])
        pieces.append(builder.call(half, aten.reshape.default, made, [1, shapes[0][1], count * seq, shapes[2][3]]))
    if part and half == 0:
        query, *others = [between(one, end, first) for one in own]
        pieces.append(_attend_prefix(call, builder, query, others, range(cut, cut + 1), part))
    return pieces[0] if len(pieces) == 1 else builder.call(half, aten.cat.default, pieces, 2)


def suffix_of(call: OperatorCall) -> _AttendSuffix | None:
    """The function that computes attention where the queries are the last tokens of the keys; None if none is proven to."""
    target = call.node.target
    if _mask(call) is not None:
        return _by_given_mask
    if target is aten._scaled_dot_product_flash_attention.default:
        return suffix_by_itself
    if target is aten._scaled_dot_product_cudnn_attention.default:
        # With this variable set, torch lays out log-sum-exps differently from its fake tensors, and so from Inductor's code.
        return None if os.environ.get("TORCH_CUDNN_SDPA_AVOID_RECOMPILE") == "1" else _by_own_kernel_or_merging
    if target is aten._scaled_dot_product_efficient_attention.default:
        return _by_inner_efficient
    if target in (aten._scaled_dot_product_flash_attention_for_cpu.default, aten.scaled_dot_product_attention.default):
        return _by_mask
    return None


def _again(
    call: OperatorCall, builder: HalfBuilder, half: int, query: fx.Node, others: Pair, **changes: Any
) -> fx.Node:
    """The same operator on these operands."""
    key, value = others
    args, kwargs = call.with_arguments(query=query, key=key, value=value, **changes)
    return builder.call(half, call.node.target, *args, **kwargs)


def _attend(
    call: OperatorCall, builder: HalfBuilder, half: int, query: fx.Node, others: Pair, **changes: Any
) -> fx.Node:
    return _first(builder, half, _again(call, builder, half, query, others, **changes))


def _first(builder: HalfBuilder, half: int, made: fx.Node) -> fx.Node:
    if isinstance(made.meta["val"], torch.Tensor):
        return made
    return builder.call(half, operator.getitem, made, 0)


def _attend_prefix(
    call: OperatorCall, builder: HalfBuilder, query: fx.Node, others: Pair, requests: range | None, end: Any
) -> fx.Node:
    """Attention of the first tokens of a sequence, up to ``end``, in half 1; ``requests`` as for :func:`_mask_part`."""
    if _own_kernel_pays(call, query, ()):
        return builder.call(0, attention_suffix, query, *others, scale=call.argument("scale"))
    return _attend(call, builder, 0, query, others, **_mask_part(call, builder, requests, 0, end))


def _own_kernel_pays(call: OperatorCall, query: fx.Node, earlier: Pair) -> bool:
    """Whether ``attention_suffix`` computes the attention of queries behind the tokens of ``earlier`` keys.

    If sizes are not known, their bounds decide.
    """
    if call.node.target is not aten._scaled_dot_product_cudnn_attention.default or _mask(call) is not None:
        return False
    given, value = query.meta["val"], call.args[2].meta["val"]
    seq, head_dim = given.shape[-2:]
    scale = call.argument("scale")
    if given.dtype not in DTYPES or not same_size(head_dim, value.shape[-1]) or (scale is not None and scale <= 0.0):
        return False
    keys = seq + sum(one.meta["val"].shape[-2] for one in earlier[:1])
    return pays(keys, head_dim, compat.statically_known_true)


def suffix_by_itself(call: OperatorCall, builder: HalfBuilder, suffix: Suffix) -> fx.Node:
    return _attend(call, builder, 1, suffix.query, suffix.seen())


def _by_own_kernel_or_merging(call: OperatorCall, builder: HalfBuilder, suffix: Suffix) -> fx.Node:
    earlier, own = suffix.parts()
    if _own_kernel_pays(call, suffix.query, earlier):
        return builder.call(1, attention_suffix, suffix.query, *own, *earlier, scale=call.argument("scale"))
    return _by_merging(call, builder, suffix)


def _by_merging(call: OperatorCall, builder: HalfBuilder, suffix: Suffix) -> fx.Node:
    """Attention to disjoint keys, put together in float32 by natural log-sum-exps, ``[batch, heads, queries, 1]``.

    This is how FlashAttention-2 combines blocks (Dao, 2023); torch's context parallelism does the same to results of cuDNN.
    cuDNN rounds both results to the query's dtype first, so the error is that of one more rounding. A single query sees all
    keys.
    """
    if suffix.queries == 1:
        return _attend(call, builder, 1, suffix.query, suffix.seen(), is_causal=False)

    def compute(target: Any, *args: Any) -> fx.Node:
        return builder.call(1, target, *args)

    # Permuted to [batch, queries, heads, head_dim], as later nodes read it: Inductor lays out results by their dims.
    results = []
    for others, causal in zip(suffix.parts(), (False, True), strict=True):
        made = _again(call, builder, 1, suffix.query, others, is_causal=causal, compute_log_sumexp=True)
        both = (compute(operator.getitem, made, index) for index in (0, 1))
        results.append([compute(aten.permute.default, one, _TURNED) for one in both])
    (earlier, earlier_sum), (own, own_sum) = results
    difference = compute(aten.sub.Tensor, earlier_sum, own_sum)
    # Two weights, as 1 - sigmoid(x) has no digits left where x is large.
    shares = [compute(aten.sigmoid.default, one) for one in (difference, compute(aten.neg.default, difference))]
    weighted = [compute(aten.mul.Tensor, *pair) for pair in zip((earlier, own), shares, strict=True)]
    merged = compute(aten.add.Tensor, *weighted)
    rounded = compute(torch.ops.prims.convert_element_type.default, merged, earlier.meta["val"].dtype)
    return compute(aten.permute.default, rounded, _TURNED)


def _by_inner_efficient(call: OperatorCall, builder: HalfBuilder, suffix: Suffix) -> fx.Node:
    """The inner operator takes ``[batch, seq, heads, head_dim]``."""
    turned = [builder.call(1, aten.permute.default, one, _TURNED) for one in (suffix.query, *suffix.seen())]
    made = builder.call(
        1,
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
    return builder.call(1, aten.permute.default, _first(builder, 1, made), _TURNED)


def _by_mask(call: OperatorCall, builder: HalfBuilder, suffix: Suffix) -> fx.Node:
    sizes = (suffix.begin, suffix.queries, suffix.keys)
    key = ("suffix", call.node.target, suffix.query.meta["val"].dtype, sizes)
    mask = builder.once(key, lambda: _suffix_mask(call, builder, *sizes))
    return _attend(call, builder, 1, suffix.query, suffix.seen(), is_causal=False, attn_mask=mask)


def _suffix_mask(call: OperatorCall, builder: HalfBuilder, begin: Any, queries: Any, keys: Any) -> fx.Node:
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


def _by_given_mask(call: OperatorCall, builder: HalfBuilder, suffix: Suffix) -> fx.Node:
    requests = None if suffix.request is None else range(suffix.request, suffix.request + 1)
    masked = _mask_part(call, builder, requests, suffix.begin, suffix.keys)
    return _attend(call, builder, 1, suffix.query, suffix.seen(), **masked)


def _mask_part(
    call: OperatorCall, builder: HalfBuilder, requests: range | None, begin: Any, end: Any
) -> dict[str, fx.Node]:
    """The mask argument for queries from ``begin`` to before ``end``; empty if the call is given no mask.

    Keys from ``end`` on are left out, because the mask hides them. ``requests`` None: all requests.
    """
    names = {declared.name for declared in call.node.target._schema.arguments}  # type: ignore[union-attr]
    mask = _mask(call)
    if mask is None:
        return {}
    shape = call.shape(mask)
    rank, seq = len(shape), shape[-1]
    # cuDNN wants the address of a mask to be aligned. The address of a row need not be aligned.
    copied = call.node.target is aten._scaled_dot_product_cudnn_attention.default

    def part() -> fx.Node:
        made = whole = builder.whole(mask)
        if requests is not None and rank == 4 and shape[0] not in (1, len(requests)):
            made = builder.call(None, aten.slice.Tensor, made, 0, requests.start, requests.stop)
        if (begin, end) != (0, seq):
            made = builder.call(None, aten.slice.Tensor, made, rank - 2, begin, end)
        if end != seq:
            made = builder.call(None, aten.slice.Tensor, made, rank - 1, 0, end)
        return builder.call(None, aten.clone.default, made) if copied and made is not whole else made

    made = builder.once((mask, requests, begin, end, copied), part)
    return {name: made for name in _MASKS if name in names}
