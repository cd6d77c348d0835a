"""Token rules of operators of hosts that treat rows independently, and of those that only look as if they did."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.fx as fx

from tw_compile.graph.predicates import aten, is_call, operator_name, same_size
from tw_compile.passes.fusion.forms import functionalised
from tw_compile.passes.operators import (
    MadeQuantOperator,
    OneScaleOperator,
    QuantOperator,
    RowWiseOperator,
    declared_as,
)
from tw_compile.passes.reasons import JoinReason
from tw_compile.passes.split.analysis.layout import HalfCall, HalfSize, Rows, RowWise, Slice, Verdict
from tw_compile.passes.split.rules.registry import OperatorCall, token_rule

_NEW = {aten.empty.memory_format, aten.full.default}
"""Operators that make a tensor of the sizes in their first argument."""


@token_rule(RowWiseOperator, enters=True)
def _row_wise(call: OperatorCall) -> Verdict:
    form = functionalised(call.node)
    operator = declared_as(RowWiseOperator, operator_name(call.node) if form is None else form.name)
    assert operator is not None, "a rule of declared operators"
    return row_wise(call, operator)


@token_rule(QuantOperator, enters=True)
def _quantisation(call: OperatorCall) -> Verdict:
    """The operator quantises by one given number for all tokens."""
    form = functionalised(call.node)
    assert form is not None, "a rule of operators that write to arguments"
    operator = declared_as(QuantOperator, form.name)
    assert operator is not None, "a rule of declared operators"
    results = written_arguments(call.node)
    return row_wise(call, RowWiseOperator(form.name, reads=(operator.rows,), results=results, scales=(operator.scale,)))


@token_rule(MadeQuantOperator, enters=True)
def _quantisation_by_made_scales(call: OperatorCall) -> Verdict:
    """The operator quantises by scales that it makes of each row, where no fused operator makes them."""
    form = functionalised(call.node)
    assert form is not None, "a rule of operators that write to arguments"
    operator = declared_as(MadeQuantOperator, form.name)
    assert operator is not None, "a rule of declared operators"
    return row_wise(call, RowWiseOperator(form.name, reads=(operator.rows,), results=written_arguments(call.node)))


@token_rule(OneScaleOperator)
def _one_scale(call: OperatorCall) -> Verdict:
    form = functionalised(call.node)
    name = operator_name(call.node) if form is None else form.name
    for operand in call.node.all_input_nodes:
        call.layout(operand)
    return call.join(JoinReason.SCALE_OF_ALL_TOKENS, f"{name} makes one scale of all tokens")


def written_arguments(node: fx.Node) -> tuple[str, ...]:
    """The arguments that the operator behind an ``auto_functionalized`` node writes to, by name."""
    schema = node.args[0]._schema  # type: ignore[union-attr]
    return tuple(one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write)


def row_wise(call: OperatorCall, operator: RowWiseOperator) -> Verdict:
    """The verdict on a call of ``operator``, by where its arguments have their tokens.

    Each half writes to results of its own: halves of one tensor would have to wait for each other. Rows that are cut from a
    whole tensor must lie row behind row: kernels read packed columns of scales without regard to the given strides.
    """
    name, given = operator.name, _arguments(call)
    read = {key: operand for key in operator.reads if isinstance(operand := given.get(key), fx.Node)}
    if any(given.get(key) is not None for key in operator.absent):
        return call.join(JoinReason.OPERANDS_DISAGREE, f"{name} with {' or '.join(operator.absent)}")
    rows = next((layout for operand in read.values() if (layout := call.rows(operand)) is not None), None)
    if rows is None:
        rows = next((layout for operand in read.values() if (layout := call.entered(operand)) is not None), None)
    if rows is None or rows.dim != 0 or rows.outer is not None or rows.order is not None:
        return call.join(JoinReason.OPERANDS_DISAGREE, f"{name} without a row for each token")
    slices: dict[fx.Node, Slice] = {}
    scales = [operand for key in operator.scales if isinstance(operand := given.get(key), fx.Node)]
    for operand in (*read.values(), *scales):
        there = call.layout(operand)
        if there is None and operand in scales and same_size(operand.meta["val"].numel(), 1):
            continue
        if there is None and call.fits(operand, rows) and _row_behind_row(operand):
            slices[operand] = Slice(rows)
        elif not isinstance(there, Rows) or not there.same_as(rows):
            return call.join(JoinReason.OPERANDS_DISAGREE, f"{name}: {operand.name}")
    changed: dict[str, Any] = {}
    for key in operator.results:
        if given.get(key) is None:
            continue
        changed[key] = _made_anew(call, given[key], rows, 0)
        if changed[key] is None:
            return call.join(JoinReason.OPERANDS_DISAGREE, f"{name}: {key} is no new tensor of a row for each token")
    for key in operator.counts:
        count = given[key].meta["val"] if isinstance(given[key], fx.Node) else given[key]
        if not same_size(count, rows.per_unit * call.units):
            return call.join(JoinReason.OPERANDS_DISAGREE, f"{name}: {key} is not the number of rows")
        changed[key] = HalfSize(rows.per_unit)
    known = (*operator.reads, *operator.scales, *operator.results)
    others = [operand for key, operand in given.items() if key not in known and isinstance(operand, fx.Node)]
    if any(call.layout(operand) is not None for operand in others):
        return call.join(JoinReason.OPERANDS_DISAGREE, f"{name}: what is the same for all tokens varies with them")
    made = call.node.meta["val"]
    layouts = tuple(rows if isinstance(one, torch.Tensor) else None for one in _several(made))
    if not all(_has_rows(call, one, rows) for one in _several(made) if isinstance(one, torch.Tensor)):
        return call.join(JoinReason.OPERANDS_DISAGREE, f"{name}: a result without a row for each token")
    if operator.writes:
        return RowWise(layouts, slices, kwargs={**given, **changed})
    args, kwargs = call.with_arguments(**changed)
    return RowWise(layouts[0] if isinstance(made, torch.Tensor) else layouts, slices, args, kwargs)


def _several(made: Any) -> tuple[Any, ...]:
    return tuple(made) if isinstance(made, list | tuple) else (made,)


def _arguments(call: OperatorCall) -> dict[str, Any]:
    """The arguments that the call gives, by name, without defaults."""
    form = functionalised(call.node)
    if form is not None:
        return dict(form.arguments)
    names = [one.name for one in call.node.target._schema.arguments]  # type: ignore[union-attr]
    return dict(zip(names, call.node.args, strict=False)) | dict(call.node.kwargs)


def _has_rows(call: OperatorCall, tensor: torch.Tensor, rows: Rows) -> bool:
    return tensor.dim() > 0 and same_size(tensor.shape[0], rows.per_unit * call.units)


def _row_behind_row(operand: fx.Node) -> bool:
    tensor = operand.meta["val"]
    return tensor.dim() < 2 or all(same_size(one, 1) for one in tensor.shape[1:]) or tensor.stride(-1) == 1


def _made_anew(call: OperatorCall, made: Any, rows: Rows, dim: int) -> HalfCall | None:
    """A half's own tensor instead of ``made``; None if ``made`` is not a new tensor with its rows in ``dim``."""
    if is_call(made, aten.permute.default):
        source, order = cast(tuple[fx.Node, list[int]], made.args)
        inner = _made_anew(call, source, rows, order[dim] % len(order))
        return None if inner is None else HalfCall(made.target, (inner, order), made.kwargs)
    if not is_call(made, *_NEW) or not same_size(call.shape(made)[dim], rows.per_unit * call.units):
        return None
    sizes = list(cast(list[Any], made.args[0]))
    sizes[dim] = HalfSize(rows.per_unit)
    return HalfCall(made.target, (sizes, *made.args[1:]), made.kwargs)
