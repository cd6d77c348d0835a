"""Long steps of a Llama of vLLM's with attention in two halves: a step's requests, its cache, the same bits."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import paged
import pytest
import torch
import torch.fx as fx
from fake_vllm import HIDDEN, LAYERS, MAX_TOKENS, engine_config, llama
from one_rank import be_one_rank, one_rank  # noqa: F401

from tw_compile import collect_reports
from tw_compile.graph.predicates import operator_name
from tw_compile.hosts.vllm import plan, ways
from tw_compile.kernels.collective.seam import leave_off
from tw_compile.models.config import load_config, tensor_parallel_plan
from tw_compile.passes.reasons import SplitRefused
from tw_compile.passes.split import GraphLayer, TokenAxis
from tw_compile.passes.split.analysis import choose
from tw_compile.planning import layer_shape
from tw_compile.report import GraphReport

pytestmark = pytest.mark.usefixtures("groups", "one_rank", "cold", "wide_residuals", "plain_attention")

LONG_FROM = 24
STEPS = (
    ([paged.Request(0, 100)], 0),
    ([paged.Request(7, 1), paged.Request(30, 1), paged.Request(3, 60), paged.Request(0, 20)], 0),
    ([paged.Request(5, 14), paged.Request(9, 50)], 3),
    ([paged.Request(5, 12)], 15),
    ([paged.Request(5, 7)], 0),
)
"""Requests, and rows of padding. First halves of 16 end in the only request, in the third, in the second, in the padding; the
last step is not split."""


def _plain_attention(patch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    patch.setattr(FlashAttentionImpl, "forward", paged.forward)
    patch.setattr(FlashAttentionImpl, "do_kv_cache_update", paged.update)


@pytest.fixture
def plain_attention(groups: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _plain_attention(monkeypatch)


@pytest.fixture(scope="module", autouse=True)
def half_on_cpu(groups: Any) -> Iterator[None]:
    from tw_compile.hosts.vllm import attention

    library = torch.library.Library("tw_compile", "FRAGMENT")
    library.impl("vllm_attention_half", attention.attend_half, "CPU")
    yield
    library._destroy()


@pytest.fixture(autouse=True)
def short_steps_are_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tw_compile.hosts.vllm.plan.MOST_SHORT_TOKENS", LONG_FROM - 1)


def engine(folder: Path, compilation: dict[str, Any] | None = None, layers: int = LAYERS, **options: Any) -> Any:
    """By groups of ``layers`` layers."""
    settings = {"pass_config": {"fuse_allreduce_rms": False}, **(compilation or {})}
    given = {"tw_compile": {"strict": True, "vllm_layer_groups": layers, **options}}
    return engine_config(folder, compilation=settings, additional_config=given)


def step_of(
    config: Any, requests: list[paged.Request], padding: int = 0, caches: list[torch.Tensor] | None = None
) -> Callable[[Any], dict[str, Any]]:
    """The context of a step of these requests. The caches of the layers are added to ``caches``."""
    metadata = paged.metadata_of(requests, padding)

    def step(model: Any) -> dict[str, Any]:
        layers = config.compilation_config.static_forward_context
        for layer in layers.values():
            heads = (layer.num_kv_heads, layer.head_size)
            layer.kv_cache = paged.cache_of(metadata, *heads, torch.bfloat16)
            if caches is not None:
                caches.append(layer.kv_cache)
        slots = dict.fromkeys(layers, metadata.slot_mapping)
        return {"attn_metadata": dict.fromkeys(layers, metadata), "slot_mapping": slots}

    return step


def run(config: Any) -> tuple[list[torch.Tensor], list[GraphReport], list[torch.Tensor]]:
    """The outputs of ``STEPS``, what was reported, and all that is in the caches of the layers at the end."""
    caches: list[torch.Tensor] = []
    with collect_reports() as reports, llama(config) as model:
        model(MAX_TOKENS)  # vLLM's first forward has no metadata
        outputs = []
        for requests, padding in STEPS:
            rows = sum(one.query for one in requests)
            outputs.append(model(rows + padding, step_of(config, requests, padding, caches))[:rows])
    return outputs, reports, caches


@pytest.fixture(scope="module", params=[1, LAYERS], ids=lambda layers: f"groups of {layers}")
def layers(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def unsplit(folder: Path, groups: Any, layers: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    with pytest.MonkeyPatch.context() as patch:
        be_one_rank(patch)
        patch.setattr("tw_compile.hosts.vllm.plan.MOST_SHORT_TOKENS", LONG_FROM - 1)
        _plain_attention(patch)
        outputs, _, caches = run(engine(folder, layers=layers))
        return outputs, caches


def assert_same(found: tuple[list[torch.Tensor], Any, list[torch.Tensor]], expected: Any) -> None:
    for one, other in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
        assert not one.isnan().any()
    for one, other in zip(found[2], expected[1], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def names(graph: fx.Graph) -> list[str]:
    return [operator_name(node) for node in graph.nodes]


def modes(reports: list[GraphReport]) -> dict[Any, str]:
    """For each range the mode, or the reason for none."""
    return {report.tokens: report.split.reason or report.split.mode for report in reports if report.split is not None}


def test_attention_of_a_step_is_that_of_its_halves(
    folder: Path, layers: int, unsplit: Any, graphs: list[fx.Graph]
) -> None:
    found = run(engine(folder, layers=layers, split="16"))
    assert modes(found[1]) == {(LONG_FROM, MAX_TOKENS): "split"}
    split = next(report.split for report in found[1] if report.split is not None)
    assert split.joins == {} and split.sizes == (16, "s-(16)") and split.overlap is not None
    assert split.overlap.refused == "" and split.overlap.exposed == {}
    assert {one.kind for one in split.overlap.windows} == {"attention", "qkv", "mlp"}
    halves = names(graphs[-1])
    assert halves.count("tw_compile::vllm_attention_half") == 2 * layers
    assert "vllm::unified_kv_cache_update" not in halves
    seams = [halves.count(f"tw_compile::{one}") for one in ("enter_layers", "arrive_", "leave_halves", "leave_layers")]
    assert seams == [2, 1, 1, 0]
    starts = [node for node in graphs[-1].nodes if operator_name(node).endswith("norm_start")]
    assert len(starts) == 4 * layers and all(
        node.kwargs["overlap_sms"] for node in starts
    )  # also of what leaves in flight
    assert_same(found, unsplit)

    again = run(engine(folder, layers=layers, split="16"))
    assert not again[1]  # a warm start: nothing is compiled
    assert_same(again, unsplit)


def test_half_2_attends_once_half_1_has_written(folder: Path, graphs: list[fx.Graph]) -> None:
    """In every layer, by an operand, so that no compiler can turn them round."""
    run(engine(folder, split="16"))
    halves = [node for node in graphs[-1].nodes if operator_name(node) == "tw_compile::vllm_attention_half"]
    layers: dict[Any, list[fx.Node]] = {}
    for node in halves:
        layers.setdefault(node.args[3], []).append(node)
    assert len(layers) == LAYERS
    for first, second in layers.values():
        (written,) = second.args[-1]
        assert first.args[-1] == [] and written.args == (first, 1)
        assert first.args[4] == 0 and second.args[4] == 16


def test_layers_of_another_backend_keep_their_attention_whole(
    folder: Path,
    layers: int,
    unsplit: Any,
    graphs: list[fx.Graph],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from vllm.v1.attention.backend import AttentionType

    monkeypatch.setattr("tw_compile.hosts.vllm.attention._ATTENTION_TYPE", AttentionType.ENCODER_ONLY)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="vllm.tw_compile"):
        found = run(engine(folder, layers=layers, split="16"))
    assert modes(found[1]) == {(LONG_FROM, MAX_TOKENS): "join"}
    split = next(report.split for report in found[1] if report.split is not None)
    assert split.joins == {"attention_planned": 2 * layers}
    assert names(graphs[-1]).count("vllm::unified_kv_cache_update") == layers
    assert f"attention_backend: {LAYERS} of {LAYERS} layers are not causal FlashAttention" in caplog.text
    assert_same(found, unsplit)


def test_in_vllms_own_graph_of_a_whole_model_attention_is_split_too(folder: Path, graphs: list[fx.Graph]) -> None:
    """It is one group then, for all ranges."""
    found = run(engine(folder, {"use_inductor_graph_partition": True}, split="16"))
    assert modes(found[1]) == {(1, 23): "too_few_tokens", (24, MAX_TOKENS): "split"}
    assert names(graphs[1]).count("tw_compile::vllm_attention_half") == 2 * LAYERS


@pytest.mark.parametrize(("partition", "layers", "inside"), [(True, 1, True), (True, 0, False), (False, 0, False)])
def test_ranges_are_planned_for_where_attention_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, partition: bool, layers: int, inside: bool
) -> None:
    seen: list[bool] = []
    original = plan.planned_ranges

    def noted(*given: Any) -> Any:
        seen.append(given[-1])
        return original(*given)

    monkeypatch.setattr(plan, "planned_ranges", noted)
    engine(folder, {"use_inductor_graph_partition": partition}, layers=layers, split="auto")
    assert set(seen) == {inside}


def test_a_step_of_another_kind_is_an_error_and_no_wrong_result(folder: Path) -> None:
    def prepare(model: Any) -> dict[str, Any]:
        metadata = replace(paged.metadata_of([paged.Request(0, 40)]), causal=False)
        layers = config.compilation_config.static_forward_context
        for layer in layers.values():
            layer.kv_cache = paged.cache_of(metadata, layer.num_kv_heads, layer.head_size, torch.bfloat16)
        slots = dict.fromkeys(layers, metadata.slot_mapping)
        return {"attn_metadata": dict.fromkeys(layers, metadata), "slot_mapping": slots}

    config = engine(folder, split="16")
    with llama(config) as model, pytest.raises(RuntimeError, match=r"metadata\.causal: expected True, got False"):
        model(40, prepare)


@pytest.mark.parametrize("mega", ["0", "1"])  # 0.24 has it off, 0.33 on
def test_the_start_says_which_steps_are_split_and_these_are(
    folder: Path, graphs: list[fx.Graph], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mega: str
) -> None:
    """Planned as if the layers were those of Llama-70B on four GPUs: their halves with attention, in one range.

    Shorter steps are compiled both ways, and are whole until they have been timed.
    """
    calls: list[str] = []
    monkeypatch.setenv("VLLM_USE_MEGA_AOT_ARTIFACT", mega)
    monkeypatch.setattr(ways, "tried_ranges", [])
    monkeypatch.setattr("tw_compile.hosts.vllm.steps.tried_ranges", ways.tried_ranges)
    from tw_compile.hosts.vllm import attention

    context = attention.get_attention_context

    def noted(layer_name: str) -> Any:
        calls.append(layer_name)
        return context(layer_name)

    monkeypatch.setattr(attention, "get_attention_context", noted)

    def layer_of_graph(graph: fx.Graph, axis: TokenAxis) -> GraphLayer | SplitRefused:
        found = original(graph, axis)
        assert isinstance(found, GraphLayer), found
        shape = found.shape
        assert (shape.hidden_size, shape.attention.kernel, shape.attention.heads) == (HIDDEN, "flash3", 2)
        return replace(found, shape=big)

    config, original = load_config("llama-3.3-70b"), choose.layer_of_graph
    big = layer_shape(config, tensor_parallel_plan(config), 4, merged=True)
    big = replace(big, attention=replace(big.attention, kernel="flash3"))
    monkeypatch.setattr(choose, "layer_of_graph", layer_of_graph)
    monkeypatch.setattr("tw_compile.hosts.vllm.engine.layer_of", lambda engine: big)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    longer = {"max_num_batched_tokens": 8192, "max_model_len": 8192, "hf_overrides": {"max_position_embeddings": 8192}}
    options = {"strict": True, "split": "auto", "vllm_layer_groups": LAYERS, "device_profile": "H200"}

    def start() -> Any:
        compilation = {"pass_config": {"fuse_allreduce_rms": False}}  # vLLM adds to it
        return engine_config(folder, compilation=compilation, additional_config={"tw_compile": options}, **longer)

    with caplog.at_level(logging.INFO, logger="vllm.tw_compile"):
        whole = start()
    assert whole.compilation_config.compile_ranges_endpoints == [8192]
    said = r"split auto: steps of (\d+) to (\d+) tokens, and steps of (\d+) to (\d+) tokens where the start measures"
    ((first, last, low, high),) = {tuple(map(int, found)) for found in re.findall(said, caplog.text)}
    assert (high, last) == (first - 1, 8192)
    with collect_reports() as reports, llama(whole) as model:
        finished = mock.Mock(side_effect=leave_off)
        monkeypatch.setattr("tw_compile.hosts.vllm.steps.leave_off", finished)
        outputs = {count: model(count) for count in (8192, first, high)}
        assert finished.call_count == 6  # of each, and of the three for their memory: no call is left in flight
        assert [len(rows) for rows in outputs.values()] == [8192, first, high]
        (tried,) = ways.tried_ranges
        assert (tried.low, tried.high, tried.split_from) == (low, high, high + 1)
        # Of the longest steps, of the first of their range, and of the range tried for its memory.
        assert len(calls) == 3 * 2 * LAYERS
        calls.clear()
        step = step_of(whole, [paged.Request(0, high)])
        in_one = model(high, step)
        assert not calls
        tried.split_from = high
        torch.testing.assert_close(model(high, step), in_one, rtol=0, atol=0)
        assert len(calls) == 2 * LAYERS
        calls.clear()
        model(high - 1)
        assert not calls
    for known in (False, True):  # what vLLM hashes settles with the first start in a process
        warm = start()
        step = step_of(warm, [paged.Request(0, high)])
        with collect_reports() as again, llama(warm) as model:
            model(8192)
            tried = ways.tried_ranges[-1]
            for split_from, halves in ((high + 1, 0), (low, 2 * LAYERS)):
                calls.clear()
                tried.split_from = split_from
                torch.testing.assert_close(model(high, step), in_one, rtol=0, atol=0)
                assert len(calls) == halves
        assert not known or not again
    assert len(ways.tried_ranges) == 3
    found = {(report.tokens, None if report.split is None else report.split.mode) for report in reports}
    assert {((low, high), "split"), ((low, high), None), ((first, last), "split")} <= found
    sizes = [report.split.sizes for report in reports if report.split is not None and report.split.mode == "split"]
    assert sizes and all(str(half).startswith("s*") for half, _ in sizes)
    counted = [names(graph).count("tw_compile::vllm_attention_half") for graph in graphs]
    # The range tried in halves, the longest steps, the range tried whole.
    assert counted[-3:] == [2 * LAYERS, 2 * LAYERS, 0]


def test_the_pass_knows_up_to_where_graphs_are_captured(folder: Path) -> None:
    graphs = {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [8, 64]}
    inside = engine(folder, graphs, split="16").compilation_config.inductor_compile_config
    found = inside["post_grad_custom_post_pass"]
    assert found.engine.captured_tokens == 64
    assert found.engine.whole_attention(64) == ("cuda_graphs", "graphs are captured for up to 64 tokens")
    assert found.engine.whole_attention(65) is None
    assert found.long_ranges == ((65, MAX_TOKENS),)
