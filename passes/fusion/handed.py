"""Residuals that come from, and go to, graphs that are compiled elsewhere: see ``kernels/handed_residual.py``."""

from __future__ import annotations

import torch.fx as fx

from tw_compile.graph.predicates import is_call
from tw_compile.kernels.handed_residual import pass_residual, take_residual

_SHARDED_FROM = 2


def settle_handed(graph: fx.Graph, tokens: tuple[int, int | None] | None) -> frozenset[fx.Node]:
    """The graph's ``pass_residual`` and ``take_residual`` that are for rows of the rank alone at all of its token counts.

    Those that are for whole residuals at all of them are removed. For graphs of both kinds, or of unknown counts, they stay.
    """
    sharded: set[fx.Node] = set()
    for node in list(graph.nodes):
        if tokens is None or not is_call(node, pass_residual, take_residual):
            continue
        least, most = tokens
        sharded_from = node.args[_SHARDED_FROM]
        assert isinstance(sharded_from, int)
        if least >= sharded_from:
            sharded.add(node)
        elif most is not None and most < sharded_from:
            residual = node.args[0]
            assert isinstance(residual, fx.Node)
            node.replace_all_uses_with(residual)
            graph.erase_node(node)
    return frozenset(sharded)
