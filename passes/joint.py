"""Matmuls of one input as one operator, which computes them as one GEMM.

a @ x, a @ y, a @ z           ->  joint_mm_leaving_sms(a, [x, y, z], [], 0)
b + a @ x, c + a @ y          ->  joint_mm_leaving_sms(a, [x, y], [b, c], 0)
silu(a @ gate) * (a @ up)     ->  gated_mm_leaving_sms(a, gate, up, 0)
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
import torch.fx as fx

from tw_compile.graph.predicates import (
    adds_once,
    aten,
    is_call,
    is_cast,
    is_view,
    makes_view,
    peel_views,
    same_shape,
    same_size,
    value,
)
from tw_compile.kernels.gemm.joint_mm import can_add, can_multiply
from tw_compile.kernels.gemm.mm_leaving_sms import gated_mm_leaving_sms, joint_mm_leaving_sms
from tw_compile.passes.nodes import Inserter, annotation
from tw_compile.planning.joint_tiles import MOST_JOINT


def beside(node: fx.Node, others: Sequence[fx.Node]) -> list[fx.Node]:
    """``node`` and those of ``others`` that one launch can compute with it; empty if our kernel can't compute ``node``."""
    if not _can_join(node, node):
        return []
    return [node, *(one for one in others if _can_join(one, node))][:MOST_JOINT]


def _can_join(node: fx.Node, first: fx.Node) -> bool:
    """Whether ``node`` is a matmul of the same rows as ``first`` and a matrix that is a graph input and suits the kernel.

    ``node`` must add a bias if ``first`` does, and none if ``first`` adds none.
    """
    if not is_call(node, aten.mm.default, aten.addmm.default) or node.target is not first.target or node.kwargs:
        return False
    if not _is_same(rows_of(node), rows_of(first)) or not all(map(_is_given, (matrix_of(node), *_biases(node)))):
        return False
    a, matrix, biases = value(rows_of(node)), value(matrix_of(node)), [value(one) for one in _biases(node)]
    if a is None or matrix is None or not can_multiply(a, matrix):
        return False
    return all(bias is not None and can_add(bias, matrix) for bias in biases)


def _biases(matmul: fx.Node) -> tuple[fx.Node, ...]:
    """The bias that a matmul adds; empty if it adds none."""
    return matmul.args[:-2]  # type: ignore[return-value]


def rows_of(matmul: fx.Node) -> fx.Node:
    """The first factor of an ``mm`` or ``addmm``."""
    return matmul.args[-2]  # type: ignore[return-value]


def matrix_of(matmul: fx.Node) -> fx.Node:
    """The second factor of an ``mm`` or ``addmm``."""
    return matmul.args[-1]  # type: ignore[return-value]


def _is_same(one: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes hold the same rows: the same elements in the same order, perhaps through different views."""
    shape, other_shape = (node.meta["val"].shape for node in (one, other))
    return one is other or (peel_views(one) is peel_views(other) and all(map(same_size, shape, other_shape)))


def _is_given(node: fx.Node) -> bool:
    return given_as(node) is not None


def given_as(node: fx.Node) -> fx.Node | None:
    """The input of the graph that ``node`` is, or is a view of if it depends on nothing else; None if ``node`` is computed."""
    while node.op == "call_function" and makes_view(node) and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node if node.op in ("placeholder", "get_attr") else None


@dataclass(frozen=True)
class Joint:
    """A new ``node`` that computes the same as ``results``, and that nobody reads yet.

    The caller must call either :meth:`adopt` or :meth:`discard`. ``results`` has one node for each result of ``node``.
    """

    node: fx.Node
    results: tuple[fx.Node, ...]

    def adopt(self) -> fx.Node:
        """Let all readers read ``node`` instead, erase ``results``, and return ``node``."""
        graph = self.node.graph
        if is_call(self.node, gated_mm_leaving_sms):
            found = [self.node]
        else:
            with graph.inserting_before(self.node.next):
                found = [
                    graph.call_function(operator.getitem, (self.node, index)) for index in range(len(self.results))
                ]
        for result, new in zip(self.results, found, strict=True):
            new.meta = dict(result.meta)
            result.replace_all_uses_with(new)
            erase(result)
        return self.node

    def discard(self) -> None:
        """Erase ``node``. Matrices, biases and their views stay at the place to which they were moved."""
        erase(self.node)


def erase(node: fx.Node) -> None:
    """Erase a node that nobody reads, and all nodes that only it has read."""
    unread = {node: None}
    while unread:
        one, _ = unread.popitem()
        if one.op == "call_function" and not one.users:
            unread |= dict.fromkeys(one.all_input_nodes)
            one.graph.erase_node(one)


def join(nodes: Sequence[fx.Node]) -> Joint:
    """Add one operator that computes ``nodes``, in front of the first of them; it leaves no SMs.

    ``nodes`` are a result of :func:`beside`, in the graph's order.
    """
    first, graph = nodes[0], nodes[0].graph
    matrices, biases = [matrix_of(node) for node in nodes], [one for node in nodes for one in _biases(node)]
    for given in (*matrices, *biases):
        hoist(given, first)
    gated = None if biases else _gated(nodes)
    with graph.inserting_before(first):
        if gated is None:
            joint = graph.call_function(joint_mm_leaving_sms, (rows_of(first), matrices, biases, 0))
            joint.meta = {**first.meta, "val": [node.meta["val"] for node in nodes]}
            return Joint(joint, tuple(nodes))
        gate, up, product = gated
        joint = graph.call_function(gated_mm_leaving_sms, (rows_of(first), _factor(gate), _factor(up), 0))
        joint.meta = {**first.meta, "val": product.meta["val"]}
        return Joint(joint, (product,))


def is_gated(nodes: Sequence[fx.Node]) -> bool:
    """Whether :func:`join` stores ``silu(gate) * up`` of ``nodes``."""
    return not _biases(nodes[0]) and _gated(nodes) is not None


def hoist(given: fx.Node, before: fx.Node) -> None:
    """Move ``given``, and the nodes that it is a view of, in front of ``before`` if they come after ``before``."""
    made_of = [given]
    while made_of[-1].all_input_nodes:
        made_of.append(made_of[-1].all_input_nodes[0])
    for one in reversed(made_of):
        if before < one:
            before.prepend(one)


def _factor(product: fx.Node) -> fx.Node:
    """The second factor of a matmul. If ``product`` is a slice of the matmul's columns: the same slice of the factor."""
    if is_call(product, aten.mm.default):
        return matrix_of(product)
    matmul: Any
    matmul, *where = product.args
    matrix, graph = matrix_of(matmul), product.graph
    return Inserter(graph).call(aten.slice.Tensor, (matrix, *where), like=matmul, noted=annotation(matmul))


def _gated(nodes: Sequence[fx.Node]) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """The gate, the other factor, and their product ``silu(gate) * up``, if nothing else reads them.

    They are two matmuls, or both halves of the columns of one.
    """
    halves = list(nodes) if len(nodes) > 1 else _halves(nodes[0])
    for gate, up in permutations(halves) if len(halves) == 2 else ():
        product = _product(gate, up)
        if product is not None and _is_alike(product.meta["val"], gate.meta["val"]):
            return gate, up, product
    return None


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return same_shape(one, other) and one.dtype == other.dtype


def _halves(node: fx.Node) -> list[fx.Node]:
    """Slices of the left and the right half of the columns, if these are all that reads a matmul."""
    columns, ends, found = node.meta["val"].shape[1], [], list(node.users)
    for user in found:
        arguments: Any = user.args
        if not is_call(user, aten.slice.Tensor) or len(arguments) != 4 or arguments[1] != 1:
            return []
        if not all(isinstance(size, int) for size in (columns, *arguments[2:])):
            return []
        ends.append((arguments[2], min(arguments[3], columns)))
    middle = columns // 2
    return found if sorted(ends) == [(0, middle), (middle, 2 * middle)] and columns % 16 == 0 else []


def _product(gate: fx.Node, up: fx.Node) -> fx.Node | None:
    """The node that holds ``silu(gate) * up`` in the shape of the matmuls; None if there is none.

    Inductor writes ``silu(x)`` as ``x / (1 + exp(-x))``.
    """
    x = _last_view(gate)
    cast = _only_user(x)
    if is_cast(cast):
        x = cast
    division: Any = next((user for user in x.users if is_call(user, aten.div.Tensor)), None)
    if division is None or division.args[0] is not x or len(x.users) != 2:
        return None
    plus_one: Any = division.args[1]
    adds_one = is_call(plus_one, aten.add.Tensor) and adds_once(plus_one) and plus_one.args[1:] == (1,)
    exponential: Any = plus_one.args[0] if adds_one else None
    negated: Any = exponential.args[0] if is_call(exponential, aten.exp.default) else None
    if not (is_call(negated, aten.neg.default) and negated.args[0] is x):
        return None
    if any(len(one.users) != 1 for one in (plus_one, exponential, negated)):
        return None
    rounded = _only_user(division)
    silu = rounded if is_cast(rounded) else division
    product, other = _only_user(silu), _last_view(up)
    if not (is_call(product, aten.mul.Tensor) and {*product.args} == {silu, other} and len(other.users) == 1):
        return None
    return _last_view(product)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _last_view(node: fx.Node) -> fx.Node:
    """The last of the views of ``node``, as long as each has a single reader; ``node`` itself if there are none."""
    while is_view(user := _only_user(node)):
        node = user
    return node
