"""Models of vLLM's with Mamba or linear attention: their sums are fused, and nothing runs a step in parts."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import states
import torch
import torch.fx as fx
from fake_vllm import HIDDEN, MAX_TOKENS, decoder, engine_config
from models_table import models_here
from most_used_models import ABSENT, BASE, MODELS, WITH_STATE, Model
from one_rank import one_rank  # noqa: F401

from tw_compile import collect_reports
from tw_compile.hosts.vllm.step_graphs import of_models
from tw_compile.report import GraphReport

pytestmark = pytest.mark.usefixtures("groups", "one_rank", "cold", "kernels")

COUNTS = (MAX_TOKENS, 3)
ALL = {model.name: model for model in (*MODELS, *WITH_STATE)}
_FLOAT32 = {"dtype": "float32", "attention_backend": "TRITON_ATTN"}
ALL["Qwen3-Next"] = replace(ALL["Qwen3-Next"], engine=_FLOAT32)
"""Random weights make its gates so steep that in bfloat16 one rounding less is seen in the results."""
REFUSED = {
    "Qwen3-Next": set(),
    "Kimi-Linear": set(),
    "Nemotron-H": set(),
    "Granite-4-H, with experts": set(),
    "Falcon-H1": {"no_rms_norm"},
    "LFM2": set(),
    "Mamba 2, one group for both ranks": {"no_rms_norm"},
    "Jamba": set(),
}
"""Why some of a model's sums are not fused. ``docs/reference/vllm-models.md`` says how many are."""


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("tw_compile.hosts.vllm.plan.MOST_SHORT_TOKENS", 23)  # most steps would be long ones
    with models_here(), states.kernels_here():
        yield


def engine(folder: Path, model: Model, compilation: dict[str, Any] | None = None, **options: Any) -> Any:
    place = folder / f"with-state-{model.architecture}-{len(model.config)}"
    place.mkdir(exist_ok=True)
    fields = {**BASE, "architectures": [model.architecture], "model_type": model.model_type, **model.config}
    given = {name: value for name, value in fields.items() if value is not ABSENT}
    (place / "config.json").write_text(json.dumps(given))
    return engine_config(
        folder,
        compilation={"pass_config": {"fuse_allreduce_rms": False}, **(compilation or {})},
        additional_config={"tw_compile": {"strict": True, **options}},
        model=str(place),
        **model.engine,
    )


def run(config: Any) -> tuple[list[torch.Tensor], list[GraphReport]]:
    from vllm.model_executor.models.registry import ModelRegistry

    made, _ = ModelRegistry.resolve_model_cls(config.model_config.architectures, config.model_config)
    with collect_reports() as reports, decoder(made, config) as model:
        return [model(count) for count in COUNTS], reports


def fused_but_for(reports: list[GraphReport]) -> set[str]:
    """Why sums are not fused, where most are: in a piece one at most is not."""
    assert reports
    for report in reports:
        assert report.counts["fused"] >= report.counts["all_reduce"] - 1, report.refusals
    assert sum(report.counts["fused"] for report in reports) > len(reports) / 2
    return {str(reason) for report in reports for reason in report.refusals}


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert not one.isnan().any() and one.abs().max() > 0.5
        torch.testing.assert_close(one, other, rtol=0.06, atol=0.1)


@pytest.mark.full
@pytest.mark.parametrize("name", REFUSED)
def test_sums_are_fused_and_compute_the_same_and_steps_stay_whole(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    unfused, reports = run(engine(folder, ALL[name], fuse=False))
    assert not any(report.counts["fused"] for report in reports)
    of_models.clear()
    with caplog.at_level(logging.INFO, logger="vllm.tw_compile"):
        found, reports = run(engine(folder, ALL[name], split="16"))
    assert fused_but_for(reports) == REFUSED[name]
    same(found, unfused)
    assert "no groups of layers, state_space:" in caplog.text and not of_models
    assert "split 16: none, a state goes from each token to the next" in caplog.text
    reasons = {str(report.split.reason) for report in reports if report.split is not None}
    assert reasons <= {"state_space", "no_communication"} and "state_space" in reasons


@pytest.mark.full
@pytest.mark.parametrize("name", ["Nemotron-H", "LFM2"])
def test_one_graph_with_the_operators_inside_is_fused_and_not_split(
    folder: Path, name: str, graphs: list[fx.Graph]
) -> None:
    """Operators that keep a state read and write what fused operators make, and residuals are shared out between these."""
    one_graph = {"use_inductor_graph_partition": True}
    unfused, _ = run(engine(folder, ALL[name], one_graph, fuse=False))
    graphs.clear()
    found, reports = run(engine(folder, ALL[name], one_graph, split="16"))
    assert fused_but_for(reports) == REFUSED[name]
    same(found, unfused)
    (report,) = [one for one in reports if one.tokens and one.tokens[1] == MAX_TOKENS]
    assert report.split is not None and report.split.reason == "state_space"
    operator = "short_conv" if name == "LFM2" else "mamba_mixer2"
    assert operator in report.split.detail and operator in str(graphs[-1])


def test_a_model_that_vllm_does_not_mark_has_no_groups_of_layers_either(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its engine has ranges for long steps. Only the model's graph tells."""
    from vllm.config import ModelConfig

    config = engine(folder, ALL["Nemotron-H"])
    assert not slot(config).long_ranges and slot(config).engine.state_space
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(ModelConfig, "is_hybrid", property(lambda self: False))
    monkeypatch.setattr("tw_compile.hosts.vllm.engine._linear_attention", lambda text: False)
    config = engine(folder, ALL["Nemotron-H"])
    assert slot(config).long_ranges and not slot(config).engine.state_space
    of_models.clear()
    with caplog.at_level(logging.INFO, logger="vllm.tw_compile"):
        _, reports = run(config)
    assert fused_but_for(reports) == set() and not of_models
    assert "no groups of layers, state_space: the model calls vllm::mamba_mixer2" in caplog.text


def test_a_model_of_linear_attention_that_vllm_does_not_mark_has_no_ranges_for_groups(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As Qwen3.5 without images. Its configuration tells, so the start says one thing, and vLLM has all ends of ranges."""
    from vllm.config import ModelConfig

    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(ModelConfig, "is_hybrid", property(lambda self: False))
    with caplog.at_level(logging.INFO, logger="vllm.tw_compile"):
        config = engine(folder, ALL["Qwen3-Next"], fuse_min_bytes=80 * 4 * HIDDEN)
    assert slot(config).engine.state_space and not slot(config).long_ranges
    assert "no groups of layers, state_space:" in caplog.text and "by groups of layers in ranges" not in caplog.text
    row_bytes = 4 * slot(config).engine.hidden_size
    assert (80 * 4 * HIDDEN - 1) // row_bytes in config.compilation_config.compile_ranges_endpoints


def slot(config: Any) -> Any:
    return next(
        one for one in config.compilation_config.inductor_compile_config.values() if hasattr(one, "long_ranges")
    )


def test_the_copies_that_a_model_makes_of_its_sums_are_what_keeps_them_from_their_norms(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise nothing would show that ``buffers.py`` is needed."""
    monkeypatch.setattr("tw_compile.hosts.vllm.inductor_pass.write_no_buffers", lambda graph: 0)
    _, reports = run(engine(folder, ALL["Kimi-Linear"]))
    assert {str(reason) for report in reports for reason in report.refusals} == {"reduced_value_used_elsewhere"}
