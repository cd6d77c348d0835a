"""Pieces that end at attention hand each other the rows of the rank: through vLLM's own compiler, whole and in halves."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx as fx
from fake_vllm import HIDDEN, MAX_TOKENS, engine_config, llama, middle_pieces
from one_rank import one_rank  # noqa: F401
from torch._subclasses.fake_tensor import FakeTensorMode

from tw_compile import collect_reports
from tw_compile.graph.predicates import operator_name
from tw_compile.hosts.vllm.residual_seams import sew_residuals, without_seams
from tw_compile.kernels.collective import residual_seam
from tw_compile.kernels.collective.residual_seam import enter_residual

pytestmark = pytest.mark.usefixtures("groups", "one_rank", "cold", "wide_residuals")

COUNTS = (MAX_TOKENS, 24, 23, 3, 1)


def engine(folder: Path, compilation: dict[str, Any] | None = None, **options: Any) -> Any:
    """One whose pieces vLLM would capture, in steps of any number of tokens."""
    settings = {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [1, MAX_TOKENS], **(compilation or {})}
    return engine_config(
        folder,
        compilation={"pass_config": {"fuse_allreduce_rms": False}, **settings},
        additional_config={"tw_compile": {"strict": True, **options}},
    )


def of_name(graph: fx.Graph, name: str) -> list[fx.Node]:
    return [node for node in graph.nodes if operator_name(node) == f"tw_compile::{name}"]


def test_pieces_leave_each_other_the_rows_of_the_rank(folder: Path, graphs: list[fx.Graph]) -> None:
    with llama(engine(folder, vllm_sharded_residual="off")) as model:
        whole = [model(count) for count in COUNTS]
    assert not any(of_name(graph, "leave_residual") for graph in graphs)
    graphs.clear()
    with llama(engine(folder)) as model:
        found = [model(count) for count in COUNTS]
    first, *middle, last = graphs
    assert len(middle) == middle_pieces()
    assert not of_name(first, "enter_residual") and not of_name(last, "leave_residual")
    (leave,) = of_name(first, "leave_residual")
    assert leave.args[3] is False  # the embeddings
    assert leave.args[4] and not any(one.op == "placeholder" for one in leave.args[4])
    for graph in middle:
        (enter,), (leave,) = of_name(graph, "enter_residual"), of_name(graph, "leave_residual")
        assert enter.args[2] == torch.bfloat16 and leave.args[3] is True
        assert leave.next.op == "output"
        outputs = leave.next.all_input_nodes
        assert len(outputs) > 1 and leave.args[4] == [one for one in outputs if one is not leave]
        sites = of_name(graph, "all_reduce_rms_norm_start")
        assert [site.args[10] for site in sites] == ["sharded", "sharded"]
    (enter,) = of_name(last, "enter_residual")
    assert enter.args[2] == torch.bfloat16
    assert residual_seam.left_now is None
    for one, other in zip(found, whole, strict=True):
        assert torch.equal(one, other)


def test_halves_go_on_as_halves(folder: Path, graphs: list[fx.Graph]) -> None:
    with llama(engine(folder, vllm_sharded_residual="off")) as model:
        whole = [model(count) for count in COUNTS]
    graphs.clear()
    with collect_reports() as reports, llama(engine(folder, split="16")) as model:
        found = [model(count) for count in COUNTS]
    modes = [
        (report.tokens, report.split.reason or report.split.mode) for report in reports if report.split is not None
    ]
    for tokens, mode in (((1, 23), "too_few_tokens"), ((24, MAX_TOKENS), "split")):
        of_range = [found for one, found in modes if one == tokens]
        assert of_range == ["needs_all_tokens", *[mode] * (1 + middle_pieces())]  # the first one leaves all tokens
    *middle, last = [graph for graph, (_, mode) in zip(graphs, modes, strict=True) if mode == "split"]
    for graph in middle:
        assert len(of_name(graph, "enter_residual")) == 2 and not of_name(graph, "leave_residual")
        (leave,) = of_name(graph, "leave_residual_halves")
        assert leave.args[5] is True
    assert len(of_name(last, "enter_residual")) == 2
    for one, other in zip(found, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_long_steps_run_by_groups_that_are_cut_from_the_graph_without_seams(
    folder: Path, graphs: list[fx.Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tw_compile.hosts.vllm.plan.MOST_SHORT_TOKENS", 23)
    short = {"cudagraph_capture_sizes": [1, 23]}
    with llama(engine(folder, short, vllm_sharded_residual="off", vllm_step_graphs="off")) as model:
        whole = [model(count) for count in COUNTS]
    seen = len(graphs)
    with llama(engine(folder, short, vllm_step_graphs="off")) as model:
        found = [model(count) for count in COUNTS]
    *pieces, head, group = graphs[seen:]
    assert seen == len(pieces) + 2 and all(
        of_name(graph, "enter_residual") or of_name(graph, "leave_residual") for graph in pieces
    )
    assert not any(of_name(graph, name) for graph in (head, group) for name in ("enter_residual", "leave_residual"))
    assert len(of_name(group, "enter_layers")) == 1
    for one, other in zip(found, whole, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("compilation", "why"),
    [({"cudagraph_mode": "NONE"}, "the host would launch more"), ({"use_inductor_graph_partition": True}, "one graph")],
)
def test_nothing_is_sewn_where_nothing_is_cut_or_captured(
    folder: Path, graphs: list[fx.Graph], compilation: dict[str, Any], why: str
) -> None:
    with llama(engine(folder, compilation)) as model:
        model(MAX_TOKENS)
    assert graphs and not any(of_name(graph, "leave_residual") for graph in graphs), why


class Dynamo:
    """A graph as vLLM's backend gets it. ``tanh`` stands for attention, at which vLLM cuts."""

    def __init__(self) -> None:
        self.graph, self.mode = fx.Graph(), FakeTensorMode()

    def add(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        given = fx.map_arg(args, lambda one: one.meta["example_value"])
        with self.mode:
            node.meta["example_value"] = target(*given)
        return node

    def input(self, *shape: int) -> fx.Node:
        node = self.graph.placeholder(f"arg{len(self.graph.nodes)}")
        with self.mode:
            node.meta["example_value"] = torch.empty(shape, dtype=torch.bfloat16)
        return node

    def norm(self, x: fx.Node, residual: fx.Node, weight: fx.Node) -> tuple[fx.Node, fx.Node]:
        summed = self.add(torch.ops.vllm.all_reduce, x, "tp:0")
        both = self.add(torch.ops.vllm_ir.fused_add_rms_norm.default, summed, residual, weight, 1e-5)
        return self.add(operator.getitem, both, 0), self.add(operator.getitem, both, 1)

    def sewn(self, *outputs: fx.Node) -> int:
        self.graph.output(outputs)
        module = fx.GraphModule({}, self.graph)
        before = [node.format_node() for node in self.graph.nodes]
        count = sew_residuals(module, lambda node: node.target is torch.tanh)
        self.graph.lint()
        assert sew_residuals(module, lambda node: node.target is torch.tanh) == count  # as in a graph that is loaded
        assert [node.format_node() for node in without_seams(module).graph.nodes] == before
        assert len(self.graph.find_nodes(op="call_function", target=enter_residual)) == count
        return count


@pytest.fixture
def dynamo() -> tuple[Dynamo, fx.Node, fx.Node, fx.Node]:
    made = Dynamo()
    return made, made.input(6, HIDDEN), made.input(6, HIDDEN), made.input(HIDDEN)


def test_a_residual_that_one_norm_reads_behind_a_cut_is_sewn(dynamo: Any) -> None:
    made, x, residual, weight = dynamo
    for _ in range(3):
        hidden, residual = made.norm(x, residual, weight)
        x = made.add(torch.tanh, hidden)
    hidden, _ = made.norm(x, residual, weight)
    assert made.sewn(hidden) == 3


@pytest.mark.parametrize("reader", ["behind the cut", "the caller"])
def test_a_residual_with_another_reader_is_not_sewn(dynamo: Any, reader: str) -> None:
    made, x, residual, weight = dynamo
    hidden, residual = made.norm(x, residual, weight)
    attended = made.add(torch.tanh, hidden)
    other = made.add(torch.relu, residual) if reader == "behind the cut" else residual
    hidden, _ = made.norm(attended, residual, weight)
    assert made.sewn(hidden, other) == 0


def test_a_residual_of_the_caller_or_of_the_same_piece_is_not_sewn(dynamo: Any) -> None:
    made, x, given, weight = dynamo
    attended = made.add(torch.tanh, x)
    hidden, residual = made.norm(attended, given, weight)
    hidden, _ = made.norm(hidden, residual, weight)
    assert made.sewn(hidden) == 0


@pytest.mark.parametrize("what", ["the caller's memory", "what crosses, too"])
def test_a_residual_that_shares_memory_is_not_sewn(dynamo: Any, what: str) -> None:
    """Who enters may write there."""
    made, x, given, weight = dynamo
    residual = made.add(
        torch.ops.aten.view.default, given if what == "the caller's memory" else made.add(torch.neg, given), [6, HIDDEN]
    )
    other = made.add(torch.ops.aten.view.default, residual, [3, 2 * HIDDEN])
    attended = made.add(torch.tanh, x)
    hidden, _ = made.norm(attended, residual, weight)
    assert made.sewn(hidden, *([] if what == "the caller's memory" else [other])) == 0


def test_one_residual_is_left_at_a_time(dynamo: Any) -> None:
    made, x, given, weight = dynamo
    first, one = made.norm(x, given, weight)
    second, other = made.norm(first, made.add(torch.neg, given), weight)
    attended = made.add(torch.tanh, second)
    hidden, _ = made.norm(attended, one, weight)
    hidden, _ = made.norm(hidden, other, weight)
    assert made.sewn(hidden) == 1
