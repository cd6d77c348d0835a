"""Copies of graphs, from which an earlier state can be restored."""

from __future__ import annotations

import torch.fx as fx


def copy_of(graph: fx.Graph) -> fx.Graph:
    """A new graph with copies of all nodes and of their metadata. It belongs to no module."""
    copied = fx.Graph()
    _add(copied, graph)
    return copied


def restore(graph: fx.Graph, before: fx.Graph) -> None:
    """Replace all nodes of ``graph`` by copies of those of ``before``, an earlier :func:`copy_of` it. Names may change."""
    for node in graph.nodes:
        node.args, node.kwargs = (), {}  # a pass that failed may have left a node behind nodes that read it
    for node in reversed(graph.nodes):
        graph.erase_node(node)
    graph.inserting_after()  # at the end: a pass that failed may have left the place at a node that is gone now
    _add(graph, before)


def _add(graph: fx.Graph, nodes_of: fx.Graph) -> None:
    made: dict[fx.Node, fx.Node] = {}
    for node in nodes_of.nodes:
        made[node] = graph.node_copy(node, made.__getitem__)
