"""A Llama with adapters through vLLM's own compiler: its sums are fused as without them, and it computes the same."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import adapters
import pytest
import torch
import torch.fx as fx
from fake_vllm import MAX_TOKENS, decoder, engine_config, llama
from one_rank import one_rank  # noqa: F401
from torch._dynamo.utils import ReinplaceCounters

from tw_compile import collect_reports
from tw_compile.graph.predicates import operator_name
from tw_compile.passes.fusion.forms import functionalised
from tw_compile.passes.reasons import Refusal
from tw_compile.report import GraphReport

pytestmark = pytest.mark.usefixtures("groups", "one_rank", "cold", "wide_residuals", "kernels")

LONG_FROM = 24
STEPS = ([0, 1, 2, 1] * (MAX_TOKENS // 4), [2] * 9 + [0] * 31, [1, 2, 1], [0] * 5)
"""The adapters of each step's tokens. By groups of layers, the first two; the last step has none."""


@pytest.fixture
def kernels(groups: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("tw_compile.hosts.vllm.plan.MOST_SHORT_TOKENS", LONG_FROM - 1)
    with adapters.punica():
        yield


def engine(folder: Path, fully_sharded: bool = False, **options: Any) -> Any:
    given = {"strict": True, **options}
    compilation = {"pass_config": {"fuse_allreduce_rms": False}}
    sharded = {"fully_sharded_loras": fully_sharded}
    additional = {"tw_compile": given}
    return engine_config(folder, compilation=compilation, additional_config=additional, **adapters.ENGINE, **sharded)


def run(config: Any) -> tuple[list[torch.Tensor], list[GraphReport]]:
    with collect_reports() as reports, decoder(adapters.adapted, config) as model:
        return [model(len(step), adapters.step_of(step)) for step in STEPS], reports


def refused(report: GraphReport) -> list[str]:
    return [str(site.reason) for site in report.sites if site.decision == "refused"]


@pytest.mark.parametrize("fully_sharded", [False, True])
def test_sums_of_layers_with_adapters_are_fused_and_compute_the_same(
    folder: Path, graphs: list[fx.Graph], fully_sharded: bool
) -> None:
    ReinplaceCounters.clear()
    unfused, _ = run(engine(folder, fully_sharded, fuse=False))
    copies = ReinplaceCounters.get_total_missed()
    graphs.clear()
    ReinplaceCounters.clear()
    found, reports = run(engine(folder, fully_sharded))
    assert ReinplaceCounters.get_total_missed() == copies  # adapters still write to the GEMM's own result

    # An adapter is added to the embeddings behind their sum. The sums of sharded adapters' ranks are no hidden states.
    pieces = [report for report in reports if report.tokens == (1, MAX_TOKENS)]
    by_groups = [report for report in reports if report.tokens == (LONG_FROM, MAX_TOKENS)]
    assert refused(pieces[0]) == [Refusal.NO_RMS_NORM] and len(by_groups) == 2
    others = [*pieces[1:], by_groups[-1]]
    assert [report.counts["fused"] for report in others] == [2] * len(others)
    shards = 2 if fully_sharded else 0
    assert [refused(report) for report in others] == [[Refusal.NO_RMS_NORM] * shards] * len(others)

    starts = [node for node in graphs[-1].nodes if operator_name(node).endswith("norm_start")]
    assert [operator_name(node) for node in starts] == ["tw_compile::all_reduce_rms_norm_start"] * 2
    for start in starts:
        (made,) = start.args[0].all_input_nodes
        form = functionalised(made)
        assert form is not None and form.name == "vllm::lora_expand"

    for one, other in zip(found, unfused, strict=True):
        torch.testing.assert_close(one, other, rtol=0.06, atol=0.06)
        assert not one.isnan().any()
    again, compiled = run(engine(folder, fully_sharded))
    assert not compiled and all(torch.equal(one, other) for one, other in zip(again, found, strict=True))


def test_adapters_change_what_is_computed_and_as_many_sums_are_fused_without_them(folder: Path) -> None:
    """Otherwise the test above would show nothing."""
    options = {"tw_compile": {"strict": True}}
    compilation = {"pass_config": {"fuse_allreduce_rms": False}}
    with_adapters, adapted_reports = run(engine(folder))
    config = engine_config(folder, compilation=compilation, additional_config=options)
    with collect_reports() as reports, llama(config) as model:
        without = [model(len(step)) for step in STEPS]
    for one, other, step in zip(with_adapters, without, STEPS, strict=True):
        differ = (one - other).abs().amax(-1) > 0.5
        assert differ.tolist() == [adapter > 0 for adapter in step]
    fused = [[report.counts["fused"] for report in each][1:3] for each in (reports, adapted_reports)]
    assert fused == [[2, 2], [2, 2]]


def test_groups_with_adapters_are_left_whole_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="vllm.tw_compile"):
        found, reports = run(engine(folder, split="16"))
    assert "split 16: none, adapters' kernels sort the tokens of a whole step by their adapter" in caplog.text
    splits = [report.split for report in reports if report.split is not None]
    assert splits and {split.reason for split in splits} == {"lora"}
    assert all("reads which tokens of a whole step have which adapter" in split.detail for split in splits)
    whole, _ = run(engine(folder, split="off"))
    assert all(torch.equal(one, other) for one, other in zip(found, whole, strict=True))


def test_shorter_steps_are_not_made_of_one_whose_tokens_are_sorted_by_adapter(
    folder: Path, graphs: list[fx.Graph]
) -> None:
    """While vLLM profiles its memory adapters are active, and their kernels have the order of all tokens."""
    from tw_compile.hosts.vllm.inductor_pass import VllmPass

    config = engine(folder, fuse_min_bytes=64 * 64 * 2)
    (ours,) = [one for one in config.compilation_config.inductor_compile_config.values() if isinstance(one, VllmPass)]
    assert [high for _, high in ours.long_ranges] == [63, MAX_TOKENS]
    step = [1, 2] * (MAX_TOKENS // 2)
    with decoder(adapters.adapted, config) as model:
        assert len(model(len(step), adapters.step_of(step))) == len(step)
