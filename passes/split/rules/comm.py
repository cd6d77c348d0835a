"""Token rules of collectives and of the fused operators."""

from __future__ import annotations

import operator
from typing import Any

import torch.fx as fx

from tw_compile.graph.predicates import is_call, operator_name, same_size
from tw_compile.kernels.collective import ops
from tw_compile.kernels.collective.residual_seam import enter_residual, leave_residual
from tw_compile.kernels.collective.seam import enter_layers, leave_layers
from tw_compile.passes.operators import AllGatherOperator, AllReduceOperator, declared_as
from tw_compile.passes.reasons import JoinReason
from tw_compile.passes.split.analysis.layout import HalfIndex, HalfSize, Local, Rows, RowWise, Slice, Verdict
from tw_compile.passes.split.rules.registry import OperatorCall, token_rule


@token_rule(AllReduceOperator, enters=True)
def _all_reduce(call: OperatorCall) -> Verdict:
    """Each half may run any elementwise reduction. Rows in the order of a sort join: they could differ between ranks.

    Nothing of the other half can hide an all_reduce whose result is ready when the operator returns.
    """
    message = call.args[0]
    rows = call.entered(message)
    if rows is None or rows.order is not None:
        return call.join(JoinReason.ROUTING_NOT_UNDONE)
    return RowWise(rows, call.slice_of(message, rows))


@token_rule(AllGatherOperator)
def _all_gather(call: OperatorCall) -> Verdict:
    """Each half may gather along another dim than the tokens'. Rows in the order of a sort join, as for an all_reduce."""
    operator = declared_as(AllGatherOperator, operator_name(call.node))
    assert operator is not None, "a rule of a declared operator"
    rows = call.rows(call.args[0])
    if rows is None or rows.order is not None:
        return call.join(JoinReason.ROUTING_NOT_UNDONE)
    if call.argument(operator.dim) % len(call.shape(call.node)) in (rows.dim, rows.outer):
        return call.join(JoinReason.RESHAPES_TOKENS, "tokens of all ranks")
    return RowWise(rows)


@token_rule(*ops.STARTS, enters=True)
def _start(call: OperatorCall) -> Verdict:
    return _fused(call, "x", whole=())


@token_rule(*ops.MM_STARTS, enters=True)
def _mm_start(call: OperatorCall) -> Verdict:
    return _fused(call, "a", whole=("b",))


def _fused(call: OperatorCall, message: str, whole: tuple[str, ...]) -> Verdict:
    """Each row is summed and normalised on its own, but a sharded residual is distributed over ranks by the rows of its half.

    So only the same half of the next site reads the rank's rows of a half. Each half has its own slot, because calls of both
    halves may be in flight.
    """
    given = call.argument(message)
    rows = call.entered(given)
    if rows is None or not _of_tokens(rows):
        return call.join(JoinReason.ROUTING_NOT_UNDONE)
    for name in (*whole, "bias", "weight", "norm_bias", "hidden_scale", "eps_tensor"):
        if call.layout(call.argument(name)) is not None:
            return call.join(JoinReason.OPERANDS_DISAGREE, f"{name} varies with the token")
    slices = call.slice_of(given, rows)
    residual = call.argument("residual")
    if call.argument("residual_sharded"):
        layout = call.layout(residual)
        if (
            not isinstance(layout, Local)
            or layout.role != "shard"
            or not same_size(layout.rows.per_unit, rows.per_unit)
        ):
            return call.join(JoinReason.RESIDUAL_SHARDS, "the residual's rows were shared out for the whole")
    elif residual is not None:
        there = call.rows(residual)
        if there is None:
            if call.layout(residual) is not None or not call.fits(residual, rows):
                return call.join(JoinReason.OPERANDS_DISAGREE, "residual")
            slices[residual] = Slice(rows)
        elif not there.same_as(rows):
            return call.join(JoinReason.OPERANDS_DISAGREE, "residual")
    for name in whole:
        if call.argument(name) in slices:
            return call.join(JoinReason.OPERANDS_DISAGREE, f"{name} is also the message or the residual")
    args, kwargs = call.with_arguments(slot=HalfIndex(call.argument("slot")))
    whole_residual = call.argument("residual_out") == "replicated"
    out: tuple[Rows | Local, ...] = (rows, rows if whole_residual else Local("shard", call.node, rows))
    if is_call(call.node, *ops.QUANT_STARTS):
        out = (*out, rows)  # scales
    return RowWise(out, slices, args, kwargs)


@token_rule(enter_layers, enter_residual)
def _enter(call: OperatorCall) -> Verdict:
    """Each half enters with its rows of ``left``, see ``seams.py``. A sharded residual belongs to its half, as with a start."""
    rows = call.rows(call.argument("left"))
    if rows is None or not _of_tokens(rows):
        return call.join(JoinReason.RESIDUAL_SHARDS)
    residual = rows if call.argument("rows_dtype") is None else Local("shard", call.node, rows)
    return RowWise(residual if is_call(call.node, enter_residual) else (rows, residual))


@token_rule(leave_layers)
def _leave_layers(call: OperatorCall) -> Verdict:
    """Halves leave only a graph that halves may enter, one of several alike. Otherwise the next graph may have other halves."""
    if not any(is_call(node, enter_layers) for node in call.node.graph.nodes):
        return call.join(JoinReason.LEFT_WHOLE)
    hidden, residual = call.rows(call.argument("hidden")), _rows_of_residual(call)
    if hidden is None or not _of_tokens(hidden) or residual is None or not residual.same_as(hidden):
        return call.join(JoinReason.RESIDUAL_SHARDS)
    return RowWise(hidden)


@token_rule(leave_residual)
def _leave_residual(call: OperatorCall) -> Verdict:
    """As :func:`_leave_layers`. What a half leaves behind (``after``) is for :mod:`~tw_compile.passes.split.rewrite.seams`."""
    if not any(is_call(node, enter_residual) for node in call.node.graph.nodes):
        return call.join(JoinReason.LEFT_WHOLE)
    for other in call.argument("after"):
        call.layout(other)
    rows = _rows_of_residual(call)
    if rows is None or not _of_tokens(rows):
        return call.join(JoinReason.RESIDUAL_SHARDS)
    args, kwargs = call.with_arguments(tokens=HalfSize(rows.per_unit), after=[])
    return RowWise(rows, {}, args, kwargs)


def _rows_of_residual(call: OperatorCall) -> Rows | None:
    """The tokens of the residual that is left, also where each half has only those rows of it that the rank owns."""
    layout = call.layout(call.argument("residual"))
    found = layout.rows if isinstance(layout, Local) and layout.role == "shard" else layout
    return found if isinstance(found, Rows) else None


def _of_tokens(rows: Rows) -> bool:
    return rows.dim == 0 and rows.outer is None and rows.order is None


@token_rule(ops.wait_)
def _wait(call: OperatorCall) -> Verdict:
    """A wait completes the call of its half, and keeps alive what that half has handed to the call."""
    hidden: Any = call.args[0]
    begun = hidden.args[0] if is_call(hidden, operator.getitem) else None
    verdict = call.verdict_of(begun) if isinstance(begun, fx.Node) else None
    operands = call.node.all_input_nodes
    if verdict is None or call.rows(hidden) is None:
        return call.join(JoinReason.RESIDUAL_SHARDS)
    for one in operands:
        call.layout(one)
    slices = {one: verdict.slices[one] for one in operands if one in verdict.slices}
    args, kwargs = call.with_arguments(slot=HalfIndex(call.argument("slot")))
    return RowWise(None, slices, args, kwargs)
