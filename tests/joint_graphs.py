"""Graphs of a few GEMMs of one input, made by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode

from tw_compile.graph.predicates import aten

BF16 = torch.bfloat16


def operands(columns: tuple[int, ...], rows: int = 32, dtype: torch.dtype = BF16) -> tuple[fx.Graph, list[fx.Node]]:
    """A graph with rows of 64 and matrices of so many columns, as linear layers have them."""
    graph = fx.Graph()
    a = graph.placeholder("a")
    nodes = [a]
    with FakeTensorMode() as mode:
        a.meta["val"] = torch.empty(rows, 64, dtype=dtype)
        for index, count in enumerate(columns):
            weight = graph.placeholder(f"weight_{index}")
            weight.meta["val"] = torch.empty(count, 64, dtype=dtype)
            nodes.append(call(graph, mode, aten.permute.default, weight, [1, 0]))
    return graph, nodes


def call(graph: fx.Graph, mode: FakeTensorMode, target: Any, *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    with mode:
        node.meta["val"] = target(*fx.map_arg(args, lambda one: one.meta["val"]))
    return node


def products(
    columns: tuple[int, ...] = (64, 128), dtype: torch.dtype = BF16
) -> tuple[fx.Graph, FakeTensorMode, list[fx.Node]]:
    """The same rows times each matrix."""
    graph, (a, *matrices) = operands(columns, dtype=dtype)
    mode = a.meta["val"].fake_mode
    return graph, mode, [call(graph, mode, aten.mm.default, a, one) for one in matrices]


def swiglu(graph: fx.Graph, mode: FakeTensorMode, gate: fx.Node, up: fx.Node, order: int = 1) -> fx.Node:
    """As Inductor decomposes it."""
    wide = call(graph, mode, torch.ops.prims.convert_element_type.default, gate, torch.float32)
    negated = call(graph, mode, aten.neg.default, wide)
    plus_one = call(graph, mode, aten.add.Tensor, call(graph, mode, aten.exp.default, negated), 1)
    silu = call(
        graph,
        mode,
        torch.ops.prims.convert_element_type.default,
        call(graph, mode, aten.div.Tensor, wide, plus_one),
        BF16,
    )
    return call(graph, mode, aten.mul.Tensor, *(silu, up)[::order])
