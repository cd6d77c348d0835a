"""What must stay before what in a graph, beside the data that nodes hand to each other."""

from __future__ import annotations

import operator

import torch
import torch.fx as fx
from graph_builder import GraphBuilder, aten

from tw_compile.passes.split.schedule.dependences import predecessors, written_by


def comes_before(b: GraphBuilder, earlier: fx.Node, later: fx.Node) -> bool:
    b.finish(later)
    return earlier in predecessors(b.graph, [])[later]


def apart(node: fx.Node) -> fx.Node:
    """With metadata that do not tell what its memory is shared with."""
    node.meta["val"] = node.meta["val"].clone()
    return node


def test_random_numbers_are_drawn_in_their_order() -> None:
    b = GraphBuilder()
    x = b.input(4)
    first, second = (b.call(aten.bernoulli.p, x, 0.5) for _ in range(2))
    assert comes_before(b, first, second)


def test_one_result_that_is_taken_twice_is_one_memory() -> None:
    b = GraphBuilder()
    results = b.call(aten.topk.default, b.input(4), 2)
    first, again, other = (apart(b.call(operator.getitem, results, index)) for index in (0, 0, 1))
    written = b.call(aten.relu_.default, first)
    assert comes_before(b, written, b.call(aten.neg.default, again))
    b.graph.erase_node(b.graph.output_node())
    assert not comes_before(b, written, b.call(aten.neg.default, other))


def test_parts_of_a_value_are_its_memory() -> None:
    b = GraphBuilder()
    x = b.call(aten.neg.default, b.input(4))
    part = apart(b.call(operator.getitem, b.call(aten.split.Tensor, x, 2), 0))
    written = b.call(aten.relu_.default, x)
    assert comes_before(b, written, b.call(aten.neg.default, part))


def test_values_of_one_storage_are_one_memory() -> None:
    b = GraphBuilder()
    x, other = b.call(aten.neg.default, b.input(4)), b.call(aten.neg.default, b.input(4))
    other.meta["val"] = x.meta["val"].view(4)
    written = b.call(aten.relu_.default, x)
    read = b.graph.call_function(aten.neg.default, (other,))
    read.meta["val"] = torch.empty(4)
    assert comes_before(b, written, read)


def test_an_operator_without_a_schema_may_write_to_all_that_it_is_given() -> None:
    b = GraphBuilder()
    given = [b.input(4), b.input(4)]
    assert written_by(b.graph.call_function(torch.ops.higher_order.cond, tuple(given))) == given
    assert written_by(b.graph.call_function(aten.add.Tensor, tuple(given))) == []
