"""What the manager undoes of a pass that raises, and what it says of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.fx as fx

from tw_compile import Config
from tw_compile.current import current_gate
from tw_compile.graph.snapshot import snapshot
from tw_compile.passes import manager
from tw_compile.passes.contract import Context, InductorNeed, Outcome, Pass

aten = torch.ops.aten


def small() -> fx.Graph:
    graph = fx.Graph()
    first = graph.call_function(aten.neg.default, (graph.placeholder("x"),))
    graph.output((graph.call_function(aten.exp.default, (first,)),))
    return graph


def run(graph: fx.Graph, *passes: Pass) -> manager.Run:
    return manager.run(graph, Context(Config(), current_gate(Config())), passes)


def move(graph: fx.Graph, context: Context) -> Outcome:
    _, first, second, _ = graph.nodes
    second.append(first)  # behind its reader, which a later step would have moved, too
    raise RuntimeError("half done")


def place(graph: fx.Graph, context: Context) -> Outcome:
    graph.inserting_before(graph.output_node().prev)  # for all that follows
    raise RuntimeError("half done")


@pytest.mark.parametrize("step", [move, place])
def test_what_a_pass_has_half_done_is_undone(step: Callable[[fx.Graph, Context], Outcome]) -> None:
    graph = small()
    before = snapshot(graph)
    found = run(graph, Pass("one", step))
    graph.lint()
    assert snapshot(graph) == before and found.warning == "RuntimeError: half done"


def test_only_neighbours_of_the_transaction_count_as_undone() -> None:
    def edit(graph: fx.Graph, context: Context) -> Outcome:
        list(graph.nodes)[1].target = aten.abs.default
        return Outcome(True)

    graph = small()
    found = run(
        graph,
        Pass("one", edit, transaction="mine", inductor=(InductorNeed.NO_COMBO_KERNELS,)),
        Pass("between", lambda graph, context: Outcome(False)),
        Pass("two", move, transaction="mine"),
    )
    assert "aten.abs" in snapshot(graph)
    assert [done.outcome for done in found.reports] == ["changed", "unchanged", "failed"]
    assert found.inductor == {InductorNeed.NO_COMBO_KERNELS}
