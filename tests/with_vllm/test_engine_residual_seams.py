"""Pieces that end at attention hand each other the rows of the rank: through vLLM's own compiler, whole and in halves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx as fx
from fake_vllm import LAYERS, MAX_TOKENS, engine_config, llama, middle_pieces
from one_rank import one_rank  # noqa: F401

from tw_compile import collect_reports
from tw_compile.graph.predicates import operator_name
from tw_compile.kernels.collective import residual_seam

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
    for graph in middle:
        (enter,), (leave,) = of_name(graph, "enter_residual"), of_name(graph, "leave_residual")
        assert enter.args[2] == torch.bfloat16 and leave.args[3] is True
        assert leave.next.op == "output"
        outputs = leave.next.all_input_nodes
        assert len(outputs) > 1 and set(outputs) <= {leave, *leave.all_input_nodes}
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


def test_a_residual_that_something_else_reads_behind_attention_is_not_sewn(
    folder: Path, graphs: list[fx.Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a draft's model is given states of some layers: the second layer's residual is returned, too."""
    from vllm.model_executor.models.llama import LlamaDecoderLayer

    original, seen = LlamaDecoderLayer.forward, []

    def forward(self: Any, positions: Any, hidden: Any, residual: Any) -> Any:
        hidden, left = original(self, positions, hidden, residual)
        if len(seen) % LAYERS == 1:
            hidden = hidden + 0 * residual  # the residual before this layer's attention
        seen.append(self)
        return hidden, left

    monkeypatch.setattr(LlamaDecoderLayer, "forward", forward)
    with llama(engine(folder)) as model:
        found = model(MAX_TOKENS)
    counts = [(len(of_name(graph, "enter_residual")), len(of_name(graph, "leave_residual"))) for graph in graphs]
    assert (0, 1) in counts and (1, 0) in counts and sum(map(sum, counts)) < 2 * LAYERS
    assert torch.isfinite(found).all() and residual_seam.left_now is None
