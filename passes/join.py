"""Let our kernel compute GEMMs of one input in graphs that are not split, where that is measured to be faster.

    before:  q = mm(x, wq); k = mm(x, wk); v = mm(x, wv)        after:  q, k, v = joint_mm_by_rows(x, [wq, wk, wv], [], turns)
    before:  silu(mm(x, gate)) * mm(x, up)                      after:  gated_mm_by_rows(x, gate, up, turns)

As one, the GEMMs have one partial wave instead of two or three. The same kernel stores the gated product,
which needs a kernel of its own otherwise. ``turns`` are the numbers of rows where our kernel is faster, see
``kernels/gemm/by_rows.py``. If there are none, the graph stays as it is. In split graphs ``reserve_sms`` does the same for
GEMMs beside communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from tw_compile import compat
from tw_compile.autotune.turns import Gemms, Turns, measured_turns, rows_to_measure
from tw_compile.config import JOIN_GEMMS
from tw_compile.graph.predicates import aten, is_call, peel_views, value
from tw_compile.kernels.gemm.by_rows import gated_mm_by_rows, joint_mm_by_rows
from tw_compile.kernels.gemm.mm_leaving_sms import gated_mm_leaving_sms, joint_mm_leaving_sms
from tw_compile.passes import joint
from tw_compile.passes.contract import Context, Outcome, Pass, TokenRange
from tw_compile.passes.split.rewrite.duplicate import SplitReport

_BY_ROWS: dict[Any, Any] = {joint_mm_leaving_sms: joint_mm_by_rows, gated_mm_leaving_sms: gated_mm_by_rows}
Measure = Callable[[Gemms, Sequence[int], torch.device], Turns | None]


@dataclass(frozen=True)
class JoinedGemms:
    """The GEMMs that were joined, each group with the numbers of rows for which our kernel computes it."""

    turns: tuple[tuple[Gemms, Turns], ...]


@dataclass(frozen=True)
class Joinable:
    """Matmuls that are faster as one operator, with the numbers of rows for which they are faster."""

    nodes: tuple[fx.Node, ...]
    gemms: Gemms
    turns: Turns


def join_gemms(graph: fx.Graph, tokens: TokenRange | None, measure: Measure | None = None) -> JoinedGemms:
    """Join what :func:`find_joinable` finds."""
    return _join(find_joinable(graph, tokens, measure))


def find_joinable(graph: fx.Graph, tokens: TokenRange | None, measure: Measure | None = None) -> list[Joinable]:
    """The groups of matmuls that ``measure`` (None: :func:`measured_turns`) finds faster as one operator; they don't overlap.

    ``tokens`` are the token counts that the graph serves; None: any.
    """
    measure = measure or measured_turns
    found: list[Joinable] = []
    by_input: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if is_call(node, aten.mm.default, aten.addmm.default):
            by_input.setdefault(peel_views(joint.rows_of(node)), []).append(node)
    for waiting in by_input.values():
        while waiting:
            nodes = joint.beside(waiting[0], waiting[1:])
            waiting = [node for node in waiting[1:] if node not in nodes]
            gemms = gemms_of(nodes) if nodes else None
            rows = None if gemms is None else rows_served(nodes[0], tokens)
            if gemms is None or rows is None:
                continue
            turns = measure(gemms, rows, nodes[0].meta["val"].device)
            if turns:
                found.append(Joinable(tuple(nodes), gemms, turns))
    return found


def gemms_of(nodes: Sequence[fx.Node]) -> Gemms | None:
    """The description of ``nodes``, a result of :func:`joint.beside`, for measurements.

    None for a single GEMM that is not gated, and for matrices with a symbolic size.
    """
    gated = joint.is_gated(nodes)
    if len(nodes) == 1 and not gated:
        return None
    matrices = [value(joint.matrix_of(node)) for node in nodes]
    depth, columns = matrices[0].shape[0], tuple(matrix.shape[1] for matrix in matrices)  # type: ignore[union-attr]
    if not all(isinstance(size, int) for size in (depth, *columns)):
        return None
    halves = gated and len(nodes) == 1
    if halves:
        columns = (columns[0] // 2,) * 2
    return Gemms(depth, columns, biased=len(nodes[0].args) == 3, gated=gated, halves=halves)


def rows_served(node: fx.Node, tokens: TokenRange | None) -> tuple[int, ...] | None:
    """The numbers of rows to measure; None where there are none."""
    rows: Any = node.meta["val"].shape[0]
    if isinstance(rows, int):
        return (rows,) if rows else None
    least, most = (1, None) if tokens is None else tokens
    factor = compat.known_factor(rows)
    return rows_to_measure(max(least, 1) * factor, None if most is None else most * factor)


def _join(found: Sequence[Joinable]) -> JoinedGemms:
    for one in found:
        node = joint.join(one.nodes).adopt()
        node.target = _BY_ROWS[node.target]
        node.args = (*node.args[:-1], list(one.turns))
    return JoinedGemms(tuple((one.gemms, one.turns) for one in found))


def _look(graph: fx.Graph, context: Context) -> Outcome | None:
    if context.kept(SplitReport) is not None:
        return Outcome(False, refused="the graph is split, and GEMMs are planned beside its communication")
    if compat.tunes_gemms():
        return Outcome(False, refused="Inductor tunes GEMMs (max_autotune)")
    found = context.analysis(find_joinable, graph, context.tokens)
    return None if found else _outcome(JoinedGemms(()))


def _run(graph: fx.Graph, context: Context) -> Outcome:
    return _outcome(_join(context.analysis(find_joinable, graph, context.tokens)))


def _outcome(done: JoinedGemms) -> Outcome:
    gated = sum(gemms.gated for gemms, _ in done.turns)
    return Outcome(bool(done.turns), {"gated": gated, "joint": len(done.turns) - gated})


JOIN = Pass(JOIN_GEMMS, _run, look=_look)
