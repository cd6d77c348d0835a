"""Pieces of a Llama in two halves of symbolic sizes, through vLLM's own compiler."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx as fx
from fake_vllm import HIDDEN, MAX_TOKENS, WORLD_SIZE, engine_config, llama, middle_pieces
from one_rank import OneRank, one_rank  # noqa: F401

from tw_compile import collect_reports
from tw_compile.graph.predicates import operator_name
from tw_compile.kernels.collective import transport
from tw_compile.kernels.gemm.mm_leaving_sms import gated_mm_leaving_sms, joint_mm_leaving_sms
from tw_compile.models.config import load_config, tensor_parallel_plan
from tw_compile.passes.reasons import SplitRefused
from tw_compile.passes.split import GraphLayer, TokenAxis
from tw_compile.passes.split.analysis import choose
from tw_compile.passes.split.rules import registry
from tw_compile.passes.split.schedule.budgets import Beside
from tw_compile.planning import layer_shape
from tw_compile.report import GraphReport

pytestmark = pytest.mark.usefixtures("groups", "one_rank", "cold", "wide_residuals")

TOKENS = (MAX_TOKENS, 100, 41, 7)


@dataclass
class Seen:
    """What the pass leaves of each piece, in order, and what was assumed of the token count before it came."""

    graphs: list[fx.Graph] = field(default_factory=list)
    symbol: torch.SymInt | None = None
    assumed: tuple[list[str], Any] | None = None

    def assumes(self) -> tuple[list[str], Any]:
        assert self.symbol is not None
        env = self.symbol.node.shape_env
        return [str(guard.expr) for guard in env.guards], env.var_to_range[self.symbol.node.expr]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    from tw_compile.hosts.vllm.inductor_pass import VllmPass

    noted = Seen()
    original: Callable[..., None] = VllmPass.__call__

    def call(self: VllmPass, graph: fx.Graph) -> None:
        sizes = (node.meta.get("val") for node in graph.find_nodes(op="placeholder"))
        symbol = next((size for size in sizes if isinstance(size, torch.SymInt)), None)
        if noted.symbol is None and symbol is not None:
            noted.symbol = symbol
            noted.assumed = noted.assumes()
        original(self, graph)
        copied = fx.Graph()
        copied.output(copied.graph_copy(graph, {}))
        noted.graphs.append(copied)

    monkeypatch.setattr(VllmPass, "__call__", call)
    return noted


@pytest.fixture(scope="module")
def unsplit(folder: Path, groups: Any) -> list[torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(transport.instances, "gloo", OneRank())
        return run(engine(folder), TOKENS)[0]


def engine(folder: Path, compilation: dict[str, Any] | None = None, **options: Any) -> Any:
    additional = {"tw_compile": {"strict": True, **options}}
    return engine_config(folder, compilation=compilation, additional_config=additional)


def run(config: Any, tokens: tuple[int, ...] = TOKENS) -> tuple[list[torch.Tensor], list[GraphReport]]:
    with collect_reports() as reports, llama(config) as model:
        return [model(count) for count in tokens], reports


def decided(reports: list[GraphReport]) -> dict[Any, list[str]]:
    """For each range the modes, or reasons, of its pieces: the embedding's, those between, the last one."""
    found: dict[Any, list[str]] = {}
    for report in reports:
        assert report.split is not None
        found.setdefault(report.tokens, []).append(report.split.reason or report.split.mode)
    assert all(len(set(found[count][1:-1])) == 1 and len(found[count]) == 2 + middle_pieces() for count in found)
    return {count: [of_range[0], of_range[1], of_range[-1]] for count, of_range in found.items()}


def assert_equal(outputs: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """To the bit: matmuls of a CPU and the sums of one rank do not depend on the number of rows."""
    for one, other in zip(outputs, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_every_range_and_size_has_its_own_halves_and_assumes_nothing_of_the_others(
    folder: Path, unsplit: list[torch.Tensor], seen: Seen
) -> None:
    outputs, reports = run(engine(folder, {"compile_ranges_endpoints": [64], "compile_sizes": [100]}, split="16"))
    whole, halves = ["too_few_tokens"] * 3, ["split"] * 3
    assert decided(reports) == {(1, 23): whole, (24, 64): halves, (65, 128): halves, (100, 100): halves}
    sizes = {report.tokens: report.split.sizes for report in reports if report.split is not None}
    assert sizes == {(1, 23): (), (24, 64): (16, "s-(16)"), (65, 128): (16, "s-(16)"), (100, 100): (16, 84)}
    for graph, report in zip(seen.graphs, reports, strict=True):
        assert report.split is not None and not report.split.joins
        waits = [node for node in graph.nodes if "norm_wait" in operator_name(node)]
        assert len(waits) == len(report.sites) * (1 if report.split.mode == "off" else 2)
        if report.split.overlap is not None:
            assert (report.split.overlap.calls, report.split.overlap.refused) == (len(waits), "")
            assert any(window.computes in (1, 2) and window.beside for window in report.split.overlap.windows)
    assert seen.assumes() == seen.assumed and seen.symbol is not None
    assert not any(seen.symbol.node.shape_env.deferred_runtime_asserts.values())
    assert_equal(outputs, unsplit)


@pytest.mark.parametrize("joins", [False, True])
def test_a_range_gets_the_expression_that_is_planned_for_it(
    folder: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, joins: bool
) -> None:
    """Planned as if the piece between two attentions were one of Llama-70B; ``joins``: as if our own GEMM were faster."""

    def layer_of_piece(graph: fx.Graph, axis: TokenAxis, kernel: str) -> GraphLayer | SplitRefused:
        found = original(graph, axis, kernel)
        if isinstance(found, SplitRefused):
            return found
        assert (found.shape.world_size, found.shape.hidden_size, found.transport) == (WORLD_SIZE, HIDDEN, "gloo")
        return replace(found, shape=big)

    monkeypatch.setattr("tw_compile.hosts.vllm.engine.layer_of", lambda engine: big)
    config, original = load_config("llama-3.3-70b"), choose.layer_of_piece
    big = layer_shape(config, tensor_parallel_plan(config), 4, merged=True)
    big = replace(big, attention=replace(big.attention, kernel="flash"))
    monkeypatch.setattr(choose, "layer_of_piece", layer_of_piece)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    longer = {"max_num_batched_tokens": 8192, "max_model_len": 8192, "hf_overrides": {"max_position_embeddings": 8192}}
    pieces = {"strict": True, "vllm_layer_groups": 0}
    options = {**pieces, "split": "auto", "device_profile": "H200"}
    monkeypatch.setattr(Beside, "joins", lambda *given: joins)
    with caplog.at_level(logging.INFO, logger="vllm.tw_compile"):
        compilation = {"pass_config": {"fuse_allreduce_rms": False}}
        planned = engine_config(folder, compilation=compilation, additional_config={"tw_compile": options}, **longer)
    (said,) = set(re.findall(r"split auto: steps of (\d+) to 8192 tokens", caplog.text))
    first = int(said)
    counts = (8192, first, 300)
    outputs, reports = run(planned, counts)
    whole = "layer_not_recognised"
    modes = decided(reports)
    assert modes.pop((first, 8192)) == [whole, "split", whole]
    assert modes and all("split" not in of_range for of_range in modes.values())
    sizes, *_ = (r.split.sizes for r in reports if r.split is not None and r.split.mode == "split")
    assert all(str(size).startswith("s") for size in sizes)
    own = [node.target for graph in seen.graphs for node in graph.nodes if "_mm_leaving_sms" in str(node.target)]
    # Gate and up are one GEMM of vLLM's, whose product is the gated one's; queries, keys and values another.
    gated, joint = own.count(gated_mm_leaving_sms), own.count(joint_mm_leaving_sms)
    assert (gated > 0, joint > 0) == (joins, joins) and gated + joint == len(own)
    assert seen.assumes() == seen.assumed
    assert_equal(outputs, run(engine_config(folder, **longer, additional_config={"tw_compile": pieces}), counts)[0])


def test_pieces_with_an_operator_without_rule_stay_fused(
    folder: Path, unsplit: list[torch.Tensor], seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(registry.rules, torch.ops.aten.split_with_sizes.default)
    outputs, reports = run(engine(folder, split="16"))
    refused = "operator_without_rule"
    assert decided(reports) == {(1, 23): [refused, refused, "too_few_tokens"], (24, 128): [refused, refused, "split"]}
    details = [r.split.detail for r in reports if r.split is not None and r.split.reason == refused]
    assert len(details) == 2 * (1 + middle_pieces()) and all("split_with_sizes" in detail for detail in details)
    assert_equal(outputs, unsplit)


def test_an_exception_behind_the_rewrite_restores_the_fused_pieces(
    folder: Path, unsplit: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(graph: fx.Graph, calls: object) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr("tw_compile.passes.split.steps.lock_order", broken)
    with caplog.at_level(logging.WARNING, logger="tw_compile"):
        outputs, reports = run(engine(folder, split="16", strict=False))
    assert decided(reports) == {(1, 23): ["too_few_tokens"] * 3, (24, 128): ["split_failed"] * 3}
    warnings = [one for one in caplog.records if one.name == "tw_compile" and one.levelno == logging.WARNING]
    assert len(warnings) == 2 + middle_pieces() and all(
        "RuntimeError: on purpose" in one.getMessage() for one in warnings
    )
    assert_equal(outputs, unsplit)
