"""vLLM's attention in graphs that are split, with operators that keep a cache by the layer's name."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import pytest
import torch
import torch.fx as fx
from graph_builder import GraphBuilder, copy_of, run_graph
from torch._higher_order_ops.auto_functionalize import auto_functionalized

from tw_compile.graph.predicates import operator_name
from tw_compile.passes.reasons import JoinReason
from tw_compile.passes.split import SplitReport, find_token_axis, split_tokens
from tw_compile.passes.split.schedule.lock import has_own_kernel

aten = torch.ops.aten
TOKENS, HEADS, HEAD_DIM, FIRST = 12, 2, 4, 5
caches: dict[str, list[torch.Tensor]] = {}
"""Keys and values of the one request, in the order in which they were written."""


def _update(key: torch.Tensor, value: torch.Tensor, layer_name: str) -> torch.Tensor:
    caches.setdefault(layer_name, []).append(torch.stack([key, value]))
    return key.new_empty(0)


def _attend(query: torch.Tensor, layer_name: str, end: int) -> torch.Tensor:
    key, value = torch.cat(caches[layer_name], 1)[:, :end].unbind(0)
    scores = torch.einsum("qhd,khd->hqk", query, key)
    visible = torch.ones(scores.shape[1:], dtype=torch.bool).tril(key.shape[0] - query.shape[0])
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), value)


def _whole(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    layer_name: str,
    output_scale: torch.Tensor | None = None,
    kv_cache_dummy_dep: torch.Tensor | None = None,
) -> None:
    output.copy_(_attend(query, layer_name, query.shape[0]))


def _half(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer_name: str,
    begin: int,
    value_head_dim: int,
    dtype: torch.dtype,
    write: bool,
    after: list[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    if write:
        _update(key, value, layer_name)
    return _attend(query, layer_name, begin + query.shape[0]).to(dtype), query.new_empty(0)


@pytest.fixture(scope="module", autouse=True)
def vllm_operators() -> Iterator[None]:
    """As vLLM 0.24's and those of ``tw_compile.hosts.vllm.attention``, with what matters of their signatures."""
    with (
        torch.library._scoped_library("vllm", "FRAGMENT") as vllm,
        torch.library._scoped_library("tw_compile", "FRAGMENT") as ours,
    ):
        vllm.define("unified_kv_cache_update(Tensor key, Tensor value, str layer_name) -> Tensor")
        vllm.impl("unified_kv_cache_update", _update, "CPU")
        vllm.impl("unified_kv_cache_update", lambda key, value, layer_name: key.new_empty(0), "Meta")
        vllm.define(
            "unified_attention_with_output(Tensor query, Tensor key, Tensor value, Tensor! output, str layer_name, "
            "Tensor? output_scale=None, Tensor? kv_cache_dummy_dep=None) -> ()"
        )
        vllm.impl("unified_attention_with_output", _whole, "CPU")
        vllm.impl("unified_attention_with_output", lambda *args, **kwargs: None, "Meta")
        ours.define(
            "vllm_attention_half(Tensor query, Tensor key, Tensor value, str layer_name, SymInt begin, "
            "SymInt value_head_dim, ScalarType dtype, bool write, Tensor[] after) -> (Tensor, Tensor)"
        )
        ours.impl("vllm_attention_half", _half, "CPU")
        ours.impl("vllm_attention_half", lambda query, *rest: (torch.empty_like(query), query.new_empty(0)), "Meta")
        yield


class Layers(GraphBuilder):
    """Layers of attention that add to what they read; all of one layer's tensors are ``[tokens, heads, head_dim]``."""

    def __init__(self) -> None:
        super().__init__()
        self.x = self.input(TOKENS, HEADS * HEAD_DIM)
        self.matrices = [self.input(HEADS * HEAD_DIM, HEADS * HEAD_DIM) for _ in range(3)]

    def layer(self, x: fx.Node, name: str, update: bool = True, scale: fx.Node | None = None) -> fx.Node:
        query, key, value = (
            self.call(aten.reshape.default, self.call(aten.mm.default, x, matrix), [TOKENS, HEADS, HEAD_DIM])
            for matrix in self.matrices
        )
        written = self.call(torch.ops.vllm.unified_kv_cache_update.default, key, value, name) if update else None
        empty = self.call(
            aten.empty.memory_format, [TOKENS, HEADS * HEAD_DIM], dtype=torch.float32, device=torch.device("cpu")
        )
        output = self.call(aten.reshape.default, empty, [-1, HEADS, HEAD_DIM])
        both = self.call(
            auto_functionalized,
            torch.ops.vllm.unified_attention_with_output.default,
            query=query,
            key=key,
            value=value,
            output=output,
            layer_name=name,
            output_scale=scale,
            kv_cache_dummy_dep=written,
        )
        attended = self.call(operator.getitem, both, 1)
        return self.call(aten.add.Tensor, x, self.call(aten.reshape.default, attended, [TOKENS, HEADS * HEAD_DIM]))


def outputs(graph: fx.Graph, builder: Layers) -> list[torch.Tensor]:
    caches.clear()
    generator = torch.Generator().manual_seed(0)
    return run_graph(graph, [torch.randn(one.meta["val"].shape, generator=generator) for one in builder.inputs])


def split(builder: Layers, join: bool = False) -> tuple[fx.Graph, SplitReport]:
    graph = copy_of(builder.graph)
    axis = find_token_axis(graph, tokens=TOKENS, piece=True)
    report = split_tokens(graph, FIRST, axis=axis, join_attention=join)  # type: ignore[arg-type]
    assert isinstance(report, SplitReport)
    return graph, report


def named(graph: fx.Graph, name: str) -> list[fx.Node]:
    return [node for node in graph.nodes if operator_name(node) == name]


def test_each_half_writes_its_rows_and_attends_behind_those_before_it() -> None:
    b = Layers()
    b.graph.output((b.layer(b.layer(b.x, "first"), "second"),))
    graph, report = split(b)
    assert not report.joins and not report.joined
    halves = named(graph, "tw_compile::vllm_attention_half")
    assert [(node.args[3], node.args[4]) for node in halves] == [
        ("first", 0), ("first", FIRST), ("second", 0), ("second", FIRST),
    ]  # fmt: skip
    assert not named(graph, "vllm::unified_kv_cache_update") and all(has_own_kernel(node) for node in halves)
    for one, other in zip(halves[::2], halves[1::2], strict=True):
        (after,) = other.args[-1]  # type: ignore[misc]
        assert after.args == (one, 1) and one.args[-1] == []
    for one, other in zip(outputs(graph, b), outputs(b.graph, b), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


def test_a_layer_that_reads_anothers_cache_writes_none() -> None:
    b = Layers()
    b.graph.output((b.layer(b.layer(b.x, "shared"), "shared", update=False),))
    graph, report = split(b)
    assert not report.joins
    writes = [node.args[-2] for node in named(graph, "tw_compile::vllm_attention_half")]
    assert writes == [True, True, False, False]
    for one, other in zip(outputs(graph, b), outputs(b.graph, b), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


def test_attention_that_is_to_join_is_vllms_own_with_its_update() -> None:
    b = Layers()
    b.graph.output((b.layer(b.x, "first"),))
    graph, report = split(b, join=True)
    assert report.joins == {JoinReason.ATTENTION_PLANNED: 2}
    assert len(named(graph, "vllm::unified_kv_cache_update")) == 1
    for one, other in zip(outputs(graph, b), outputs(b.graph, b), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


def test_a_quantised_result_and_an_update_that_others_read_join() -> None:
    b = Layers()
    b.graph.output((b.layer(b.x, "first", scale=b.input(1)),))
    graph, report = split(b)
    assert JoinReason.ATTENTION_KERNEL in report.joins and len(named(graph, "vllm::unified_kv_cache_update")) == 1

    b = Layers()
    made = b.layer(b.x, "first")
    (update,) = named(b.graph, "vllm::unified_kv_cache_update")
    b.graph.output((made, update))
    graph, report = split(b)
    assert JoinReason.ATTENTION in report.joins and len(named(graph, "vllm::unified_kv_cache_update")) == 1


def test_an_update_with_other_keys_joins() -> None:
    b = Layers()
    made = b.layer(b.x, "first")
    (update,) = named(b.graph, "vllm::unified_kv_cache_update")
    key, value, name = update.args
    update.args = (value, key, name)
    b.graph.output((made,))
    graph, report = split(b)
    assert JoinReason.ATTENTION in report.joins and len(named(graph, "vllm::unified_kv_cache_update")) == 1
    for one, other in zip(outputs(graph, b), outputs(b.graph, b), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


def test_keys_and_values_of_which_only_one_has_a_row_for_each_token_join() -> None:
    b = Layers()
    wide = b.call(aten.mm.default, b.x, b.input(HEADS * HEAD_DIM, TOKENS * HEAD_DIM))
    key = b.call(aten.reshape.default, wide, [TOKENS, TOKENS, HEAD_DIM])
    value = b.call(aten.permute.default, key, [1, 0, 2])
    b.graph.output((b.call(torch.ops.vllm.unified_kv_cache_update.default, key, value, "first"),))
    graph, report = split(b)
    assert report.joins == {JoinReason.ATTENTION: 1} and len(named(graph, "vllm::unified_kv_cache_update")) == 1
