"""Token rules of operators that move, take apart and put together."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx

from tw_compile.graph.predicates import aten, same_size
from tw_compile.passes.reasons import JoinReason
from tw_compile.passes.split.analysis.layout import HalfSize, Join, Local, Rows, RowWise, Size, Slice, Verdict, reshaped
from tw_compile.passes.split.rules.registry import OperatorCall, token_rule

_c10d = torch.ops._c10d_functional


@token_rule(operator.getitem)
def _getitem(call: OperatorCall) -> Verdict:
    source, index = call.args
    call.considered.add(source)
    verdict = call.verdict_of(source)
    if verdict is None or not isinstance(verdict.out, tuple) or not isinstance(index, int):
        return call.join(JoinReason.UNKNOWN_OPERATOR)
    return RowWise(verdict.out[index])


@token_rule(
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.contiguous.default,
    aten._to_copy.default,
    _c10d.wait_tensor.default,
)
def _unchanged(call: OperatorCall) -> Verdict:
    """The same rows in the same places. ``wait_tensor`` also hands on what a gather or a routing has made."""
    return RowWise(call.layout(call.args[0]))


@token_rule(aten.full_like.default, aten.zeros_like.default, aten.ones_like.default)
def _like(call: OperatorCall) -> Verdict:
    """The result has as many rows. A result like a permutation is not a permutation, so such a call joins."""
    rows = call.rows(call.args[0])
    return call.join(JoinReason.ROUTING_NOT_UNDONE) if rows is None else RowWise(rows)


@token_rule(aten.view.default, aten.reshape.default, aten._unsafe_view.default)
def _view(call: OperatorCall) -> Verdict:
    source = call.args[0]
    rows = call.rows(source)
    if rows is None:
        return call.join(JoinReason.RESHAPES_TOKENS)
    shape = call.shape(call.node)
    out = reshaped(rows, call.shape(source), shape, call.units)
    if out is None:
        return call.join(JoinReason.RESHAPES_TOKENS, f"{list(call.shape(source))} to {list(shape)}")
    sizes: list[Any] = list(call.args[1])
    if out.outer is not None:
        sizes[out.outer] = 1
    sizes[out.dim] = HalfSize(out.per_unit)
    return RowWise(out, args=(source, sizes))


@token_rule(aten.unsqueeze.default)
def _unsqueeze(call: OperatorCall) -> Verdict:
    source, dim = call.args
    place = dim % len(call.shape(call.node))
    return _renumbered(call, source, lambda old: old + (old >= place))


@token_rule(aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(call: OperatorCall) -> Verdict:
    source, dims = call.args
    shape = call.shape(source)
    given = [dims] if isinstance(dims, int) else dims
    gone = {dim % len(shape) for dim in given if same_size(shape[dim], 1)}
    verdict = _renumbered(call, source, lambda old: None if old in gone else old - sum(one < old for one in gone))
    if isinstance(verdict, Join) or len(gone) == len({dim % len(shape) for dim in given}):
        return verdict
    # A half may have one entry where the whole has several: it must keep that dim, too.
    if gone:
        return replace(verdict, args=(source, sorted(gone)))
    rows = call.rows(source)
    assert rows is not None
    return replace(verdict, build=lambda halves, half: halves.rows(source, half, rows))


@token_rule(aten.permute.default)
def _permute(call: OperatorCall) -> Verdict:
    source, order = call.args
    rank = len(call.shape(source))
    places = [dim % rank for dim in order]
    return _renumbered(call, source, places.index)


@token_rule(aten.transpose.int)
def _transpose(call: OperatorCall) -> Verdict:
    source, *pair = call.args
    a, b = (dim % len(call.shape(source)) for dim in pair)
    return _renumbered(call, source, lambda old: {a: b, b: a}.get(old, old))


@token_rule(aten.t.default)
def _t(call: OperatorCall) -> Verdict:
    rank = len(call.shape(call.node))
    return _renumbered(call, call.args[0], lambda old: rank - 1 - old)


def _renumbered(call: OperatorCall, source: Any, place: Callable[[int], int | None]) -> Verdict:
    rows = call.rows(source)
    if rows is None:
        return call.join(JoinReason.RESHAPES_TOKENS)
    dim, outer = place(rows.dim), None if rows.outer is None else place(rows.outer)
    if dim is None or (rows.outer is not None and (outer is None or outer > dim)):
        return call.join(JoinReason.RESHAPES_TOKENS)
    return RowWise(rows.moved(dim, outer))


@token_rule(aten.expand.default)
def _expand(call: OperatorCall) -> Verdict:
    source, sizes = call.args[:2]
    rows = call.rows(source)
    if rows is None:
        return call.join(JoinReason.RESHAPES_TOKENS)
    before, after = call.shape(source), call.shape(call.node)
    shift = len(after) - len(before)
    kept = {dim + shift for dim in range(len(before)) if same_size(before[dim], after[dim + shift])}
    out = rows.moved(rows.dim + shift, None if rows.outer is None else rows.outer + shift)
    new_sizes = [-1 if dim in kept else size for dim, size in enumerate(sizes)]
    return RowWise(out, args=(source, new_sizes, *call.args[2:]))


@token_rule(
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.chunk.default,
    aten.flip.default,
    aten.roll.default,
    aten.constant_pad_nd.default,
)
def _part_of_other_dims(call: OperatorCall) -> Verdict:
    source = call.args[0]
    found = call.layout(source)
    if isinstance(found, Local):
        return _split_by_rank(call, source, found)
    if found is None or {found.dim, found.outer} & _dims_acted_on(call, len(call.shape(source))):
        return call.join(JoinReason.SELECTS_TOKENS)
    results = call.node.meta["val"]
    return RowWise((found,) * len(results) if isinstance(results, list | tuple) else found)


@token_rule(aten.slice_scatter.default)
def _into_part_of_another_dim(call: OperatorCall) -> Verdict:
    common = alike(call, call.args[:2])
    if common is None or call.argument("dim") % len(call.shape(call.node)) in (common[0].dim, common[0].outer):
        return call.join(JoinReason.OPERANDS_DISAGREE)
    return RowWise(*common)


def _dims_acted_on(call: OperatorCall, rank: int) -> set[int | None]:
    target = call.node.target
    if target is aten.constant_pad_nd.default:
        return {rank - 1 - index for index in range((len(call.argument("pad")) + 1) // 2)}
    dims = call.argument("dims") if target in (aten.flip.default, aten.roll.default) else call.argument("dim")
    if target is aten.roll.default and not dims:
        return set(range(rank))
    return {dim % rank for dim in ([dims] if isinstance(dims, int) else dims)}


def _split_by_rank(call: OperatorCall, source: Any, gathered: Local) -> Verdict:
    """The verdict on taking gathered values apart again by rank."""
    rows, given = gathered.rows, call.shape(gathered.owner.args[0])
    size = call.argument("split_size") if call.node.target is aten.split.Tensor else None
    size = size.meta["val"] if isinstance(size, fx.Node) else size
    if gathered.role != "gathered" or size is None or call.argument("dim") != 0 or not same_size(size, given[0]):
        return call.join(JoinReason.SELECTS_TOKENS, "not taken apart by rank")
    args, kwargs = call.with_arguments(split_size=1 if rows.outer == 0 else HalfSize(rows.per_unit))
    return RowWise((rows,) * len(call.node.meta["val"]), {}, args, kwargs)


@token_rule(_c10d.all_gather_into_tensor.default)
def _all_gather(call: OperatorCall) -> Verdict:
    """The operator concatenates all ranks' values along dim 0."""
    rows = call.rows(call.args[0])
    if rows is None or rows.order is not None:
        return call.join(JoinReason.RESHAPES_TOKENS)
    return RowWise(Local("gathered", call.node, rows) if 0 in (rows.dim, rows.outer) else rows)


@token_rule(aten.select.int)
def _select(call: OperatorCall) -> Verdict:
    source, dim = call.args[:2]
    rows, place = call.rows(source), dim % len(call.shape(source))
    if rows is None or place in (rows.dim, rows.outer):
        return call.join(JoinReason.SELECTS_TOKENS)
    return _renumbered(call, source, lambda old: old - (old > place))


@token_rule(aten.unbind.int)
def _unbind(call: OperatorCall) -> Verdict:
    source = call.args[0]
    rows, place = call.rows(source), call.argument("dim") % len(call.shape(source))
    if rows is None or place in (rows.dim, rows.outer):
        return call.join(JoinReason.SELECTS_TOKENS)
    outer = None if rows.outer is None else rows.outer - (rows.outer > place)
    return RowWise((rows.moved(rows.dim - (rows.dim > place), outer),) * len(call.node.meta["val"]))


@token_rule(aten.cat.default)
def _cat(call: OperatorCall) -> Verdict:
    parts = call.args[0]
    place = call.argument("dim") % len(call.shape(call.node))
    common = alike(call, parts)
    if common is None or place in (common[0].dim, common[0].outer):
        return call.join(JoinReason.OPERANDS_DISAGREE)
    return RowWise(*common)


@token_rule(aten.stack.default)
def _stack(call: OperatorCall) -> Verdict:
    place = call.argument("dim") % len(call.shape(call.node))
    common = alike(call, call.args[0])
    if common is None:
        return call.join(JoinReason.OPERANDS_DISAGREE)
    rows, slices = common
    outer = None if rows.outer is None else rows.outer + (rows.outer >= place)
    return RowWise(rows.moved(rows.dim + (rows.dim >= place), outer), slices)


def alike(call: OperatorCall, operands: Sequence[fx.Node]) -> tuple[Rows, dict[fx.Node, Slice]] | None:
    """The rows that operands of equal shape (but for a dim without tokens) share, and which of them are to be sliced."""
    layouts = [layout for one in operands if (layout := call.layout(one)) is not None]
    found = [layout for layout in layouts if isinstance(layout, Rows)]
    if not found or len(found) < len(layouts) or not all(rows.same_as(found[0]) for rows in found):
        return None
    whole = [one for one in operands if call.layout(one) is None]
    if not all(call.fits(one, found[0]) for one in whole):
        return None
    return found[0], {one: Slice(found[0]) for one in whole}


def aligned_slice(
    rows: Rows, rank: int, operand_shape: tuple[Size, ...], sizes: tuple[Size, Size]
) -> Slice | str | None:
    """How a half reads a whole operand that is broadcast against ``rows`` of a result with ``rank`` dims.

    ``sizes`` are those of the result at ``rows.dim`` and ``rows.outer`` (1 without ``rows.outer``). None: the half reads all of
    the operand, which does not vary with the token. A string says why the half can't read the operand.
    """
    shift = rank - len(operand_shape)
    padded = (1,) * shift + operand_shape
    varies = not same_size(padded[rows.dim], 1)
    if rows.outer is not None:
        varies = varies or not same_size(padded[rows.outer], 1)
    if not varies:
        return None
    if rows.order is not None:
        return "a whole operand varies with the token, in another order"
    if rows.outer is None:
        return Slice(rows.moved(rows.dim - shift, None))
    full = list(padded)
    full[rows.dim], full[rows.outer] = sizes[0], sizes[1]
    # Expanding adds leading dims: those between the batch and the operand's own first dim.
    start = min(shift, rows.outer)
    shape = tuple(full[start:])
    expanded = start < shift or not all(same_size(a, b) for a, b in zip(full, padded, strict=True))
    return Slice(rows.moved(rows.dim - start, rows.outer - start), shape if expanded else None)
