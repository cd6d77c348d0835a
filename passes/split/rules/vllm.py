"""Token rules of vLLM's operators, known by name. Of those that write to arguments, as ``auto_functionalized`` calls them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from tw_compile.graph.predicates import aten, is_call
from tw_compile.passes.fusion.forms import functionalised
from tw_compile.passes.reasons import JoinReason
from tw_compile.passes.split.analysis.layout import HalfCall, HalfSize, Rows, RowWise, Slice, Verdict
from tw_compile.passes.split.rules.registry import OperatorCall, token_rule
from tw_compile.passes.split.rules.vllm_attention import attend, vllm_attention


@dataclass(frozen=True)
class _Writes:
    """Arguments with a row for each token in dim 0: ``reads`` are read, ``results`` new tensors that are written all over."""

    reads: tuple[str, ...]
    results: tuple[str, ...] = ()


_ROW_WISE = {
    "_C::silu_and_mul": _Writes(("input",), ("result",)),
    "_C::rms_norm": _Writes(("input",), ("result",)),
    "_C::rotary_embedding": _Writes(("positions", "query", "key")),
    "_C::vocab_parallel_embedding": _Writes(("input_ids",), ("out",)),
}


@token_rule("vllm_ir::rms_norm", "vllm_ir::fused_add_rms_norm")
def _rms_norm(call: OperatorCall) -> Verdict:
    """Along the last dim; with a residual the results are hidden states and the new residual."""
    x, residual = call.args[0], call.args[1] if "fused_add" in call.node.target.name() else None  # type: ignore[union-attr]
    rows = call.rows(x)
    if rows is None or rows.dim == len(call.shape(x)) - 1 or call.layout(call.argument("weight")) is not None:
        return call.join(JoinReason.REDUCES_TOKENS)
    if residual is None:
        return RowWise(rows)
    there = call.rows(residual)
    if there is None and call.layout(residual) is None and call.fits(residual, rows):
        return RowWise((rows, rows), {residual: Slice(rows)})
    return (
        RowWise((rows, rows)) if there is not None and there.same_as(rows) else call.join(JoinReason.OPERANDS_DISAGREE)
    )


@token_rule("higher_order::auto_functionalized")
def _auto_functionalised(call: OperatorCall) -> Verdict:
    """Each half writes to results of its own: halves of one tensor would have to wait for each other."""
    attention = vllm_attention(call.node)
    if attention is not None:
        return attend(call, attention)
    form = functionalised(call.node)
    known = None if form is None else _ROW_WISE.get(form.name)
    if form is None or known is None:
        return call.join(
            JoinReason.UNKNOWN_OPERATOR, "an operator that writes to its arguments" if form is None else form.name
        )
    operands = {name: form.arguments.get(name) for name in known.reads}
    given = [one for one in operands.values() if isinstance(one, fx.Node)]
    rows = next((found for one in given if (found := call.rows(one)) is not None), None)
    if rows is None or rows.dim != 0 or rows.outer is not None or rows.order is not None:
        return call.join(JoinReason.OPERANDS_DISAGREE, f"{form.name} without a row for each token")
    slices: dict[fx.Node, Slice] = {}
    for one in given:
        there = call.rows(one)
        if there is None and call.layout(one) is None and call.fits(one, rows):
            slices[one] = Slice(rows)
        elif there is None or not there.same_as(rows):
            return call.join(JoinReason.OPERANDS_DISAGREE, f"{form.name}: {one.name}")
    changed: dict[str, Any] = dict(form.arguments)
    for name in known.results:
        result = form.arguments[name]
        if not is_call(result, aten.empty.memory_format) or not call.fits(result, rows):
            return call.join(
                JoinReason.OPERANDS_DISAGREE, f"{form.name}: {name} is no new tensor of a row for each token"
            )
        sizes = [HalfSize(rows.per_unit), *result.args[0][1:]]  # type: ignore[index, misc]
        changed[name] = HalfCall(aten.empty.memory_format, (sizes, *result.args[1:]), result.kwargs)
    rest = [one for name, one in form.arguments.items() if name not in known.reads and isinstance(one, fx.Node)]
    if any(call.layout(one) is not None for one in rest):
        return call.join(JoinReason.OPERANDS_DISAGREE, f"{form.name}: what is the same for all tokens varies with them")
    out: tuple[Rows | None, ...] = tuple(
        rows if isinstance(one, torch.Tensor) else None for one in call.node.meta["val"]
    )
    return RowWise(out, slices, kwargs=changed)
