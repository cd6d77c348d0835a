"""Sorts of a router's choices in fewer bits: which ones, what they compute."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.fx as fx
from graph_builder import GraphBuilder
from split_graphs import WORLD_SIZE, family_graph, random_values, run_alone

from tw_compile.graph.predicates import aten
from tw_compile.passes.nodes import annotate
from tw_compile.passes.split import SplitReport, split_tokens
from tw_compile.passes.split.peephole.expert_keys import narrow_expert_keys
from tw_compile.testing import fake_process_group
from tw_compile.testing.graphs import find_ops


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with fake_process_group(WORLD_SIZE):
        yield


def test_choices_of_few_experts_are_sorted_in_a_byte_each_and_the_results_are_the_same() -> None:
    graph = family_graph("mixtral", 3, 21, dtype=torch.bfloat16)
    assert narrow_expert_keys(graph) == 0, "not those of all tokens"
    report = split_tokens(graph, 21)
    assert isinstance(report, SplitReport) and not report.joins
    values = random_values(graph)
    expected = run_alone(graph, values)
    sorts = find_ops(graph, "aten.sort")
    assert narrow_expert_keys(graph) == len(sorts) > 0
    graph.lint()
    for sort in sorts:
        keys, (values_of_sort, places) = sort.args[0], sort.meta["val"]
        assert keys.meta["val"].dtype == values_of_sort.dtype == torch.uint8 and places.dtype == torch.int64
        for result in sort.users:
            assert result.meta["val"].dtype == (torch.int64 if result.args[1] else torch.uint8)
    for histogram in find_ops(graph, "histc"):
        assert histogram.args[0].meta["val"].dtype in (torch.float32, torch.int32, torch.int64)
    for one, other in zip(expected, run_alone(graph, values), strict=True):
        assert torch.equal(one, other)
    assert narrow_expert_keys(graph) == 0


class Choices(GraphBuilder):
    """Three of so many are chosen for each of four tokens, and sorted."""

    def chosen(self, many: int, dim: int = -1) -> fx.Node:
        return self.call(aten.topk.default, self.input(*((4, many) if dim == -1 else (many, 4))), 3, dim)

    def sort(self, entries: fx.Node, target: Any = aten.sort.default, **options: Any) -> fx.Node:
        sort = self.call(target, self.view(entries, 12), **options)
        annotate(sort, split=1)
        self.graph.output((self.call(operator.getitem, sort, 0), self.call(operator.getitem, sort, 1)))
        return sort

    def choices(self, topk: fx.Node, result: int = 1) -> fx.Node:
        return self.call(operator.getitem, topk, result)


@pytest.mark.parametrize(
    ("many", "dtype"),
    [(256, torch.uint8), (257, torch.int16), (32768, torch.int16), (32769, torch.int64)],
)
@pytest.mark.parametrize("dim", [-1, 0])
def test_keys_are_as_narrow_as_the_number_of_experts(many: int, dtype: torch.dtype, dim: int) -> None:
    b = Choices()
    sort = b.sort(b.choices(b.chosen(many, dim)))
    assert narrow_expert_keys(b.graph) == (dtype != torch.int64)
    assert sort.args[0].meta["val"].dtype == sort.meta["val"][0].dtype == dtype
    (output,) = b.graph.find_nodes(op="output")
    scores = torch.randn(4, many) if dim == -1 else torch.randn(many, 4)
    scores[..., -1] = 9.0  # the largest number is among the keys
    keys, places = fx.GraphModule({}, b.graph)(scores)
    expected = torch.sort(scores.topk(3, dim).indices.view(12)).values
    assert keys.dtype == torch.int64 and torch.equal(keys, expected)
    assert torch.equal(scores.topk(3, dim).indices.view(12)[places], expected)
    assert output.args[0][0].meta["val"].dtype == torch.int64


def test_the_dim_of_a_choice_may_be_given_by_its_name() -> None:
    b = Choices()
    sort = b.sort(b.choices(b.call(aten.topk.default, b.input(300, 4), 3, dim=0)))
    assert narrow_expert_keys(b.graph) == 1 and sort.meta["val"][0].dtype == torch.int16


def test_what_is_no_choice_of_known_many_or_is_sorted_stably_stays() -> None:
    scores, stable, other = Choices(), Choices(), Choices()
    scores.sort(scores.choices(scores.chosen(8), 0))
    stable.sort(stable.choices(stable.chosen(8)), aten.sort.stable, stable=True)
    other.sort(other.input(4, 3, dtype=torch.int64))
    for b in (scores, stable, other):
        before = str(b.graph)
        assert narrow_expert_keys(b.graph) == 0 and str(b.graph) == before
