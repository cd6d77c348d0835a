"""Pieces of a Llama through vLLM's own compiler: what is rewritten, how often, what is kept in its caches."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx as fx
from fake_vllm import HIDDEN, MAX_TOKENS, engine_config, llama, middle_pieces
from one_rank import one_rank  # noqa: F401

from tw_compile import collect_reports
from tw_compile.graph.predicates import operator_name
from tw_compile.report import GraphReport
from tw_compile.testing import count_ops

pytestmark = pytest.mark.usefixtures("groups", "one_rank")

TOKENS = (MAX_TOKENS, 7)
ROW_BYTES = 2 * HIDDEN


def run(config: Any) -> tuple[list[torch.Tensor], list[GraphReport]]:
    """Outputs for ``TOKENS``, and what was reported while compiling."""
    with collect_reports() as reports, llama(config) as model:
        return [model(tokens) for tokens in TOKENS], reports


@pytest.fixture(scope="module")
def unfused(folder: Path, groups: Any) -> list[torch.Tensor]:
    return run(engine_config(folder))[0]


def assert_as_good(outputs: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Both are bf16; the fused operator rounds less often."""
    for one, other in zip(outputs, expected, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0.06, atol=0.06)


def test_every_piece_is_fused_once_per_range_and_a_warm_start_finds_it(
    folder: Path,
    cold: None,
    unfused: list[torch.Tensor],
    graphs: list[fx.Graph],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TW_COMPILE", "1")
    monkeypatch.setenv("TW_COMPILE_STRICT", "1")
    compilation = {"compile_ranges_endpoints": [32]}
    outputs, reports = run(engine_config(folder, compilation=compilation))
    assert_as_good(outputs, unfused)
    counts = {
        tokens: [r.counts["fused"] for r in reports if r.tokens == tokens] for tokens in ((1, 32), (33, MAX_TOKENS))
    }
    fused = [1, *[2] * middle_pieces(), 2]
    assert counts == {(1, 32): fused, (33, MAX_TOKENS): fused}
    assert all(report.counts["fused"] == report.counts["all_reduce"] for report in reports)
    for graph in graphs:
        names = {operator_name(node) for node in graph.nodes}
        assert not names & {"vllm::all_reduce", "vllm_ir::rms_norm", "vllm_ir::fused_add_rms_norm"}
        assert {node.args[-4] for node in graph.nodes if "norm_start" in operator_name(node)} == {"tp:0"}

    warm, again = run(engine_config(folder, compilation=compilation))
    assert not again
    for one, other in zip(warm, outputs, strict=True):
        assert torch.equal(one, other)


def test_the_residual_of_a_piece_is_whole_and_inside_it_sharded(
    folder: Path, cold: None, graphs: list[fx.Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TW_COMPILE", "1")
    run(engine_config(folder))
    layouts = [[node.args[-5] for node in graph.nodes if "norm_start" in operator_name(node)] for graph in graphs]
    assert layouts == [["replicated"], *[["sharded", "replicated"]] * middle_pieces(), ["sharded", "none"]]


def test_a_range_of_sizes_is_decided_by_its_own_bounds(
    folder: Path, cold: None, unfused: list[torch.Tensor], graphs: list[fx.Graph]
) -> None:
    options = {"fuse_min_bytes": 33 * ROW_BYTES, "strict": True}
    config = engine_config(folder, additional_config={"tw_compile": options})
    outputs, reports = run(config)
    assert_as_good(outputs, unfused)
    by_range = {report.tokens: set(report.refusals) for report in reports}
    assert by_range == {(1, 32): {"below_fuse_min_bytes"}, (33, MAX_TOKENS): set()}
    assert sum(count_ops(graph, "vllm.all_reduce.default") for graph in graphs) == 3 + 2 * middle_pieces()


def test_an_internal_error_leaves_every_piece_and_the_start_goes_on(
    folder: Path,
    cold: None,
    unfused: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr("tw_compile.passes.fusion.rewrite.Rewriter.insert", broken)
    monkeypatch.setenv("TW_COMPILE", "1")
    with caplog.at_level(logging.WARNING, logger="tw_compile"):
        outputs, reports = run(engine_config(folder))
    assert [set(report.refusals) for report in reports] == [{"rewrite_failed"}] * (2 + middle_pieces())
    assert "left a graph as it was: RuntimeError: on purpose" in caplog.text
    for one, other in zip(outputs, unfused, strict=True):
        assert torch.equal(one, other)


def test_a_refused_engine_keeps_its_graphs_also_where_the_user_named_the_pass(
    folder: Path, cold: None, unfused: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused by its configuration alone: nothing in its graphs tells."""
    from tw_compile.hosts.vllm.engine import engine_of

    def refused(config: Any) -> Any:
        return replace(engine_of(config), dual_batch_overlap=True)

    slot = {"post_grad_custom_post_pass": "tw_compile.vllm_pass"}
    monkeypatch.setattr("tw_compile.hosts.vllm.engine.engine_of", refused)
    outputs, reports = run(engine_config(folder, compilation={"inductor_passes": slot}))
    assert [set(report.refusals) for report in reports] == [{"dual_batch_overlap"}] * (2 + middle_pieces())
    for one, other in zip(outputs, unfused, strict=True):
        assert torch.equal(one, other)


def test_vllms_name_of_a_group_is_understood(groups: Any) -> None:
    from vllm.distributed.parallel_state import get_tp_group

    import tw_compile.hosts.vllm.inductor_pass  # noqa: F401
    from tw_compile import compat

    assert compat.resolve_process_group("tp:0") is get_tp_group().device_group
