"""A pass of somebody else's, in a file of its own: ``neg(neg(x))`` is ``x``."""

from __future__ import annotations

import torch
import torch.fx as fx

from tw_compile.passes.contract import Context, Outcome, Pass

_neg = torch.ops.aten.neg.default


def _cancel(graph: fx.Graph, context: Context) -> Outcome:
    cancelled = 0
    for outer in reversed(graph.find_nodes(op="call_function", target=_neg)):
        inner = outer.args[0]
        if isinstance(inner, fx.Node) and inner.target is _neg:
            outer.replace_all_uses_with(inner.args[0])  # type: ignore[arg-type]
            graph.erase_node(outer)
            if not inner.users:
                graph.erase_node(inner)
            cancelled += 1
    return Outcome(bool(cancelled), {"pairs": cancelled})


CANCEL_NEGATIONS = Pass("cancel_negations", _cancel)
