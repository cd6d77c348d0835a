"""Off means off: for a pass that the user has named too, and with vLLM as it would be without the passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_vllm import engine_config
from test_plugin import SLOT

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}


@pytest.fixture(autouse=True)
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load the plugin with TW_COMPILE=1. vLLM loads it once in a process, and with TW_COMPILE=0 it would stay out."""
    from tw_compile.hosts.vllm.plugin import register

    monkeypatch.setenv("TW_COMPILE", "1")
    register()


def plain(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, Any]:
    monkeypatch.setenv("TW_COMPILE", "0")
    return of(engine_config(folder, tensor_parallel_size=8, hf_overrides=HEADS))


def of(config: Any) -> tuple[Any, Any, Any]:
    compilation = config.compilation_config
    limits = compilation.pass_config
    return limits.fuse_allreduce_rms, limits.fi_allreduce_fusion_max_size_mb, compilation.compile_ranges_endpoints


@pytest.mark.parametrize("why", ["error", "refused"])
def test_what_stays_off_leaves_flashinfers_limit(folder: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("on purpose")

    if why == "refused":
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    expected = plain(folder, monkeypatch)
    monkeypatch.setenv("TW_COMPILE", "1")
    if why == "error":
        monkeypatch.setattr("tw_compile.hosts.vllm.plan.planned_ranges", broken)
    config = engine_config(folder, tensor_parallel_size=8, hf_overrides=HEADS)
    assert config.compilation_config.inductor_compile_config.get(SLOT) is None
    assert of(config) == expected and expected[0] is True


@pytest.mark.parametrize("why", ["error", "refused"])
def test_a_named_pass_is_off_where_the_start_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setenv("TW_COMPILE", "1")
    if why == "refused":
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    else:
        monkeypatch.setattr("tw_compile.hosts.vllm.plan.range_endpoints", broken)
    config = engine_config(folder, compilation={"inductor_passes": {SLOT: "tw_compile.vllm_pass"}})
    found = config.compilation_config.inductor_compile_config.get(SLOT)
    assert found is None or (found.engine is not None and found.engine.refusal() is not None), "it rewrites pieces"
