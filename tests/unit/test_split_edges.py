"""Edges of the token split: operands that mean something only within a half, writes to views, odd sizes, masks and waits."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from graph_builder import GraphBuilder, aten, copy_of, prims, run_graph
from torch import nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from tw_compile.config import Config
from tw_compile.passes.reasons import SplitRefusal, SplitRefused
from tw_compile.passes.split import SplitReport, find_token_axis, schedule, split_tokens
from tw_compile.passes.split.peephole.grouped import use_small_groups
from tw_compile.passes.split.schedule.windows import Schedule
from tw_compile.planning.halves import FirstHalf
from tw_compile.testing import count_ops, rewrite

BF16, INT = torch.bfloat16, torch.int64


def same_results(graph: fx.Graph, values: list[Any], first: Any = 2, tokens: Any = 6) -> None:
    before = copy_of(graph)
    report = split_tokens(graph, first, axis=find_token_axis(graph, tokens=tokens))
    assert isinstance(report, SplitReport)
    runs = [
        run_graph(each, [torch.clone(v) if isinstance(v, torch.Tensor) else v for v in values])
        for each in (before, graph)
    ]
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-2, atol=1e-2)


def looked_up(b: GraphBuilder, width: int = 4) -> fx.Node:
    ids = b.input(1, 6, dtype=INT)
    return b.view(b.call(aten.embedding.default, b.input(50, width), ids), 6, width)


LOOKED_UP = [torch.arange(6)[None], torch.randn(50, 4)]


def routed(b: GraphBuilder, scores: fx.Node, descending: bool = False) -> tuple[fx.Node, fx.Node, fx.Node]:
    """The experts of the tokens in order, the permutation, and how many entries each expert has."""
    chosen = b.call(operator.getitem, b.call(aten.topk.default, scores, 2), 1)
    flat = b.call(aten.reshape.default, chosen, [12])
    sort = b.call(aten.sort.stable, flat, stable=True, dim=0, descending=descending)
    keys, order = (b.call(operator.getitem, sort, index) for index in (0, 1))
    return flat, order, b.call(aten.histc.default, b.cast(keys, torch.float32), 4, 0, 3)


# 1: wrong results


@pytest.mark.parametrize("kind", ["counts", "permutation", "stacked"])
def test_what_means_something_only_within_its_half_is_not_read_as_if_whole(kind: str) -> None:
    b = GraphBuilder()
    x = b.call(aten.relu.default, b.input(6, 4))
    flat, order, counts = routed(b, x)
    if kind == "counts":
        out = b.call(aten.mul.Tensor, x, counts)
    elif kind == "permutation":
        out = b.call(aten.add.Tensor, flat, order)
    else:
        out = b.call(aten.stack.default, [flat, order], 1)
    same_results(b.finish(out), [torch.randn(6, 4)])


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.gate = nn.Linear(16, 16, bias=False), nn.Linear(16, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        partial = self.down(x)
        dist.all_reduce(partial)
        scores = self.gate(partial)
        keys = scores.topk(2, dim=-1)[1].reshape(-1).sort()[0]
        return scores * torch.histc(keys.float(), bins=4, min=0, max=3)


def test_a_compiled_router_counts_all_tokens() -> None:
    result = rewrite(Router(), (torch.empty(6, 16),), config=Config(split="2", strict=True), device="cpu")
    assert result.report.split is not None and result.report.split.mode != "off"
    assert count_ops(result.after.graph, "aten.histc.default") == 1


# 2: wrong results


def test_groups_that_count_up_are_not_those_of_rows_in_descending_order() -> None:
    b = GraphBuilder()
    x = b.call(aten.relu.default, b.input(6, 16, dtype=BF16))
    _, order, counts = routed(b, b.call(aten.mm.default, x, b.input(16, 4, dtype=BF16)), descending=True)
    ends = b.call(aten.cumsum.default, counts, 0, dtype=torch.int32)
    rows = b.call(aten.index.Tensor, x, [b.call(aten.div.Tensor_mode, order, 2, rounding_mode="floor")])
    made = b.call(aten._grouped_mm.default, rows, b.input(4, 16, 16, dtype=BF16), ends)
    graph = b.finish(b.call(aten.index.Tensor, made, [b.call(operator.getitem, b.call(aten.sort.default, order), 1)]))
    torch.manual_seed(0)
    same_results(graph, [torch.randn(node.meta["val"].shape).to(BF16) for node in graph.find_nodes(op="placeholder")])


# 3: wrong results, graphs with in-place operators


def test_a_write_to_a_joined_view_of_a_split_value_is_refused() -> None:
    b = GraphBuilder()
    h = b.call(aten.relu.default, b.input(6, 4))
    b.call(aten.add_.Tensor, b.call(aten.view.default, h, [3, 8]), 1.0)
    graph = b.finish(b.call(aten.mm.default, h, b.input(4, 4)))
    refused = split_tokens(graph, 2, axis=find_token_axis(graph, tokens=6))
    assert isinstance(refused, SplitRefused) and refused.reason is SplitRefusal.TOKENS_MUTATED


def test_rows_taken_out_before_a_write_are_not_read_behind_it() -> None:
    b = GraphBuilder()
    rows, key = b.call(aten.relu.default, b.input(3, 8, 8)), b.input(3, 2, 8, 4)
    query = b.call(aten.permute.default, b.view(rows, 3, 8, 2, 4), [0, 2, 1, 3])
    added = b.call(aten.add.Tensor, query, key)
    b.call(aten.add_.Tensor, key, 1.0)
    graph = b.finish(b.call(aten.mul.Tensor, added, key))
    same_results(graph, [torch.randn(3, 8, 8), torch.randn(3, 2, 8, 4)], first=5, tokens=24)


# 4: crash when the compiled graph runs


def test_grouped_gemms_with_groups_of_the_depth_stay() -> None:
    b = GraphBuilder()
    a, c, ends = b.input(16, 32, dtype=BF16), b.input(32, 16, dtype=BF16), b.input(2, dtype=torch.int32)
    graph = b.finish(b.call(aten._grouped_mm.default, a, c, ends))
    values = [torch.randn(16, 32).to(BF16), torch.randn(32, 16).to(BF16), torch.tensor([16, 32], dtype=torch.int32)]
    expected = run_graph(copy_of(graph), values)
    use_small_groups(graph)
    torch.testing.assert_close(run_graph(graph, values), expected)


# 5: crashes of the pass


def test_a_collective_may_be_waited_for_twice() -> None:
    b = GraphBuilder()
    issued = b.issue(b.call(aten.relu.default, b.input(6, 4)))
    graph = b.finish(b.add(b.wait(issued), b.wait(issued)))
    split_tokens(graph, 2, axis=find_token_axis(graph, tokens=6))
    assert isinstance(schedule(graph), Schedule)


def symbolic() -> tuple[GraphBuilder, fx.Node]:
    b, env = GraphBuilder(), ShapeEnv()
    b.fake_mode = FakeTensorMode(shape_env=env)
    node = b.graph.placeholder("s")
    node.meta["val"] = env.create_symintnode(env.create_symbol(40, ConstantSource("s"), DimDynamic.DYNAMIC), hint=40)
    b.inputs.append(node)
    return b, node


def test_a_size_that_no_input_has_stays_where_its_tensor_is() -> None:
    b, _ = symbolic()
    x = looked_up(b)
    found = b.call(aten.nonzero.default, b.input(5, dtype=INT))
    graph = b.finish(b.call(aten.mul.Tensor, x, b.call(aten.sym_size.int, found, 0)))
    same_results(graph, [40, *LOOKED_UP, torch.tensor([0, 1, 2, 0, 3])])


def test_halves_that_are_channels_last_are_joined() -> None:
    b, s = symbolic()
    h = b.call(aten.relu.default, b.input(1, s.meta["val"], 12))
    turned = b.call(aten.permute.default, b.call(aten.reshape.default, h, [1, s, 3, 4]), [0, 3, 1, 2])
    graph = b.finish(b.call(aten.neg.default, turned))
    same_results(graph, [40, torch.randn(1, 40, 12)], FirstHalf(32, 1100, 7, 16, 8), s.meta["val"])


def test_a_symbolic_number_may_be_scattered() -> None:
    b, s = symbolic()
    x = looked_up(b)
    index = b.call(aten.remainder.Scalar, b.call(prims.convert_element_type.default, x, INT), 4)
    same_results(b.finish(b.call(aten.scatter.value, x, 1, index, s)), [40, *LOOKED_UP])


def test_requests_take_their_part_of_a_mask_without_heads() -> None:
    b = GraphBuilder()
    query, mask = b.view(looked_up(b, 12), 6, 3, 4), b.input(6, 3, 3)
    graph = b.finish(b.call(aten.scaled_dot_product_attention.default, query, query, query, mask))
    same_results(graph, [torch.arange(6)[None], torch.randn(50, 12), torch.randn(6, 3, 3)])


def test_a_mask_of_one_token_proves_nothing_about_several() -> None:
    b = GraphBuilder()
    rows = b.call(aten.relu.default, b.input(1, 6, 8))
    made: dict[str, Any] = {"dtype": INT, "device": torch.device("cpu"), "requires_grad": False}
    place = b.call(prims.iota.default, 1, start=0, step=1, **made)
    keys, queries = (b.call(aten.unsqueeze.default, place, dim) for dim in (0, 1))
    hidden, seen = (b.constant(number, torch.device("cpu")) for number in (-torch.inf, 0.0))
    mask = b.call(aten.where.self, b.call(aten.gt.Tensor, keys, queries), hidden, seen)
    query = b.call(aten.permute.default, b.view(rows, 1, 6, 2, 4), [0, 2, 1, 3])
    attention = b.call(aten.scaled_dot_product_attention.default, query, query, query, mask)
    same_results(b.finish(b.call(aten.permute.default, attention, [0, 2, 1, 3])), [torch.randn(1, 6, 8)])
