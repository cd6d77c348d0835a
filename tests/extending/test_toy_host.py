"""A host is added by a file of its own, which registers it: no file of tw_compile is edited, or names a host that it has."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from graph_builder import GraphBuilder, copy_of, run_graph
from one_rank import one_rank  # noqa: F401
from toy_host import LARGE, TOY, ToyRefusal, ToySettings
from typer.testing import CliRunner

from tw_compile import Config, TWCompilePass, collect_reports, compat
from tw_compile.cli.app import app
from tw_compile.gating import Node, Settings, active_backend, host_names
from tw_compile.gating import hosts as gating_hosts
from tw_compile.graph.predicates import operator_name
from tw_compile.hosts import Host, host_named, register
from tw_compile.hosts import registry as hosts_registry
from tw_compile.own_gate import own_gate
from tw_compile.passes import operators, reasons
from tw_compile.passes.operators import NormOperator
from tw_compile.passes.split import RowWise, analyse, find_token_axis, split_tokens
from tw_compile.passes.split.rules import registry as rules_registry
from tw_compile.testing import rewrite

pytestmark = pytest.mark.usefixtures("one_rank")

ROOT = Path(__file__).parents[2]
SM90 = Node((9, 0), True)
TOKENS, HIDDEN, EPS = 12, 8, 0.25


def _norm(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps) * weight


def _add_norm(
    residual: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return _norm(rows + residual, weight, eps), rows + residual


@pytest.fixture(scope="module", autouse=True)
def toy_host() -> Iterator[None]:
    """The host is registered, and its operators are there; afterwards nothing of it is left."""
    registries: tuple[tuple[Any, str], ...] = (
        (operators, "registered_operators"),
        (gating_hosts, "dispatches"),
        (reasons, "host_refusals"),
        (hosts_registry, "registered_hosts"),
        (rules_registry, "rules"),
    )
    rules_registry.registered_name(
        "toy::norm", writes=False
    )  # loads other hosts' rules, which are there afterwards, too
    with pytest.MonkeyPatch.context() as patch, torch.library._scoped_library("toy", "FRAGMENT") as toy:
        for module, name in registries:
            patch.setattr(module, name, getattr(module, name).copy())
        for schema, function in (
            ("sum_over(Tensor summand, str ranks) -> Tensor", lambda summand, ranks: summand.clone()),
            ("norm(Tensor rows, Tensor weight, float eps) -> Tensor", _norm),
            ("add_norm(Tensor residual, Tensor rows, Tensor weight, float eps) -> (Tensor, Tensor)", _add_norm),
            ("double_rows(Tensor rows) -> Tensor", lambda rows: rows * 2),
            ("unknown(Tensor rows) -> Tensor", lambda rows: rows * 2),
        ):
            toy.define(schema)
            toy.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
        register(TOY)
        yield


class Toy(GraphBuilder):
    def sum_over(self, summand: fx.Node) -> fx.Node:
        assert dist.group.WORLD is not None
        return self.call(torch.ops.toy.sum_over.default, summand, compat.group_name(dist.group.WORLD))

    def part(self, pair: fx.Node, index: int) -> fx.Node:
        return self.call(operator.getitem, pair, index)


def layer() -> fx.Graph:
    """Two sums, each with a norm behind it: one that adds the residual, and one behind an addition of the graph's own."""
    b = Toy()
    partial, residual, weight, matrix = b.input(TOKENS, HIDDEN), b.input(TOKENS, HIDDEN), b.input(HIDDEN), b.input(8, 8)
    first = b.call(torch.ops.toy.add_norm.default, residual, b.sum_over(partial), weight, EPS)
    hidden, residual = b.part(first, 0), b.part(first, 1)
    product = b.call(torch.ops.aten.mm.default, b.call(torch.ops.toy.double_rows.default, hidden), matrix)
    added = b.call(torch.ops.aten.add.Tensor, b.sum_over(product), residual)
    return b.finish(b.call(torch.ops.toy.norm.default, added, weight, EPS), added)


@pytest.mark.usefixtures("two_ranks")
def test_its_all_reduce_and_norm_are_found_and_fused() -> None:
    graph = layer()
    before = copy_of(graph)
    with collect_reports() as reports:
        TWCompilePass(Config(host="toy-1", split="off", strict=True))(graph)
    assert [site.decision for site in reports[0].sites] == ["fused", "fused"], reports[0].sites
    assert [name for name in map(operator_name, graph.nodes) if name.startswith("toy::")] == ["toy::double_rows"]
    torch.manual_seed(0)
    inputs = [torch.randn(node.meta["val"].shape) for node in before.find_nodes(op="placeholder")]
    for result, expected in zip(run_graph(graph, inputs), run_graph(before, inputs), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("two_ranks")
def test_its_operators_are_split_by_what_they_are_declared_as_and_by_its_rules() -> None:
    graph = layer()
    axis = find_token_axis(graph, tokens=TOKENS, piece=True)
    verdicts = {operator_name(node): verdict for node, verdict in analyse(graph, axis).verdicts.items()}
    for name in ("sum_over", "add_norm", "double_rows", "norm"):
        assert isinstance(verdicts[f"toy::{name}"], RowWise), verdicts[f"toy::{name}"]
    before = copy_of(graph)
    report = split_tokens(graph, 5, axis=axis)
    assert not report.joins
    torch.manual_seed(0)
    inputs = [torch.randn(node.meta["val"].shape) for node in before.find_nodes(op="placeholder")]
    for result, expected in zip(run_graph(graph, inputs), run_graph(before, inputs), strict=True):
        torch.testing.assert_close(result, expected)


@pytest.mark.usefixtures("two_ranks")
def test_what_it_has_not_declared_joins_halves() -> None:
    b = Toy()
    b.finish(b.call(torch.ops.toy.unknown.default, b.sum_over(b.input(TOKENS, HIDDEN))))
    graph = b.graph
    axis = find_token_axis(graph, tokens=TOKENS, piece=True)
    assert analyse(graph, axis).joins == {"unknown_operator": 1}


def test_its_dispatch_decides_a_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    def decision(nbytes: int, host: str = "toy-2") -> tuple[str, bool]:
        verdict = own_gate(Config(host=host), SM90).decide(nbytes, world_size=8, dtype="bfloat16")
        return str(verdict.backend), verdict.fused

    assert [decision(LARGE - 16), decision(LARGE)] == [("custom", True), ("multimem", False)]
    gate = own_gate(Config(host="toy-1"), SM90)
    counts = gate.crossovers(2**15, world_size=8, dtype="bfloat16")
    assert [(one.nbytes, str(one.backend)) for one in counts] == [(2**15, "custom"), (LARGE, "multimem")]
    monkeypatch.setenv("TOY_LARGE", "0")
    assert decision(LARGE) == ("custom", True) and decision(LARGE, "pytorch") == ("nccl", True)


class Block(torch.nn.Module):
    def forward(self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        assert dist.group.WORLD is not None
        summed = torch.ops.toy.sum_over(partial, compat.group_name(dist.group.WORLD))
        hidden, residual = torch.ops.toy.add_norm(residual, summed, weight, EPS)
        return hidden, residual


@pytest.mark.parametrize("tokens", [63, 64])
def test_the_pass_leaves_what_its_dispatch_does_better(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tw_compile.pipeline.current_gate", lambda config: own_gate(config, SM90))
    rows, weight = torch.empty(tokens, 2048, dtype=torch.bfloat16), torch.empty(2048, dtype=torch.bfloat16)
    result = rewrite(Block(), (rows, rows, weight), world_size=8, config=Config(host="toy-1", strict=True))
    (site,) = result.report.sites
    fused = tokens * 2048 * 2 < LARGE
    assert (site.decision, site.backend) == (("fused", "custom") if fused else ("gated", "multimem")), site


@pytest.mark.usefixtures("two_ranks")
def test_its_refusal_is_reported_by_name_and_one_that_is_not_registered_is_none() -> None:
    graph = layer()
    with collect_reports() as reports:
        TWCompilePass().refuse(graph, ToyRefusal.TOY_IS_BUSY, "it plays")
    assert reports[0].refusals == {"toy_is_busy": 2} and {site.detail for site in reports[0].sites} == {"it plays"}

    class Other(StrEnum):
        OTHER = "other"

    with pytest.raises(ValueError, match=r"reason: expected one of training_graph, .*, toy_is_busy, got <Other.OTHER"):
        TWCompilePass().refuse(graph, Other.OTHER, "nobody knows it")


def test_the_command_line_knows_it() -> None:
    command = ["explain", "--device", "sm90", "--multicast", "--tp", "8", "--hidden", "2048", "--tokens", "63,64"]
    lines = CliRunner().invoke(app, [*command, "--host", "toy-2"]).output.splitlines()
    first, second = (line.split() for line in lines[1:3])
    assert (first[0], "fused" in first, second[0], "gated" in second) == ("63", True, "64", True)
    reasons = "\n".join(lines[3:])
    assert f"toy-2: below {LARGE} bytes" in reasons and f"toy-2: from {LARGE} bytes" in reasons


def test_a_host_is_registered_once_and_takes_no_name_of_another() -> None:
    known = host_names()
    register(TOY)
    assert host_names() == known and host_named("toy-2") is TOY
    with pytest.raises(ValueError, match="names: expected some that no other host has, got pytorch"):
        register(Host(("new", "pytorch"), TOY.dispatch))
    changed = NormOperator("toy::norm", rows=1, weight=0, eps=2)
    with pytest.raises(ValueError, match="operators: expected a name that is not in use, got 'toy::norm'"):
        register(Host(("new",), TOY.dispatch, (NormOperator("new::norm", rows=0, weight=1, eps=2), changed)))
    with pytest.raises(ValueError, match=r"names: expected at least one, none of them empty, got \(\)"):
        Host((), TOY.dispatch)
    assert host_names() == known and operators.operator_named("new::norm") is None
    with pytest.raises(ValueError, match=r"host: expected one of pytorch, .*, toy-2, got 'new'"):
        host_named("new")


def test_settings_are_of_the_hosts_own_class() -> None:
    with pytest.raises(TypeError, match="host: expected ToySettings for toy-1, got Settings"):
        Settings("toy-1")
    chosen = ToySettings(large=False)
    assert str(active_backend(SM90, chosen, world_size=8, dtype="bfloat16", nbytes=LARGE).backend) == "custom"


def test_no_host_is_named_or_imported_where_graphs_are_rewritten() -> None:
    for folder in ("passes", "kernels"):
        for file in (ROOT / folder).rglob("*.*"):
            if file.suffix in (".py", ".cu", ".cuh"):
                assert not re.search("vllm", file.read_text(), re.IGNORECASE), file
    for folder in ("passes", "kernels", "tw_compile/gating", "tw_compile/graph", "tw_compile/planning"):
        for file in (ROOT / folder).rglob("*.py"):
            assert "tw_compile.hosts" not in file.read_text(), file
