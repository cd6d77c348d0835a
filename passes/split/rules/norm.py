"""Token rule of the RMSNorms that hosts have as operators."""

from __future__ import annotations

from tw_compile.passes.fusion.forms import host_call
from tw_compile.passes.operators import NormOperator, RowWiseOperator
from tw_compile.passes.reasons import JoinReason
from tw_compile.passes.split.analysis.layout import RowWise, Slice, Verdict
from tw_compile.passes.split.rules.registry import OperatorCall, token_rule
from tw_compile.passes.split.rules.row_wise import row_wise, written_arguments


@token_rule(NormOperator)
def _rms_norm(call: OperatorCall) -> Verdict:
    """The operator normalises along the last dim. With a residual, its results are hidden states and the new residual."""
    called = host_call(call.node, NormOperator)
    assert called is not None, "a rule of declared operators"
    norm, arguments = called.operator, called.arguments
    if norm.writes:
        reads = tuple(str(name) for name in (norm.rows, norm.residual) if name is not None)
        results = tuple(name for name in written_arguments(call.node) if name not in reads)
        return row_wise(call, RowWiseOperator(norm.name, reads, results))
    x, weight = arguments[norm.rows], arguments.get(norm.weight)
    rows = call.rows(x)
    if rows is None or rows.dim == len(call.shape(x)) - 1 or call.layout(weight) is not None:
        return call.join(JoinReason.REDUCES_TOKENS)
    if norm.residual is None:
        return RowWise(rows)
    residual = arguments[norm.residual]
    there = call.rows(residual)
    if there is None and call.layout(residual) is None and call.fits(residual, rows):
        return RowWise((rows, rows), {residual: Slice(rows)})
    return (
        RowWise((rows, rows)) if there is not None and there.same_as(rows) else call.join(JoinReason.OPERANDS_DISAGREE)
    )
