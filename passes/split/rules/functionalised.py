"""Token rules of operators that write to arguments, as ``auto_functionalized`` calls them."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from tw_compile.graph.predicates import aten, is_call
from tw_compile.passes.fusion.forms import functionalised
from tw_compile.passes.operators import RowWiseOperator, declared_as
from tw_compile.passes.reasons import JoinReason
from tw_compile.passes.split.analysis.layout import HalfCall, HalfSize, Rows, RowWise, Slice, Verdict
from tw_compile.passes.split.rules.registry import OperatorCall, registered_name, token_rule


@token_rule("higher_order::auto_functionalized")
def _auto_functionalised(call: OperatorCall) -> Verdict:
    """By the rule of the operator that is called."""
    form = functionalised(call.node)
    if form is None:
        return call.join(JoinReason.UNKNOWN_OPERATOR, "an operator that writes to its arguments")
    rule = registered_name(form.name, writes=True)
    return call.join(JoinReason.UNKNOWN_OPERATOR, form.name) if rule is None else rule.rule(call)


@token_rule(RowWiseOperator)
def _row_wise(call: OperatorCall) -> Verdict:
    """Each half writes to results of its own: halves of one tensor would have to wait for each other."""
    form = functionalised(call.node)
    assert form is not None, "a rule of operators that write to arguments"
    operator = declared_as(RowWiseOperator, form.name)
    assert operator is not None, "a rule of declared operators"
    read = [form.arguments.get(name) for name in operator.reads]
    operands = [operand for operand in read if isinstance(operand, fx.Node)]
    rows = next((layout for operand in operands if (layout := call.rows(operand)) is not None), None)
    if rows is None or rows.dim != 0 or rows.outer is not None or rows.order is not None:
        return call.join(JoinReason.OPERANDS_DISAGREE, f"{form.name} without a row for each token")
    slices: dict[fx.Node, Slice] = {}
    for operand in operands:
        there = call.rows(operand)
        if there is None and call.layout(operand) is None and call.fits(operand, rows):
            slices[operand] = Slice(rows)
        elif there is None or not there.same_as(rows):
            return call.join(JoinReason.OPERANDS_DISAGREE, f"{form.name}: {operand.name}")
    changed: dict[str, Any] = dict(form.arguments)
    for name in operator.results:
        result = form.arguments[name]
        if not is_call(result, aten.empty.memory_format) or not call.fits(result, rows):
            return call.join(
                JoinReason.OPERANDS_DISAGREE, f"{form.name}: {name} is no new tensor of a row for each token"
            )
        sizes = [HalfSize(rows.per_unit), *result.args[0][1:]]  # type: ignore[index, misc]
        changed[name] = HalfCall(aten.empty.memory_format, (sizes, *result.args[1:]), result.kwargs)
    others = [
        operand
        for name, operand in form.arguments.items()
        if name not in operator.reads and isinstance(operand, fx.Node)
    ]
    if any(call.layout(operand) is not None for operand in others):
        return call.join(JoinReason.OPERANDS_DISAGREE, f"{form.name}: what is the same for all tokens varies with them")
    layouts: tuple[Rows | None, ...] = tuple(
        rows if isinstance(result, torch.Tensor) else None for result in call.node.meta["val"]
    )
    return RowWise(layouts, slices, kwargs=changed)
