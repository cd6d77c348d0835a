"""Buffers that a layer of vLLM's fills with a sum: gone where the graph proves that nobody can tell."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from tw_compile.hosts.vllm.buffers import write_no_buffers

H = 8
EVERYTHING = slice(None, None, None)


@pytest.fixture(autouse=True)
def all_reduce() -> Iterator[None]:
    with torch.library._scoped_library("vllm", "FRAGMENT") as library:
        if not hasattr(torch.ops.vllm, "all_reduce"):
            library.define("all_reduce(Tensor tensor, str group_name) -> Tensor")
        library.impl("all_reduce", lambda tensor, group_name: tensor * 2, "CompositeExplicitAutograd")
        yield


class Layer:
    """A Dynamo graph of ``tokens`` x H, with a number of tokens that is not known."""

    def __init__(self) -> None:
        mode = FakeTensorMode(shape_env=ShapeEnv())
        sizes = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
        x = mode.from_tensor(torch.empty(6, H), symbolic_context=sizes)
        self.graph = fx.Graph()
        self.tokens = self.node("placeholder", "tokens", value=x.shape[0])
        self.x = self.node("placeholder", "x", value=x)
        self.mode = mode

    def node(self, op: str, target: Any, *args: Any, value: Any = None, **named: Any) -> fx.Node:
        made = self.graph.create_node(op, target, args, named)
        made.meta["example_value"] = value
        return made

    def call(self, target: Any, *args: Any, **named: Any) -> fx.Node:
        def value(node: fx.Node) -> Any:
            return node.meta["example_value"]

        with self.mode:
            made = target(*fx.map_arg(args, value), **fx.map_arg(named, value))
        return self.node("call_function", target, *args, value=made, **named)

    def summed(self) -> fx.Node:
        return self.call(torch.ops.vllm.all_reduce, self.x, group_name="tp:0")

    def write(self, buffer: fx.Node, index: Any, summed: fx.Node) -> fx.Node:
        return self.node("call_function", operator.setitem, buffer, index, summed)

    def finish(self, *results: fx.Node) -> tuple[fx.GraphModule, int]:
        self.graph.output(results)
        module = fx.GraphModule(torch.nn.Module(), self.graph)
        return module, write_no_buffers(module)


@pytest.mark.parametrize("up_to", ["all", "tokens"])
@pytest.mark.parametrize("target", [torch.empty_like, torch.empty])
def test_readers_of_a_buffer_read_the_sum(up_to: str, target: Any) -> None:
    layer = Layer()
    buffer = layer.call(target, *([layer.x] if target is torch.empty_like else [layer.tokens, H]))
    summed = layer.summed()
    layer.write(buffer, EVERYTHING if up_to == "all" else slice(None, layer.tokens, None), summed)
    module, count = layer.finish(layer.call(torch.relu, buffer), layer.call(torch.neg, buffer))
    assert count == 1 and not {operator.setitem, target} & {node.target for node in module.graph.nodes}
    module.graph.lint()
    x = torch.randn(6, H)
    relu, negative = module(6, x)
    assert torch.equal(relu, torch.relu(2 * x)) and torch.equal(negative, -2 * x)


def test_what_is_written_to_the_buffer_later_is_written_to_the_sum() -> None:
    layer = Layer()
    buffer = layer.call(torch.empty_like, layer.x)
    layer.write(buffer, EVERYTHING, layer.summed())
    layer.node("call_method", "add_", buffer, 1.0)
    module, count = layer.finish(layer.call(torch.neg, buffer))
    x = torch.randn(6, H)
    assert count == 1 and torch.equal(module(6, x)[0], -(2 * x + 1))


def read_before(layer: Layer, buffer: fx.Node) -> tuple[fx.Node, ...]:
    early = layer.call(torch.neg, buffer)
    layer.write(buffer, EVERYTHING, layer.summed())
    return (early, buffer)


def sum_is_read(layer: Layer, buffer: fx.Node) -> tuple[fx.Node, ...]:
    summed = layer.summed()
    layer.write(buffer, EVERYTHING, summed)
    return (summed, buffer)


def some_rows(layer: Layer, buffer: fx.Node) -> tuple[fx.Node, ...]:
    layer.write(buffer, slice(None, 4, None), layer.summed())
    return (buffer,)


def later_rows(layer: Layer, buffer: fx.Node) -> tuple[fx.Node, ...]:
    layer.write(buffer, slice(1, None, None), layer.summed())
    return (buffer,)


def columns(layer: Layer, buffer: fx.Node) -> tuple[fx.Node, ...]:
    layer.write(buffer, (Ellipsis, slice(None, H, None)), layer.summed())
    return (buffer,)


def no_sum(layer: Layer, buffer: fx.Node) -> tuple[fx.Node, ...]:
    layer.write(buffer, EVERYTHING, layer.call(torch.transpose, layer.call(torch.neg, layer.x), 0, 0))
    return (buffer,)


def a_number(layer: Layer, buffer: fx.Node) -> tuple[fx.Node, ...]:
    layer.write(buffer, EVERYTHING, 0.0)  # type: ignore[arg-type]
    return (buffer,)


LEFT = (read_before, sum_is_read, some_rows, later_rows, columns, no_sum, a_number)


@pytest.mark.parametrize("build", LEFT, ids=lambda build: build.__name__)
def test_other_buffers_stay(build: Callable[[Layer, fx.Node], tuple[fx.Node, ...]]) -> None:
    layer = Layer()
    buffer = layer.call(torch.empty_like, layer.x)
    before = len(layer.graph.nodes)
    module, count = layer.finish(*build(layer, buffer))
    assert count == 0 and buffer in module.graph.nodes and len(module.graph.nodes) > before


@pytest.mark.parametrize("how", [{"dtype": torch.float64}, {"device": "meta"}])
def test_a_buffer_of_another_kind_stays(how: dict[str, Any]) -> None:
    layer = Layer()
    buffer = layer.call(torch.empty_like, layer.x, **how)
    layer.write(buffer, EVERYTHING, layer.summed())
    assert layer.finish(buffer)[1] == 0


def test_a_buffer_of_another_shape_stays() -> None:
    """The sum would be repeated for each of its rows."""
    layer = Layer()
    buffer = layer.call(torch.empty, 3, layer.tokens, H)
    layer.write(buffer, EVERYTHING, layer.summed())
    assert layer.finish(buffer)[1] == 0
