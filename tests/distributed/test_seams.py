"""A model cut into graphs that leave to each other what they have as they have it: the ranks get what one graph gives them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.fx as fx

from tw_compile import Config, TWCompilePass, collect_reports
from tw_compile.current import current_gate
from tw_compile.graph.predicates import operator_name
from tw_compile.kernels.collective import ops
from tw_compile.kernels.collective.seam import enter_layers, leave_layers, leave_off
from tw_compile.passes.reasons import HostAttention
from tw_compile.passes.split import HostGraph
from tw_compile.testing import GlooRanks

WORLD_SIZE, HIDDEN, GROUPS = 3, 16, 3
TOKENS = (2, 5, 9)
"""One rank without rows, one with fewer than the others, all alike; halves of 1 and 1, 4 and 1, 4 and 5."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[GlooRanks]:
    with GlooRanks(WORLD_SIZE, timeout=180) as found:
        yield found


def _norm(h: torch.Tensor) -> torch.Tensor:
    wide = h.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(h.dtype)


def _layer(hidden: torch.Tensor, residual: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    for weight in weights:
        residual = residual + funcol.all_reduce(hidden @ weight, "sum", dist.group.WORLD)
        hidden = _norm(residual)
    return hidden, residual


def group(left: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    hidden, residual = enter_layers(left, dist.group.WORLD.group_name)
    return leave_layers(*_layer(hidden, residual, *weights), dist.group.WORLD.group_name)


def read_twice(left: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """The residual that is entered with is read by another operator, too, so it must be whole."""
    hidden, residual = enter_layers(left, dist.group.WORLD.group_name)
    return leave_layers(*_layer(hidden + residual.sin(), residual, *weights), dist.group.WORLD.group_name)


def normed_before_added(left: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """Each sum goes through a norm before it is added, so something is computed behind the last one."""
    hidden, residual = enter_layers(left, dist.group.WORLD.group_name)
    for weight in weights:
        residual = residual + _norm(funcol.all_reduce(hidden @ weight, "sum", dist.group.WORLD))
        hidden = _norm(residual)
    return leave_layers(hidden, residual, dist.group.WORLD.group_name)


def _compiled(function: Any, tokens: int, options: dict[str, Any], seen: list[list[fx.Node]]) -> Any:
    passes = TWCompilePass(Config(strict=True, transport="gloo", **options))
    host = HostGraph((tokens, tokens), HostAttention.HALVES)

    def apply(graph: fx.Graph) -> None:
        passes.rewrite(graph, current_gate(passes.config), host)
        seen.append(list(graph.nodes))

    torch._dynamo.reset()
    settings = {"post_grad_custom_post_pass": apply, "fx_graph_cache": False}
    return torch.compile(function, options=settings)


def _run(rank: int, tokens: int, options: dict[str, Any], name: str) -> dict[str, Any]:
    torch.use_deterministic_algorithms(True)  # what is not written is NaN
    function = {"group": group, "read_twice": read_twice, "normed_before_added": normed_before_added}[name]
    generator = torch.Generator().manual_seed(tokens)
    start = torch.randn(tokens, HIDDEN, generator=generator)
    weights = torch.randn(GROUPS, 2, WORLD_SIZE, HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5
    residual, hidden = start.double(), _norm(start.double())
    for pair in weights.double():
        if function is read_twice:
            hidden = hidden + residual.sin()
        for weight in pair:
            summed = sum(hidden @ one for one in weight)
            residual = residual + (_norm(summed) if function is normed_before_added else summed)
            hidden = _norm(residual)
    seen: list[list[fx.Node]] = []
    with torch.no_grad(), collect_reports() as reports:
        compiled = _compiled(function, tokens, options, seen)
        left = leave_layers(_norm(start), start, dist.group.WORLD.group_name)
        for pair in weights[:, :, rank]:
            left = compiled(left, *(one.clone() for one in pair))
        found = leave_off(left)
    names = [operator_name(node) for node in seen[0]]
    return {
        "error": float((found - hidden).abs().max()),
        "compiled": len(seen),
        "names": names,
        "rows": [node.args[3:] for node in seen[0] if operator_name(node) == "tw_compile::leave_layers"],
        "exposed": [report.split.overlap.exposed for report in reports if report.split and report.split.overlap],
        "in_flight": len(ops.in_flight),
        "in_slot": [
            hidden.args[0].kwargs.get("results_in_slot", False)
            for node in seen[0]
            if operator_name(node) == "tw_compile::leave_halves"
            for hidden in (node.args[0], node.args[5])
        ],
        "held": [
            sorted({operator_name(one.args[0]).removeprefix("tw_compile::") for one in node.args[0]})
            for node in seen[0]
            if operator_name(node) == "tw_compile::all_reduce_rms_norm_hold_"
        ],
    }


@pytest.mark.full
@pytest.mark.parametrize("tokens", TOKENS)
def test_groups_of_layers_leave_shards_to_each_other(ranks: GlooRanks, tokens: int) -> None:
    for result in ranks.run(_run, tokens, {}, "group"):
        assert result["error"] < 1e-4
        assert result["compiled"] == 1 and result["in_flight"] == 0
        assert result["rows"] == [(True,)]
        assert result["names"].count("tw_compile::all_reduce_rms_norm_start") == 2


@pytest.mark.parametrize("tokens", TOKENS)
def test_halves_go_on_as_they_are_and_in_flight(ranks: GlooRanks, tokens: int) -> None:
    first = {2: "1", 5: "4", 9: "4"}[tokens]
    for result in ranks.run(_run, tokens, {"split": first}, "group"):
        assert result["error"] < 1e-4
        assert result["compiled"] == 1 and result["in_flight"] == 0
        names = result["names"]
        assert result["exposed"] == [{}]
        assert result["in_slot"] == [True, True]
        assert result["held"] == [["all_reduce_rms_norm_start", "enter_layers"]]  # until the next graph has read them
        assert [names.count(f"tw_compile::{one}") for one in ("enter_layers", "arrive_", "leave_halves")] == [2, 1, 1]
        assert names.count("tw_compile::all_reduce_rms_norm_start") == 4
        assert names.count("tw_compile::all_reduce_rms_norm_wait_") == 3  # the fourth call is the next graph's
        assert "aten::cat" not in names and "tw_compile::leave_layers" not in names


@pytest.mark.full
def test_a_residual_that_others_read_is_whole_on_both_sides(ranks: GlooRanks) -> None:
    for options in ({}, {"split": "4"}):
        for result in ranks.run(_run, 9, options, "read_twice"):
            assert result["error"] < 1e-4
            assert all(given in ((), (False,)) for given in result["rows"])


@pytest.mark.full
def test_halves_that_are_done_go_on_as_they_are(ranks: GlooRanks) -> None:
    for options in ({}, {"split": "4"}):
        for result in ranks.run(_run, 9, options, "normed_before_added"):
            assert result["error"] < 1e-4 and result["in_flight"] == 0
            names = result["names"]
            left = [names.count(f"tw_compile::{one}") for one in ("enter_layers", "arrive_", "leave_done_halves")]
            assert left == ([2, 0, 1] if options else [1, 0, 0])
            assert "aten::cat" not in names


def test_graphs_that_are_not_fused_leave_whole_tensors(ranks: GlooRanks) -> None:
    for result in ranks.run(_run, 5, {"fuse": False}, "group"):
        assert result["error"] < 1e-4
        assert "tw_compile::all_reduce_rms_norm_start" not in result["names"]
