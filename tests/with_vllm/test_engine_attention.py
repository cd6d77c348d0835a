"""A Llama of vLLM's as one graph, with its attention in two halves: a step's requests, its cache, the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paged
import pytest
import torch
import torch.fx as fx
from fake_vllm import LAYERS, MAX_TOKENS, engine_config, llama
from one_rank import OneRank, one_rank  # noqa: F401

from tw_compile import collect_reports
from tw_compile.graph.predicates import operator_name
from tw_compile.kernels.all_reduce_rms_norm import transport
from tw_compile.report import GraphReport

pytestmark = pytest.mark.usefixtures("groups", "one_rank", "cold", "wide_residuals", "plain_attention")

PARTITION = {"use_inductor_graph_partition": True}
STEPS = (
    [paged.Request(0, 100)],
    [paged.Request(7, 1), paged.Request(30, 1), paged.Request(3, 60), paged.Request(0, 20)],
    [paged.Request(5, 14), paged.Request(9, 50)],
    [paged.Request(5, 7)],
)
"""The first halves of 16 end in the only request, in the third, in the second; the last step is not split."""


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """vLLM's caches are empty."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))


@pytest.fixture
def wide_residuals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Residuals stay as the unsplit graph has them, so that results have the same bits."""
    monkeypatch.setattr("tw_compile.passes.split.apply.narrow_residuals", lambda graph: 0)


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


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[fx.Graph]:
    """What the pass leaves of each graph, in order."""
    from tw_compile.vllm.inductor_pass import VllmPass

    taken: list[fx.Graph] = []
    original: Callable[..., None] = VllmPass.__call__

    def call(self: VllmPass, graph: fx.Graph) -> None:
        original(self, graph)
        copied = fx.Graph()
        copied.output(copied.graph_copy(graph, {}))
        taken.append(copied)

    monkeypatch.setattr(VllmPass, "__call__", call)
    return taken


def engine(folder: Path, compilation: dict[str, Any] | None = None, **options: Any) -> Any:
    return engine_config(folder, compilation=compilation, additional_config={"tw_compile": {"strict": True, **options}})


def run(config: Any) -> tuple[list[torch.Tensor], list[GraphReport], list[torch.Tensor]]:
    """The outputs of ``STEPS``, what was reported, and all that is in the caches of the layers at the end."""
    caches: list[torch.Tensor] = []

    def prepare(requests: list[paged.Request]) -> Callable[[Any], dict[str, Any]]:
        metadata = paged.metadata_of(requests)

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
        outputs = [model(sum(one.query for one in requests), prepare(requests)) for requests in STEPS]
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


def test_attention_of_a_step_is_that_of_its_halves(folder: Path, unsplit: Any, graphs: list[fx.Graph]) -> None:
    config = engine(folder, split="16", split_vllm_attention=True)
    assert config.compilation_config.use_inductor_graph_partition
    found = run(config)
    splits = {report.tokens: report.split for report in found[1]}
    assert {tokens: one.reason or one.mode for tokens, one in splits.items()} == {
        (1, 23): "too_few_tokens",
        (24, MAX_TOKENS): "split",
    }
    split = splits[24, MAX_TOKENS]
    assert split.joins == {} and split.sizes == (16, "s-(16)")
    assert split.overlap.refused == "" and {one.kind for one in split.overlap.windows} >= {"attention", "mlp"}
    whole, halves = (names(graph) for graph in graphs)
    assert "tw_compile::vllm_attention_half" not in whole
    assert halves.count("tw_compile::vllm_attention_half") == 2 * LAYERS
    assert "vllm::unified_kv_cache_update" not in halves
    assert_same(found, unsplit)
