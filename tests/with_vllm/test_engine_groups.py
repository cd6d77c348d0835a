"""Long steps of a Llama of vLLM's by groups of layers, each kind of which is compiled once; short steps as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx as fx
from fake_vllm import LAYERS, MAX_TOKENS, engine_config, llama
from one_rank import one_rank  # noqa: F401

from tw_compile import collect_reports
from tw_compile.graph.predicates import operator_name

pytestmark = pytest.mark.usefixtures("groups", "one_rank", "cold", "wide_residuals")


COUNTS = (MAX_TOKENS, 24, 23, 3)


def engine(folder: Path, **options: Any) -> Any:
    return engine_config(
        folder,
        compilation={"pass_config": {"fuse_allreduce_rms": False}},
        additional_config={"tw_compile": {"strict": True, **options}},
    )


def names(graph: fx.Graph) -> list[str]:
    return [operator_name(node) for node in graph.nodes]


@pytest.mark.parametrize("layers", [1, LAYERS])
def test_long_steps_run_in_groups_of_layers_that_are_compiled_once(
    folder: Path, graphs: list[fx.Graph], monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    monkeypatch.setattr("tw_compile.vllm.plan.MOST_WHOLE_TOKENS", 23)
    with llama(engine(folder)) as model:
        pieces = [model(count) for count in COUNTS]
    graphs.clear()
    with collect_reports() as reports, llama(engine(folder, vllm_layer_groups=layers)) as model:
        found = [model(count) for count in COUNTS]
    assert [report.tokens for report in reports] == [(1, MAX_TOKENS)] * 3 + [(24, MAX_TOKENS)] * 2
    assert [names(graph).count("vllm::unified_kv_cache_update") for graph in graphs] == [0, 0, 0, 0, layers]
    assert names(graphs[-1]).count("tw_compile::mm_all_reduce_rms_norm_start") == 0
    assert names(graphs[-1]).count("tw_compile::all_reduce_rms_norm_start") == 2 * layers

    with collect_reports() as again, llama(engine(folder, vllm_layer_groups=layers)) as model:
        assert all(torch.equal(model(count), one) for count, one in zip(COUNTS, found, strict=True))
    assert not again  # a warm start

    for count, one, other in zip(COUNTS, found, pieces, strict=True):
        close = {"rtol": 0.06, "atol": 0.06} if count >= 24 and layers > 1 else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(one, other, **close)
