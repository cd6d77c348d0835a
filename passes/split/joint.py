"""Matmuls of one input as one operator, which computes them as one sequence of tiles."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch.fx as fx

from tw_compile.graph.predicates import aten, is_call, peel_views, same_size, value
from tw_compile.kernels.joint_mm import can_multiply
from tw_compile.kernels.mm_leaving_sms import joint_mm_leaving_sms
from tw_compile.passes.split.dependences import makes_view
from tw_compile.planning.joint_tiles import MOST_JOINT


def beside(node: fx.Node, others: Sequence[fx.Node]) -> list[fx.Node]:
    """``node`` and those of ``others`` that can be computed with it; nothing where it can't be computed so."""
    together = [one for one in (node, *others) if _can_join(one, node)]
    return together[:MOST_JOINT] if node in together else []


def _can_join(node: fx.Node, first: fx.Node) -> bool:
    """Whether a matmul reads what ``first`` does, and a matrix that is there from the beginning, as the kernel wants it."""
    if not is_call(node, aten.mm.default) or node.kwargs or not _is_same(node.args[0], first.args[0]):
        return False
    a, matrix = (value(one) for one in node.args[:2])
    return a is not None and matrix is not None and can_multiply(a, matrix) and _is_given(node.args[1])


def _is_same(one: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes are the same rows: the same elements in the same order, by way of views of their own."""
    return one is other or (
        peel_views(one) is peel_views(other) and all(map(same_size, value(one).shape, value(other).shape))
    )


def _is_given(node: fx.Node) -> bool:
    """Whether a matrix is an input of the graph, or a view of one."""
    while node.op == "call_function" and makes_view(node):
        node = node.all_input_nodes[0]
    return node.op in ("placeholder", "get_attr")


def join(nodes: Sequence[fx.Node]) -> fx.Node:
    """Compute ``nodes``, of :func:`beside` and in the graph's order, by one operator where the first was, leaving no SMs."""
    first, graph = nodes[0], nodes[0].graph
    for node in nodes:
        _hoist(node.args[1], first)
    with graph.inserting_before(first):
        joint = graph.call_function(joint_mm_leaving_sms, (first.args[0], [node.args[1] for node in nodes], 0))
        joint.meta = {**first.meta, "val": [node.meta["val"] for node in nodes]}
        for index, node in enumerate(nodes):
            product = graph.call_function(operator.getitem, (joint, index))
            product.meta = dict(node.meta)
            node.replace_all_uses_with(product)
    for node in nodes:
        graph.erase_node(node)
    return joint


def _hoist(matrix: fx.Node, before: fx.Node) -> None:
    """Have the views that ``matrix`` is made by come before a node."""
    views = []
    while matrix.op == "call_function" and before < matrix:
        views.append(matrix)
        matrix = matrix.all_input_nodes[0]
    for view in reversed(views):
        before.prepend(view)


def part(joint: fx.Node) -> list[fx.Node]:
    """Take back what :func:`join` did, but for where the views of matrices are; the matmuls."""
    graph, nodes = joint.graph, []
    a, matrices, _ = joint.args
    for product in sorted(joint.users, key=lambda one: one.args[1]):
        with graph.inserting_before(joint):
            node = graph.call_function(aten.mm.default, (a, matrices[product.args[1]]))
        node.meta = dict(product.meta)
        product.replace_all_uses_with(node)
        graph.erase_node(product)
        nodes.append(node)
    graph.erase_node(joint)
    return nodes
