"""A model cut at attention into graphs that leave to each other the rows of a rank: the ranks get what one graph gives them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.fx as fx
from gpu.checks.pieces import compiled, first, group_name, last, layer, leaving, norm, piece

from tw_compile import collect_reports
from tw_compile.graph.predicates import operator_name
from tw_compile.kernels.collective import residual_seam
from tw_compile.kernels.collective.residual_seam import enter_residual
from tw_compile.testing import GlooRanks

WORLD_SIZE, HIDDEN, LAYERS = 3, 16, 3
TOKENS = (2, 5, 9)
"""One rank without rows, one with fewer than the others, all alike; halves of 1 and 1, 4 and 1, 4 and 5."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[GlooRanks]:
    with GlooRanks(WORLD_SIZE, timeout=180) as found:
        yield found


def read_twice(left: torch.Tensor, attended: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Something else than the site reads the residual, too, so it must be whole."""
    residual = enter_residual(left, group_name())
    hidden, residual = layer(residual, attended + residual.sin(), *weights[:2])
    return leaving(residual, hidden @ weights[2])


def _run(rank: int, tokens: int, options: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """Runs the graphs ``names``, each compiled with its options."""
    torch.use_deterministic_algorithms(True)  # what is not written is NaN
    generator = torch.Generator().manual_seed(tokens)
    start = torch.randn(tokens, HIDDEN, generator=generator)
    weights = torch.randn(len(names), 2, WORLD_SIZE, HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5
    queries = torch.randn(len(names), HIDDEN, HIDDEN, generator=generator)
    residual, attended = start.double(), start.double().tanh()
    for name, pair, query in zip(names, weights.double(), queries.double(), strict=True):
        attended = attended + residual.sin() if name == "read_twice" else attended
        residual = residual + sum(attended @ one for one in pair[0])
        residual = residual + sum(norm(residual) @ one for one in pair[1])
        attended = norm(residual) if name == "last" else (norm(residual) @ query).tanh()
    functions = {"piece": piece, "read_twice": read_twice, "last": last}
    graphs: list[fx.Graph] = []
    with torch.no_grad(), collect_reports() as reports:
        left, attended_now = first(start), start.tanh()
        for name, given, pair, query in zip(names, options, weights[:, :, rank], queries, strict=True):
            run = compiled(functions[name], tokens, given | {"transport": "gloo"}, graphs)
            found = run(left, attended_now, *(one.clone() for one in pair), query)
            if name != "last":
                left, attended_now = found[0], found[1].tanh()
    exposed = [len(report.split.overlap.exposed) for report in reports if report.split and report.split.overlap]
    return {
        "error": float((found - attended).abs().max()),
        "names": [[operator_name(node) for node in graph.nodes] for graph in graphs],
        "sharded": [
            [node.args[3] for node in graph.nodes if operator_name(node) == "tw_compile::leave_residual"]
            for graph in graphs
        ],
        "entered": [
            [len(node.args) > 2 for node in graph.nodes if operator_name(node) == "tw_compile::enter_residual"]
            for graph in graphs
        ],
        "exposed": exposed,
        "left": residual_seam.left_now is not None,
    }


ALIKE = ["piece", "piece", "last"]


@pytest.mark.parametrize("tokens", TOKENS)
def test_pieces_leave_shards_to_each_other(ranks: GlooRanks, tokens: int) -> None:
    for result in ranks.run(_run, tokens, [{}] * 3, ALIKE):
        assert result["error"] < 1e-4 and not result["left"]
        assert result["sharded"] == [[True], [True], []] and result["entered"] == [[True], [True], [True]]
        assert all(names.count("tw_compile::all_reduce_rms_norm_start") == 2 for names in result["names"])


@pytest.mark.parametrize("tokens", TOKENS)
def test_halves_go_on_as_halves(ranks: GlooRanks, tokens: int) -> None:
    first = {2: "1", 5: "4", 9: "4"}[tokens]
    for result in ranks.run(_run, tokens, [{"split": first}] * 3, ALIKE):
        assert result["error"] < 1e-4 and not result["left"]
        assert result["sharded"] == [[], [], []] and result["entered"] == [[True, True]] * 3
        assert [names.count("tw_compile::leave_residual_halves") for names in result["names"]] == [1, 1, 0]
        assert all(names.count("tw_compile::all_reduce_rms_norm_start") == 4 for names in result["names"])
        assert len(result["exposed"]) == 3


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "names"),
    [
        pytest.param([{}, {}, {}], ["piece", "read_twice", "last"], id="read twice"),
        pytest.param([{}, {"fuse": False}, {}], ALIKE, id="not fused"),
        pytest.param([{"split": "4"}, {}, {"split": "4"}], ALIKE, id="whole behind halves"),
        pytest.param([{}, {"split": "4"}, {}], ALIKE, id="halves behind whole"),
        pytest.param([{"split": "4"}, {"split": "1"}, {"split": "5"}], ALIKE, id="other halves"),
        pytest.param([{"split": "4"}, {"fuse": False}, {"split": "4"}], ALIKE, id="not fused behind halves"),
    ],
)
def test_graphs_that_do_not_agree_give_right_results(
    ranks: GlooRanks, options: list[dict[str, Any]], names: list[str]
) -> None:
    for result in ranks.run(_run, 9, options, names):
        assert result["error"] < 1e-4 and not result["left"]
