"""A graph as it was, to go back to."""

from __future__ import annotations

import torch.fx as fx


def copy_of(graph: fx.Graph) -> fx.Graph:
    """The same nodes anew, each with a copy of its metadata; it belongs to no module."""
    copied = fx.Graph()
    _add(copied, graph)
    return copied


def restore(graph: fx.Graph, before: fx.Graph) -> None:
    """Replace all nodes of ``graph`` by those of ``before``, which is a :func:`copy_of` it. They may have other names."""
    for node in reversed(graph.nodes):
        graph.erase_node(node)
    _add(graph, before)


def _add(graph: fx.Graph, nodes_of: fx.Graph) -> None:
    made: dict[fx.Node, fx.Node] = {}
    for node in nodes_of.nodes:
        made[node] = graph.node_copy(node, made.__getitem__)
