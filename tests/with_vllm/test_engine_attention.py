"""A Llama of vLLM's as one graph, with its attention in two halves: a step's requests, its cache, the same bits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import paged
import pytest
import torch
import torch.fx as fx
from fake_vllm import HIDDEN, LAYERS, MAX_TOKENS, engine_config, llama
from one_rank import OneRank, one_rank  # noqa: F401

from tw_compile import collect_reports
from tw_compile.graph.predicates import operator_name
from tw_compile.kernels.all_reduce_rms_norm import transport
from tw_compile.models import load_config
from tw_compile.models.config import tensor_parallel_plan
from tw_compile.passes.base import SplitRefused
from tw_compile.passes.split import GraphLayer, TokenAxis, choose
from tw_compile.planning import layer_shape
from tw_compile.report import GraphReport

pytestmark = pytest.mark.usefixtures("groups", "one_rank", "cold", "wide_residuals", "plain_attention")

PARTITION = {"use_inductor_graph_partition": True}
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
    from tw_compile.vllm import attention

    library = torch.library.Library("tw_compile", "FRAGMENT")
    library.impl("vllm_attention_half", attention._attend_half, "CPU")
    yield
    library._destroy()


def engine(folder: Path, compilation: dict[str, Any] | None = None, **options: Any) -> Any:
    return engine_config(folder, compilation=compilation, additional_config={"tw_compile": {"strict": True, **options}})


def run(config: Any) -> tuple[list[torch.Tensor], list[GraphReport], list[torch.Tensor]]:
    """The outputs of ``STEPS``, what was reported, and all that is in the caches of the layers at the end."""
    caches: list[torch.Tensor] = []

    def prepare(requests: list[paged.Request], padding: int) -> Callable[[Any], dict[str, Any]]:
        metadata = paged.metadata_of(requests, padding)

        def step(model: Any) -> dict[str, Any]:
            layers = config.compilation_config.static_forward_context
            for layer in layers.values():
                heads = (layer.num_kv_heads, layer.head_size)
                layer.kv_cache = paged.cache_of(metadata, *heads, torch.bfloat16)
                caches.append(layer.kv_cache)
            slots = dict.fromkeys(layers, metadata.slot_mapping)
            return {"attn_metadata": dict.fromkeys(layers, metadata), "slot_mapping": slots}

        return step

    with collect_reports() as reports, llama(config) as model:
        model(MAX_TOKENS)  # vLLM's first forward has no metadata
        outputs = []
        for requests, padding in STEPS:
            rows = sum(one.query for one in requests)
            outputs.append(model(rows + padding, prepare(requests, padding))[:rows])
    return outputs, reports, caches


@pytest.fixture(scope="module")
def unsplit(folder: Path, groups: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(transport._instances, "gloo", OneRank())
        _plain_attention(patch)
        outputs, _, caches = run(engine(folder, PARTITION))
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


def test_attention_of_a_step_is_that_of_its_halves(folder: Path, unsplit: Any, graphs: list[fx.Graph]) -> None:
    config = engine(folder, split="16", split_vllm_attention=True)
    assert config.compilation_config.use_inductor_graph_partition
    found = run(config)
    assert modes(found[1]) == {(1, 23): "too_few_tokens", (24, MAX_TOKENS): "split"}
    split = next(report.split for report in found[1] if report.split is not None and report.split.mode == "split")
    assert split.joins == {} and split.sizes == (16, "s-(16)") and split.overlap is not None
    assert split.overlap.refused == "" and {one.kind for one in split.overlap.windows} >= {"attention", "mlp"}
    whole, halves = (names(graph) for graph in graphs)
    assert "tw_compile::vllm_attention_half" not in whole
    assert halves.count("tw_compile::vllm_attention_half") == 2 * LAYERS
    assert "vllm::unified_kv_cache_update" not in halves
    assert_same(found, unsplit)

    again = run(engine(folder, split="16", split_vllm_attention=True))
    assert not again[1]  # a warm start: nothing is compiled
    assert_same(again, unsplit)


def test_half_2_attends_once_half_1_has_written(folder: Path, graphs: list[fx.Graph]) -> None:
    """In every layer, by an operand, so that no compiler can turn them round."""
    run(engine(folder, split="16", split_vllm_attention=True))
    halves = [node for node in graphs[1].nodes if operator_name(node) == "tw_compile::vllm_attention_half"]
    layers: dict[Any, list[fx.Node]] = {}
    for node in halves:
        layers.setdefault(node.args[3], []).append(node)
    assert len(layers) == LAYERS
    for first, second in layers.values():
        (written,) = second.args[-1]
        assert first.args[-1] == [] and written.args == (first, 1)
        assert first.args[4] == 0 and second.args[4] == 16


def test_in_one_graph_without_the_flag_attention_joins(folder: Path, unsplit: Any, graphs: list[fx.Graph]) -> None:
    found = run(engine(folder, PARTITION, split="16"))
    assert modes(found[1]) == {(1, 23): "too_few_tokens", (24, MAX_TOKENS): "join"}
    split = next(report.split for report in found[1] if report.split is not None and report.split.mode == "join")
    assert split.joins == {"attention_planned": 2 * LAYERS}
    assert names(graphs[1]).count("vllm::unified_kv_cache_update") == LAYERS
    assert_same(found, unsplit)


def test_layers_of_another_backend_keep_their_attention_whole(
    folder: Path, unsplit: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.v1.attention.backend import AttentionType

    monkeypatch.setattr("tw_compile.vllm.attention._ATTENTION_TYPE", AttentionType.ENCODER_ONLY)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="vllm.tw_compile"):
        found = run(engine(folder, split="16", split_vllm_attention=True))
    assert modes(found[1]) == {(1, 23): "too_few_tokens", (24, MAX_TOKENS): "join"}
    assert f"attention_backend: {LAYERS} of {LAYERS} layers are not causal FlashAttention" in caplog.text
    assert_same(found, unsplit)


def test_a_step_of_another_kind_is_an_error_and_no_wrong_result(folder: Path) -> None:
    def prepare(model: Any) -> dict[str, Any]:
        metadata = replace(paged.metadata_of([paged.Request(0, 40)]), causal=False)
        layers = config.compilation_config.static_forward_context
        for layer in layers.values():
            layer.kv_cache = paged.cache_of(metadata, layer.num_kv_heads, layer.head_size, torch.bfloat16)
        slots = dict.fromkeys(layers, metadata.slot_mapping)
        return {"attn_metadata": dict.fromkeys(layers, metadata), "slot_mapping": slots}

    config = engine(folder, split="16", split_vllm_attention=True)
    with llama(config) as model, pytest.raises(RuntimeError, match=r"metadata\.causal: expected True, got False"):
        model(40, prepare)


def test_a_range_gets_halves_that_are_planned_with_their_attention(
    folder: Path, graphs: list[fx.Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned as if the layers were those of Llama-70B on four GPUs."""

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
    monkeypatch.setattr(
        "tw_compile.vllm.engine.split_pays", lambda engine, config: None
    )  # all ranges that there may be
    longer = {"max_num_batched_tokens": 8192, "max_model_len": 8192, "hf_overrides": {"max_position_embeddings": 8192}}
    options = {"strict": True, "split": "auto", "split_vllm_attention": True, "device_profile": "H200"}
    whole = engine_config(folder, additional_config={"tw_compile": options}, **longer)
    assert whole.compilation_config.compile_ranges_endpoints == [1024, 4096, 8192]
    with collect_reports() as reports, llama(whole) as model:
        assert [model(count).shape[0] for count in (8192, 3000, 700)] == [8192, 3000, 700]
    assert modes(reports) == {(1, 1024): "token_count_unknown", (1025, 4096): "split", (4097, 8192): "split"}
    sizes = [report.split.sizes for report in reports if report.split is not None and report.split.mode == "split"]
    assert all(str(first).startswith("s*") for first, _ in sizes)
    assert [names(graph).count("tw_compile::vllm_attention_half") for graph in graphs] == [0, 2 * LAYERS, 2 * LAYERS]


def test_the_flag_has_vllm_compile_one_graph_and_leaves_the_users_word(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    plain = engine(folder, split="16")
    assert not plain.compilation_config.use_inductor_graph_partition
    with caplog.at_level(logging.INFO, logger="vllm.tw_compile"):
        users = engine(folder, {"use_inductor_graph_partition": False}, split="16", split_vllm_attention=True)
    assert not users.compilation_config.use_inductor_graph_partition
    assert "attention is not split, asked_otherwise: use_inductor_graph_partition is off" in caplog.text

    def broken(engine: Any, config: Any) -> None:
        engine.compilation_config.use_inductor_graph_partition = True
        raise RuntimeError("on purpose")

    monkeypatch.setattr("tw_compile.vllm.plugin._keep_attention", broken)
    restored = engine(folder, split="16", split_vllm_attention=True, strict=False)
    assert not restored.compilation_config.use_inductor_graph_partition
    assert "left vLLM's configuration as it was: RuntimeError: on purpose" in caplog.text


def test_the_pass_knows_up_to_where_graphs_are_captured(folder: Path) -> None:
    graphs = {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [8, 64]}
    inside = engine(folder, graphs, split="16", split_vllm_attention=True).compilation_config.inductor_compile_config
    facts = inside["post_grad_custom_post_pass"].engine
    assert facts.captured_tokens == 64
    assert facts.whole_attention(64) == ("cuda_graphs", "graphs are captured for up to 64 tokens")
    assert facts.whole_attention(65) is None
