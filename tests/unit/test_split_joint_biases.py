"""GEMMs of one input that add biases: which are computed as one."""

from __future__ import annotations

import pytest
import torch
import torch.fx as fx
from joint_graphs import BF16, call, operands, swiglu
from torch._subclasses.fake_tensor import FakeTensorMode

from tw_compile.graph.predicates import aten
from tw_compile.kernels.gemm.mm_leaving_sms import joint_mm_leaving_sms
from tw_compile.passes.joint import beside, join


def with_biases(columns: tuple[int, ...] = (64, 128)) -> tuple[fx.Graph, FakeTensorMode, list[fx.Node]]:
    """A bias plus the same rows times each matrix."""
    graph, (a, *matrices) = operands(columns)
    mode = a.meta["val"].fake_mode
    biases = [graph.placeholder(f"bias_{index}") for index, _ in enumerate(columns)]
    with mode:
        for bias, count in zip(biases, columns, strict=True):
            bias.meta["val"] = torch.empty(count, dtype=BF16)
    return (
        graph,
        mode,
        [call(graph, mode, aten.addmm.default, bias, a, matrix) for bias, matrix in zip(biases, matrices, strict=True)],
    )


def test_gemms_with_biases_are_joined() -> None:
    graph, _, nodes = with_biases((64, 128, 8))
    assert beside(nodes[0], nodes[1:]) == nodes and beside(nodes[2], []) == nodes[2:]
    graph.output(tuple(nodes))
    wanted = [[node.args[place] for node in nodes] for place in (2, 0)]
    rows = nodes[0].args[1]
    node = join(nodes).adopt()
    graph.lint()
    assert node.target is joint_mm_leaving_sms and list(node.args) == [rows, *wanted, 0]
    assert [tuple(one.shape) for one in node.meta["val"]] == [(32, 64), (32, 128), (32, 8)]


def test_gemms_with_and_without_biases_are_not_joined() -> None:
    graph, mode, (first, second) = with_biases()
    plain = [call(graph, mode, aten.mm.default, *node.args[1:]) for node in (first, second)]
    assert beside(first, [*plain, second]) == [first, second]
    assert beside(plain[0], [first, plain[1], second]) == plain


def test_gemms_that_scale_what_they_add_are_not_joined() -> None:
    _, _, (first, second) = with_biases()
    second.kwargs = {"beta": 2.0}
    assert beside(first, [second]) == [first] and beside(second, [first]) == []


@pytest.mark.parametrize("shape", [(1,), (32, 128), (1, 128), (32, 1)])
def test_gemms_that_add_something_else_than_a_bias_are_not_joined(shape: tuple[int, ...]) -> None:
    graph, mode, (first, second) = with_biases()
    addend = graph.placeholder("addend")
    with mode:
        addend.meta["val"] = torch.empty(shape, dtype=BF16)
    other = call(graph, mode, aten.addmm.default, addend, *second.args[1:])
    assert beside(first, [other]) == [first] and beside(other, [first]) == []


def test_a_bias_that_the_graph_computes_is_not_joined() -> None:
    graph, mode, (first, second) = with_biases()
    made = call(graph, mode, aten.neg.default, second.args[0])
    computed = call(graph, mode, aten.addmm.default, made, *second.args[1:])
    assert beside(first, [computed]) == [first] and beside(computed, [first]) == []


def test_biases_whose_views_come_later_are_taken_before_the_first_gemm() -> None:
    graph, mode, (first, second) = with_biases((64, 64))
    later = call(graph, mode, aten.slice.Tensor, second.args[0], 0, 0, 64)
    third = call(graph, mode, aten.addmm.default, later, *second.args[1:])
    graph.output((first, third))
    join([first, third]).adopt()
    graph.lint()


def test_gate_and_up_with_biases_are_joined_and_do_not_gate() -> None:
    graph, mode, nodes = with_biases((64, 64))
    graph.output(swiglu(graph, mode, *nodes))
    assert join(nodes).node.target is joint_mm_leaving_sms
    graph, mode, (merged,) = with_biases((128,))
    halves = [call(graph, mode, aten.slice.Tensor, merged, 1, *ends) for ends in ((0, 64), (64, 128))]
    graph.output(swiglu(graph, mode, *halves))
    assert join([merged]).node.target is joint_mm_leaving_sms


def test_a_constant_without_a_known_shape_is_not_joined() -> None:
    graph, _, (first, second) = with_biases()
    constant = graph.create_node("get_attr", "constant")
    other = graph.call_function(aten.addmm.default, (constant, *second.args[1:]))
    assert beside(first, [other]) == [first] and beside(other, [first]) == []


def test_operands_by_name_are_not_joined() -> None:
    graph, _, (first, second) = with_biases()
    bias, mat1, mat2 = second.args
    other = graph.call_function(aten.addmm.default, (bias,), {"mat1": mat1, "mat2": mat2})
    assert beside(first, [other]) == [first] and beside(other, [first, second]) == []


def test_a_view_that_depends_on_something_else_is_not_joined() -> None:
    graph, mode, (first, second) = with_biases((64, 64))
    size = graph.call_function(torch.ops.aten.sym_size.int, (first, 1))
    part = graph.call_function(aten.slice.Tensor, (second.args[0], 0, 0, size))
    part.meta = second.args[0].meta
    other = call(graph, mode, aten.addmm.default, part, *second.args[1:])
    assert beside(first, [other]) == [first] and beside(other, [first]) == []
