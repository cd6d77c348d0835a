"""Token rules of operators that compute: pointwise, reductions, matmuls, lookups."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from tw_compile.graph.predicates import aten, value
from tw_compile.kernels.gemm.mm_leaving_sms import addmm_leaving_sms, mm_leaving_sms
from tw_compile.passes.reasons import JoinReason
from tw_compile.passes.split.analysis.layout import Local, Rows, RowWise, Slice, Verdict
from tw_compile.passes.split.rules.registry import OperatorCall, pointwise_rule, token_rule
from tw_compile.passes.split.rules.shape import aligned_slice


@token_rule(torch.ops.prims.convert_element_type.default, aten.copy.default)
@pointwise_rule
def pointwise(call: OperatorCall) -> Verdict:
    """Operands broadcast against each other; the tokens of all of them must end up in the same place."""
    out = call.node.meta["val"]
    if not isinstance(out, torch.Tensor):
        return call.join(JoinReason.UNKNOWN_OPERATOR)
    operands = [one for one in call.node.all_input_nodes if isinstance(one.meta.get("val"), torch.Tensor)]
    rank = out.dim()
    found: Rows | None = None
    for one in operands:
        rows = call.rows(one)
        if rows is None:
            continue
        shift = rank - len(call.shape(one))
        placed = rows.moved(rows.dim + shift, None if rows.outer is None else rows.outer + shift)
        if found is not None and not found.same_as(placed):
            return call.join(JoinReason.OPERANDS_DISAGREE)
        found = placed
    if found is None:
        return call.join(JoinReason.OPERANDS_DISAGREE)
    slices: dict[fx.Node, Slice] = {}
    sizes = (out.shape[found.dim], 1 if found.outer is None else out.shape[found.outer])
    for one in operands:
        layout = call.layout(one)
        if isinstance(layout, Local):
            return call.join(JoinReason.OPERANDS_DISAGREE, f"{one.name} means something only within its half")
        if layout is not None:
            continue
        part = aligned_slice(found, rank, call.shape(one), sizes)
        if isinstance(part, str):
            return call.join(JoinReason.OPERANDS_DISAGREE, part)
        if part is not None:
            slices[one] = part
    return RowWise(found, slices)


@token_rule(
    aten.sum.dim_IntList,
    aten.mean.dim,
    aten.amax.default,
    aten.amin.default,
    aten.max.dim,
    aten.min.dim,
    aten.argmax.default,
    aten.argmin.default,
    aten.prod.dim_int,
    aten.var_mean.correction,
    aten.var.correction,
    aten.any.dim,
    aten.any.dims,
    aten.all.dim,
    aten.logsumexp.default,
    aten.linalg_vector_norm.default,
)
def _reduction(call: OperatorCall) -> Verdict:
    source = call.args[0]
    rows, rank = call.rows(source), len(call.shape(source))
    dims = call.argument("dim")
    given = [dims] if isinstance(dims, int) else dims
    gone = {dim % rank for dim in given} if given else set(range(rank))
    if rows is None or {rows.dim, rows.outer} & gone:
        return call.join(JoinReason.REDUCES_TOKENS)
    if not call.argument("keepdim"):
        outer = None if rows.outer is None else rows.outer - sum(dim < rows.outer for dim in gone)
        rows = rows.moved(rows.dim - sum(dim < rows.dim for dim in gone), outer)
    return _every_result(call, rows)


@token_rule(
    aten._softmax.default,
    aten._log_softmax.default,
    aten.softmax.int,
    aten.log_softmax.int,
    aten.topk.default,
    aten.cumprod.default,
    aten.logcumsumexp.default,
    "prims::prepare_softmax_online",
)
def along_one_dim(call: OperatorCall) -> Verdict:
    """The operator works along ``dim`` and keeps this dim."""
    source = call.args[0]
    rows = call.rows(source)
    if rows is None or call.argument("dim") % len(call.shape(source)) in (rows.dim, rows.outer):
        return call.join(JoinReason.REDUCES_TOKENS)
    return _every_result(call, rows)


@token_rule(aten.native_layer_norm.default, aten._fused_rms_norm.default)
def _norm(call: OperatorCall) -> Verdict:
    source, normalized = call.args[:2]
    rows = call.rows(source)
    inner = len(call.shape(source)) - len(normalized)
    if rows is None or max(rows.dim, rows.outer or 0) >= inner or any(call.layout(one) for one in call.args[2:]):
        return call.join(JoinReason.REDUCES_TOKENS)
    return _every_result(call, rows)


def _every_result(call: OperatorCall, rows: Rows) -> RowWise:
    results = call.node.meta["val"]
    return RowWise((rows,) * len(results) if isinstance(results, list | tuple) else rows)


@token_rule(aten.mm.default, aten._int_mm.default, mm_leaving_sms, enters=True)
def _mm(call: OperatorCall) -> Verdict:
    a, b = call.args[:2]
    out = _product(call, a, b, entering=True)
    return call.join(JoinReason.CONTRACTS_TOKENS) if out is None else RowWise(*out)


@token_rule(aten.addmm.default, addmm_leaving_sms, enters=True)
def _addmm(call: OperatorCall) -> Verdict:
    bias, a, b = call.args[:3]
    out = _product(call, a, b, entering=True)
    if out is None:
        return call.join(JoinReason.CONTRACTS_TOKENS)
    return _with_addend(call, bias, out[0], out[1], (a, b))


@token_rule(aten._scaled_mm.default, enters=True)
def _scaled_mm(call: OperatorCall) -> Verdict:
    """A scale is one number, or one for each row or column."""
    a, b = call.args[:2]
    out = _product(call, a, b, entering=True)
    if out is None or out[0].dim != 0:
        return call.join(JoinReason.CONTRACTS_TOKENS)
    rows, slices = out
    for name, is_rows in (("scale_a", True), ("scale_b", False), ("bias", False), ("scale_result", False)):
        operand = call.argument(name)
        if operand is None:
            continue
        given = call.rows(operand)
        if given is not None and not (is_rows and given.same_as(rows)):
            return call.join(JoinReason.OPERANDS_DISAGREE, name)
        if given is None and is_rows and operand.meta["val"].numel() != 1:
            if not call.fits(operand, rows):
                return call.join(JoinReason.OPERANDS_DISAGREE, name)
            slices |= {operand: Slice(rows)}
    return RowWise(rows, slices)


def _with_addend(
    call: OperatorCall, addend: Any, rows: Rows, slices: dict[fx.Node, Slice], factors: tuple[Any, Any]
) -> Verdict:
    out = call.shape(call.node)
    given = call.rows(addend)
    if given is not None:
        shift = len(out) - len(call.shape(addend))
        agrees = given.moved(given.dim + shift, None).same_as(rows) and given.outer is None
        return RowWise(rows, slices) if agrees else call.join(JoinReason.OPERANDS_DISAGREE)
    part = aligned_slice(rows, len(out), call.shape(addend), (out[rows.dim], 1))
    if isinstance(part, str):
        return call.join(JoinReason.OPERANDS_DISAGREE, part)
    if part is None:
        return RowWise(rows, slices)
    if addend in factors and slices.get(addend) != part:
        return call.join(JoinReason.OPERANDS_DISAGREE, f"{addend.name} is the addend and a factor")
    return RowWise(rows, {**slices, addend: part})


def _product(call: OperatorCall, a: Any, b: Any, *, entering: bool) -> tuple[Rows, dict[fx.Node, Slice]] | None:
    """The rows of ``a @ b`` for matrices, and the operands to slice; None if tokens are contracted or paired with others."""
    left, right = call.rows(a), call.rows(b)
    if left is None and right is None and entering:
        left = call.entered(a)
        if left is not None and left.outer is None and left.dim == 0 and call.layout(b) is None and a is not b:
            return left, {a: Slice(left)}
        return None
    if left is not None and right is None and left.dim == 0 and left.outer is None and call.layout(b) is None:
        return left, {}
    if left is None and right is not None and right.dim == 1 and right.outer is None and call.layout(a) is None:
        return right, {}
    return None


@token_rule(aten.bmm.default)
def _bmm(call: OperatorCall) -> Verdict:
    a, b = call.args
    out = _batched_product(call, a, b)
    return call.join(JoinReason.CONTRACTS_TOKENS) if out is None else RowWise(*out)


@token_rule(aten.baddbmm.default)
def _baddbmm(call: OperatorCall) -> Verdict:
    addend, a, b = call.args
    out = _batched_product(call, a, b)
    if out is None:
        return call.join(JoinReason.CONTRACTS_TOKENS)
    return _with_addend(call, addend, out[0], out[1], (a, b))


def _batched_product(call: OperatorCall, a: Any, b: Any) -> tuple[Rows, dict[fx.Node, Slice]] | None:
    left, right = call.rows(a), call.rows(b)
    if any(rows is not None and rows.outer is not None for rows in (left, right)):
        return None
    by_batch = left if left is not None and left.dim == 0 else right if right is not None and right.dim == 0 else None
    if by_batch is not None:
        slices = {}
        for one, rows in ((a, left), (b, right)):
            if rows is None and call.layout(one) is None and call.fits(one, by_batch):
                slices[one] = Slice(by_batch)
            elif rows is None or not rows.same_as(by_batch):
                return None
        return by_batch, slices
    if left is not None and left.dim == 1 and call.layout(b) is None:
        return left, {}
    if right is not None and right.dim == 2 and call.layout(a) is None:
        return right, {}
    return None


@token_rule(aten.embedding.default)
def _embedding(call: OperatorCall) -> Verdict:
    table, ids = call.args[:2]
    rows = call.rows(ids)
    if rows is None or call.layout(table) is not None:
        return call.join(JoinReason.SELECTS_TOKENS)
    return RowWise(rows)


@token_rule(aten.gather.default)
def _gather(call: OperatorCall) -> Verdict:
    source, dim, index = call.args[:3]
    return _along_dim_of_all(call, dim, [source, index])


@token_rule(
    aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.scatter_reduce.two, aten.scatter.reduce
)
def _scatter(call: OperatorCall) -> Verdict:
    target, dim, index, source = call.args[:4]
    is_tensor = isinstance(source, fx.Node) and value(source) is not None
    return _along_dim_of_all(call, dim, [target, index, *([source] if is_tensor else [])])


def _along_dim_of_all(call: OperatorCall, dim: Any, operands: list[Any]) -> Verdict:
    """Each half may run the operator if all operands have equally many tokens, in the same dim, which is not ``dim``."""
    layouts = [layout for one in operands if (layout := call.layout(one)) is not None]
    found = [layout for layout in layouts if isinstance(layout, Rows)]
    if not found or len(found) < len(layouts) or not all(rows.same_as(found[0]) for rows in found):
        return call.join(JoinReason.OPERANDS_DISAGREE)
    rows = found[0]
    if dim % len(call.shape(operands[0])) in (rows.dim, rows.outer):
        return call.join(JoinReason.SELECTS_TOKENS)
    whole = [one for one in operands if call.layout(one) is None]
    if not all(call.fits(one, rows) for one in whole):
        return call.join(JoinReason.OPERANDS_DISAGREE)
    return RowWise(rows, {one: Slice(rows) for one in whole})


def lookup(call: OperatorCall) -> Verdict:
    """``x[..., index, ...]`` with one tensor of indices."""
    source, indices = call.args[:2]
    places = [place for place, one in enumerate(indices) if one is not None]
    if len(places) != 1:
        return call.join(JoinReason.SELECTS_TOKENS, "several index tensors")
    place, index = places[0], indices[places[0]]
    if index.meta["val"].dtype == torch.bool:
        return call.join(JoinReason.SELECTS_TOKENS, "selected by a mask")
    rows, by = call.rows(source), call.rows(index)
    if rows is None and by is not None and call.layout(source) is None:
        return RowWise(by.moved(by.dim + place, None if by.outer is None else by.outer + place))
    if rows is not None and by is None and call.layout(index) is None and place not in (rows.dim, rows.outer):
        grown = len(call.shape(index)) - 1
        outer = None if rows.outer is None else rows.outer + grown * (rows.outer > place)
        return RowWise(rows.moved(rows.dim + grown * (rows.dim > place), outer))
    return call.join(JoinReason.SELECTS_TOKENS)
