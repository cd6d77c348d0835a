"""A Llama with statically quantised layers through vLLM's own compiler, in the forms in which its passes leave it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx as fx
from fake_vllm import MAX_TOKENS, engine_config, llama
from one_rank import one_rank  # noqa: F401

from tw_compile import collect_reports
from tw_compile.hosts.vllm import ways
from tw_compile.hosts.vllm.flashinfer import Peers
from tw_compile.hosts.vllm.reasons import WholeAttention

pytestmark = pytest.mark.usefixtures("groups", "one_rank", "float8_kernels", "cold")

STATIC = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}
ON = {"tw_compile": {"strict": True}}
FORMS: dict[str, dict[str, Any]] = {
    "decomposed": {},
    "operator": {"custom_ops": ["+quant_fp8"], "pass_config": {"fuse_norm_quant": False}},
    "norm and quantisation in one": {"custom_ops": ["+quant_fp8"], "pass_config": {"fuse_norm_quant": True}},
}
_OPERATORS = {"operator": "static_scaled_fp8_quant", "norm and quantisation in one": "rms_norm_static_fp8_quant"}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The graphs that the pass gets, as text."""
    from tw_compile.hosts.vllm.inductor_pass import VllmPass

    taken: list[str] = []
    original = VllmPass.__call__

    def call(self: VllmPass, graph: fx.Graph) -> None:
        taken.append(str(graph))
        original(self, graph)

    monkeypatch.setattr(VllmPass, "__call__", call)
    return taken


def run(folder: Path, form: str, model: dict[str, Any] = STATIC, **arguments: Any) -> torch.Tensor:
    config = engine_config(folder, hf_overrides=model, compilation=FORMS[form], **arguments)
    with llama(config) as model:
        return model(MAX_TOKENS)


@pytest.mark.parametrize("form", FORMS)
def test_norms_before_quantised_layers_give_float8(folder: Path, read: list[str], form: str) -> None:
    with collect_reports() as reports:
        fused = run(folder, form, additional_config=ON)
    sites = [site for report in reports for site in report.sites]
    assert {site.reason or site.decision for site in sites} == {"fused"}, [site.detail for site in sites]
    # The embedding's sum, the two of a layer between, the two of the last one, whose norm is the model's output.
    assert [site.quantisation for site in sites] == [*["float8_e4m3fn"] * 4, ""], [site.detail for site in sites]
    assert form == "decomposed" or any(_OPERATORS[form] in text for text in read)
    assert any("rms_norm_static_fp8_quant" in text for text in read) == (form == "norm and quantisation in one")
    unfused = run(folder, form)
    assert fused.dtype == unfused.dtype
    torch.testing.assert_close(fused, unfused, rtol=0.1, atol=0.1)


PER_TOKEN = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
"""Of a checkpoint in float8 without scales of activations vLLM quantises each token."""
_MAKING = {
    "operator": "dynamic_per_token_scaled_fp8_quant",
    "norm and quantisation in one": "rms_norm_dynamic_per_token_quant",
}


@pytest.mark.parametrize("form", FORMS)
def test_norms_before_layers_that_quantise_tokens_give_float8_and_scales(
    folder: Path, read: list[str], form: str
) -> None:
    with collect_reports() as reports:
        fused = run(folder, form, PER_TOKEN, additional_config=ON)
    sites = [site for report in reports for site in report.sites]
    assert {site.reason or site.decision for site in sites} == {"fused"}, [site.detail for site in sites]
    wanted = [*["float8_e4m3fn_per_token"] * 4, ""]
    assert [site.quantisation for site in sites] == wanted, [site.detail for site in sites]
    assert form == "decomposed" or any(_MAKING[form] in text for text in read)
    unfused = run(folder, form, PER_TOKEN)
    assert fused.dtype == unfused.dtype
    torch.testing.assert_close(fused, unfused, rtol=0.1, atol=0.1)


BLOCKS = {
    "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
}
COMPRESSED_BLOCKS = {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
                "input_activations": {
                    "num_bits": 8,
                    "type": "float",
                    "strategy": "group",
                    "group_size": 128,
                    "dynamic": True,
                },
            }
        },
    }
}


@pytest.mark.parametrize("model", [BLOCKS, COMPRESSED_BLOCKS], ids=["fp8", "compressed-tensors"])
def test_with_scales_of_blocks_norms_stay_apart_from_quantisations_unless_the_user_says_otherwise(
    folder: Path, model: dict[str, Any]
) -> None:
    def merges(compilation: dict[str, Any] | None = None, **arguments: Any) -> bool | None:
        found = engine_config(folder, hf_overrides=model, compilation=compilation or {}, **arguments)
        return found.compilation_config.pass_config.fuse_norm_quant

    assert merges(additional_config=ON) is False
    assert merges({"pass_config": {"fuse_norm_quant": True}}, additional_config=ON) is True
    assert merges() is True, "vLLM merges them by default, so there is something to keep apart"
    some_left = {"tw_compile": {"strict": True, "fuse_min_bytes": 4096}}
    assert merges(additional_config=some_left) is True, "unfused sums keep vLLM's merged kernel"


def test_without_scales_of_blocks_vllm_decides_what_it_merges(folder: Path) -> None:
    for model in ({}, STATIC, PER_TOKEN):
        configs = [engine_config(folder, hf_overrides=model, additional_config=more) for more in (ON, {})]
        ours, vllms = (config.compilation_config.pass_config.fuse_norm_quant for config in configs)
        assert ours == vllms


@pytest.mark.full
def test_without_peer_access_long_steps_are_compiled_both_ways_and_are_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has planned them. They are whole until the start has measured the two ways."""
    monkeypatch.setattr(ways, "tried_ranges", [])
    monkeypatch.setattr("tw_compile.hosts.vllm.steps.tried_ranges", ways.tried_ranges)
    monkeypatch.setattr("tw_compile.hosts.vllm.plugin.peers_of", lambda ranks: Peers(False, False, False))
    monkeypatch.setattr("tw_compile.hosts.vllm.plugin.links_for_kernels", lambda ranks: (False, False, True))
    whole = WholeAttention.KV_TRANSFER, "no kernel attends from a half on a CPU"
    monkeypatch.setattr("tw_compile.hosts.vllm.plan.Engine.whole_attention", lambda self, least_tokens=None: whole)
    config = engine_config(
        folder,
        hf_overrides=STATIC | {"max_position_embeddings": 1024},
        compilation=FORMS["operator"],
        additional_config={"tw_compile": {"strict": True, "split": "auto", "vllm_layer_groups": 1}},
        max_num_batched_tokens=1024,
        max_model_len=1024,
    )
    with collect_reports() as reports, llama(config) as model:
        in_one = model(1000)
        (tried,) = ways.tried_ranges
        assert (tried.low, tried.high, tried.split_from) == (513, 1024, 1025)
        tried.split_from = tried.low
        torch.testing.assert_close(model(1000), in_one, rtol=0.1, atol=0.1)
    modes = [report.split for report in reports if report.tokens == (513, 1024) and report.split is not None]
    assert modes and {(split.mode, split.plan, *split.sizes) for split in modes} == {
        ("join", None, "s*1//2//256*256", "s-(s*1//2//256*256)")
    }
