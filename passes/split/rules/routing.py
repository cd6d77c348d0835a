"""Token rules of routing to experts: sort by expert, compute group by group, and put the rows back.

    ids [tokens, k] -> view [tokens * k] -> sort -> x[permutation // k] -> grouped GEMMs -> [inverse permutation] -> sum over k

A half's sorted rows and group sizes are not slices of the whole graph's. But the rows that are put back are such slices: each
row is computed from its token and its expert alone, wherever the sort has put it. A half routes its own tokens, so the values
in between are :class:`Local` to the half or have an ``order``. The proof needs the permutation to be undone by its own inverse,
and the groups to be those of the keys that were sorted.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch

from tw_compile.graph.predicates import aten, is_call, peel_views, same_size
from tw_compile.passes.reasons import JoinReason
from tw_compile.passes.split.analysis.layout import HalfCall, HalfSize, Local, Rows, RowWise, Verdict
from tw_compile.passes.split.rules.compute import along_one_dim, lookup, pointwise
from tw_compile.passes.split.rules.registry import OperatorCall, token_rule

_prims = torch.ops.prims


@token_rule(aten.sort.default, aten.sort.stable)
def _sort(call: OperatorCall) -> Verdict:
    source = call.args[0]
    found = call.layout(source)
    if isinstance(found, Local):
        # Sorting a permutation gives, as indices, the inverse of the permutation.
        if found.role != "permutation" or call.argument("descending"):
            return call.join(JoinReason.ROUTING_NOT_UNDONE)
        return RowWise((replace(found, role="sorted_permutation"), replace(found, role="inverse")))
    # In descending order, rows would not lie in the groups of their keys, which count up: see _histc.
    ascending = not call.argument("descending")
    if found is not None and len(call.shape(source)) == 1 and found.order is None and ascending:
        return RowWise((replace(found, order=call.node), Local("permutation", call.node, found)))
    return along_one_dim(call)


@token_rule(aten.div.Tensor_mode, aten.floor_divide.default)
def _divide(call: OperatorCall) -> Verdict:
    """The unit entry that a sorted entry belongs to."""
    source, divisor = call.args[:2]
    found = call.layout(source)
    if not isinstance(found, Local):
        return pointwise(call)
    floors = call.node.target is aten.floor_divide.default or call.node.kwargs.get("rounding_mode") == "floor"
    if found.role != "permutation" or not floors or not isinstance(divisor, int) or divisor < 1:
        return call.join(JoinReason.ROUTING_NOT_UNDONE)
    return RowWise(replace(found, role="entry_units", divisor=divisor))


@token_rule(aten.index.Tensor)
def _index(call: OperatorCall) -> Verdict:
    source, indices = call.args
    by = call.layout(indices[0]) if len(indices) == 1 else None
    if not isinstance(by, Local):
        return lookup(call)
    rows = call.rows(source)
    if rows is not None and rows.dim == 0 and rows.outer is None:
        entries = by.rows.per_unit
        if by.role in ("permutation", "entry_units") and rows.order is None:
            per_unit = rows.per_unit * (by.divisor if by.role == "entry_units" else 1)
            if same_size(per_unit, entries):
                return RowWise(Rows(0, entries, None, by.owner))
        if by.role == "inverse" and rows.order is by.owner and same_size(rows.per_unit, entries):
            return RowWise(replace(rows, order=None))
    return call.join(JoinReason.ROUTING_NOT_UNDONE)


@token_rule(aten.index_put_.default, aten.index_put.default)
def _index_put(call: OperatorCall) -> Verdict:
    """``inverse[permutation] = 0, 1, 2, ...``: each half makes its own, of its own size."""
    target, indices, values = call.args[:3]
    by = call.layout(indices[0]) if len(indices) == 1 else None
    if isinstance(by, Local) and by.role == "permutation" and not call.argument("accumulate"):
        length = call.shape(call.node)
        counts_up = is_call(values, _prims.iota.default) and values.kwargs["start"] == 0
        fresh = is_call(target, aten.empty.memory_format) and len(target.users) == 1
        if (
            len(length) == 1
            and same_size(length[0], by.rows.per_unit * call.units)
            and counts_up
            and values.kwargs["step"] == 1
            and same_size(call.shape(values)[0], length[0])
            and fresh
        ):
            size = HalfSize(by.rows.per_unit)
            empty = HalfCall(target.target, ([size], *target.args[1:]), target.kwargs)
            count = HalfCall(values.target, (size,), values.kwargs)
            return RowWise(replace(by, role="inverse"), args=(empty, indices, count))
    return call.join(JoinReason.ROUTING_NOT_UNDONE if isinstance(by, Local) else JoinReason.SELECTS_TOKENS)


@token_rule(aten.histc.default)
def _histc(call: OperatorCall) -> Verdict:
    """How many entries each expert has, if the bins are the experts."""
    keys = call.args[0]
    rows = call.rows(keys)
    bins, low, high = call.argument("bins"), call.argument("min"), call.argument("max")
    while is_call(keys, _prims.convert_element_type.default, aten._to_copy.default):
        keys = keys.args[0]
    sort = rows.order if rows is not None else None
    if sort is not None and is_call(keys, operator.getitem) and keys.args == (sort, 0) and (low, high) == (0, bins - 1):
        chosen = peel_views(sort.all_input_nodes[0])
        if is_call(chosen, operator.getitem) and is_call(chosen.args[0], aten.topk.default) and chosen.args[1] == 1:
            topk: Any = chosen.args[0]
            scores = topk.args[0].meta["val"]
            along = topk.args[2] if len(topk.args) > 2 else -1
            if same_size(scores.shape[along], bins):
                assert rows is not None
                return RowWise(Local("group_sizes", sort, replace(rows, order=None)))
    return call.join(JoinReason.REDUCES_TOKENS)


@token_rule(aten.cumsum.default)
def _cumsum(call: OperatorCall) -> Verdict:
    found = call.layout(call.args[0])
    if isinstance(found, Local) and found.role == "group_sizes":
        return RowWise(replace(found, role="group_ends"))
    return along_one_dim(call)


@token_rule("aten::_grouped_mm", "transformers::grouped_mm_fallback")
def _grouped_mm(call: OperatorCall) -> Verdict:
    """Row ``i`` is multiplied by the matrix of the group that ``i`` lies in."""
    node = call.node
    names = ("self", "mat2") if node.target is aten._grouped_mm.default else ("input", "weight")
    a, weight, ends = call.argument(names[0]), call.argument(names[1]), call.argument("offs")
    rows, groups = call.rows(a), call.layout(ends)
    if rows is None or rows.dim != 0 or rows.outer is not None or rows.order is None or call.layout(weight) is not None:
        return call.join(JoinReason.ROUTING_NOT_UNDONE)
    if not isinstance(groups, Local) or groups.role != "group_ends" or groups.owner is not rows.order:
        return call.join(JoinReason.ROUTING_NOT_UNDONE)
    if not (len(call.shape(weight)) == 3 and same_size(call.shape(weight)[0], call.shape(ends)[0])):
        return call.join(JoinReason.ROUTING_NOT_UNDONE)
    return RowWise(rows)
