"""FlashInfer's fusion, which vLLM has on by default where it is installed: what the plugin leaves it, and what it says."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import HIDDEN, MAX_TOKENS, engine_config
from test_float8 import BLOCKS

from tw_compile.hosts.vllm.flashinfer import JOINED, Peers
from tw_compile.passes.fusion import FUSE

ROW_BYTES = 2 * HIDDEN
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}
MEASURED = """schema_version = 1
device_class = "sm90"
[sources.own]
kind = "measured"
machine = "GPUs"
versions = "torch"
date = "2026-11-27"
command = "tw-compile tune"
[sources.default]
kind = "default"
why = "not measured"
[[entries]]
world_size = 2
backend = "flashinfer"
from_bytes = 0
to_bytes = {border}
decision = "fused"
transport = "p2p"
source = "default"
[[entries]]
world_size = 2
backend = "flashinfer"
from_bytes = {border}
decision = "fused"
transport = "p2p"
source = "own"
"""


@pytest.fixture(autouse=True)
def on(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The passes are on, and a table says that ours is faster than FlashInfer's kernel from 5 tokens on."""
    from tw_compile.hosts.vllm.plugin import register

    monkeypatch.setenv("TW_COMPILE", "1")
    register()  # vLLM does it once in a process, where a test before may have had the passes off
    monkeypatch.setattr("tw_compile.hosts.vllm.plugin.peers_of", lambda ranks: JOINED)
    file = tmp_path / "thresholds.toml"
    file.write_text(MEASURED.format(border=5 * ROW_BYTES))
    monkeypatch.setenv("TW_COMPILE_THRESHOLDS", str(file))


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    import vllm.logger  # noqa: F401, configures the logger, which then keeps its records to itself

    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, logger="vllm.tw_compile")
    return lambda: [record.message for record in caplog.records if "FlashInfer's fusion is" in record.message]


def of(config: Any) -> tuple[Any, Any, Any]:
    compilation = config.compilation_config
    limits = compilation.pass_config
    return limits.fuse_allreduce_rms, limits.fi_allreduce_fusion_max_size_mb, compilation.compile_ranges_endpoints


def everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "everywhere.toml"
    file.write_text(MEASURED.format(border=ROW_BYTES))
    monkeypatch.setenv("TW_COMPILE_THRESHOLDS", str(file))


def test_without_the_passes_vllm_has_it_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TW_COMPILE", "0")
    assert of(engine_config(folder)) == (True, None, [MAX_TOKENS])


def test_it_is_off_where_ours_is_measured_to_be_faster_everywhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lines: Any
) -> None:
    everywhere(monkeypatch, tmp_path)
    monkeypatch.setattr("tw_compile.hosts.vllm.plan.MOST_SHORT_TOKENS", 23)
    config = engine_config(folder)
    assert of(config)[:2] == (False, None)
    (line,) = lines()
    assert "is off (vLLM has it on up to 64 MiB), measured_faster: " in line and "from 128 bytes on" in line
    assert config.compilation_config.inductor_compile_config["post_grad_custom_post_pass"].long_ranges


def test_it_keeps_the_sizes_below_and_vllms_ranges_end_there(folder: Path, lines: Any) -> None:
    config = engine_config(folder)
    assert of(config) == (True, 4 * ROW_BYTES / 2**20, [4, MAX_TOKENS])
    assert config.compilation_config.pass_config.flashinfer_max_size(2) == 4 * ROW_BYTES
    (line,) = lines()
    assert "is on up to 512 bytes (vLLM has it on up to 64 MiB), measured_faster: " in line
    with_ends = engine_config(folder, compilation={"compile_ranges_endpoints": [32]})
    assert of(with_ends)[2] == [4, 32, MAX_TOKENS]


def test_it_is_off_without_peer_access(folder: Path, monkeypatch: pytest.MonkeyPatch, lines: Any) -> None:
    monkeypatch.setattr("tw_compile.hosts.vllm.plugin.peers_of", lambda ranks: Peers(False, False))
    monkeypatch.setattr("tw_compile.hosts.vllm.plugin.links_for_kernels", lambda ranks: (False, False, True))
    assert of(engine_config(folder)) == (False, None, [MAX_TOKENS])
    assert "no_peer_access" in lines()[0]


@pytest.mark.parametrize(
    "given",
    [{"fuse_allreduce_rms": True}, {"fi_allreduce_fusion_max_size_mb": 1.0}],
    ids=lambda given: next(iter(given)),
)
def test_what_the_user_has_set_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch, lines: Any, given: dict[str, Any]
) -> None:
    monkeypatch.setenv("TW_COMPILE", "0")
    expected = of(engine_config(folder, compilation={"pass_config": given}))
    monkeypatch.setenv("TW_COMPILE", "1")
    assert of(engine_config(folder, compilation={"pass_config": given})) == expected
    (line,) = lines()
    assert "set_by_user: without fuse_allreduce_rms" in line and "it would be on up to 512 bytes" in line


@pytest.mark.parametrize(
    ("peers", "variables"),
    [(Peers(True, False), {}), (Peers(None, False), {}), (JOINED, {"TW_COMPILE_THRESHOLDS": "off"})],
    ids=str,
)
def test_where_nothing_is_measured_vllm_stays_as_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, lines: Any, peers: Peers, variables: dict[str, str]
) -> None:
    monkeypatch.setattr("tw_compile.hosts.vllm.plugin.peers_of", lambda ranks: peers)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert of(engine_config(folder)) == (True, None, [MAX_TOKENS])
    assert "(as in vLLM), not_measured: " in lines()[0]


def test_groups_that_span_nodes_are_not_what_was_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch, lines: Any
) -> None:
    from vllm.config import ParallelConfig

    monkeypatch.setattr(ParallelConfig, "local_world_size", property(lambda self: 1), raising=False)
    assert of(engine_config(folder))[:2] == (True, None)
    assert "not_measured" in lines()[0]


MERGED = "norms merged with quantisations by blocks can't be fused by tw_compile"
DISABLED = f"nothing is fused, as disable_passes names {FUSE.name}"
NVFP4 = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}}


@pytest.mark.parametrize(
    ("model", "given", "options", "detail"),
    [
        (BLOCKS, {"fuse_norm_quant": True}, {}, MERGED),
        (BLOCKS, {}, {"fuse_min_bytes": 4096}, MERGED),
        (BLOCKS, {"fuse_norm_quant": False}, {}, None),
        (BLOCKS, {}, {}, None),
        (BLOCKS, {}, {"disable_passes": FUSE.name}, DISABLED),
        ({}, {}, {"disable_passes": FUSE.name}, DISABLED),
    ],
    ids=str,
)
def test_norms_that_only_flashinfer_fuses_stay_its_own(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    lines: Any,
    model: dict[str, Any],
    given: dict[str, Any],
    options: dict[str, Any],
    detail: str | None,
) -> None:
    everywhere(monkeypatch, tmp_path)
    passes = {"compilation": {"pass_config": given}, "additional_config": {"tw_compile": options}}
    config = engine_config(folder, hf_overrides=model, **passes)
    assert of(config)[:2] == (detail is not None, None)
    assert ("measured_faster" if detail is None else f"not_measured: {detail}") in lines()[0]
    if model == BLOCKS:
        assert config.compilation_config.pass_config.fuse_norm_quant is (detail is not None)


@pytest.mark.parametrize(("capability", "stays"), [((9, 0), False), ((10, 0), True)], ids=str)
def test_sums_before_quantisations_to_nvfp4_stay_flashinfers_where_it_fuses_these(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    lines: Any,
    capability: tuple[int, int],
    stays: bool,
) -> None:
    """On Hopper only the weights are in NVFP4."""
    monkeypatch.setattr("tw_compile.hosts.vllm.plugin._capability", lambda: capability)
    file = tmp_path / "of_this_device.toml"
    file.write_text(MEASURED.format(border=ROW_BYTES).replace("sm90", f"sm{capability[0]}0"))
    monkeypatch.setenv("TW_COMPILE_THRESHOLDS", str(file))
    assert of(engine_config(folder, hf_overrides=NVFP4))[:2] == (stays, None)
    assert ("quantisations to NVFP4" in lines()[0]) is stays


def test_blocks_of_a_model_with_a_state_stay_flashinfers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nobody knows whether all of its sums are fused, so its norms stay merged with quantisations."""
    everywhere(monkeypatch, tmp_path)
    monkeypatch.setattr("tw_compile.hosts.vllm.plan.fuses_all", lambda *args: False)
    config = engine_config(folder, hf_overrides=BLOCKS)
    assert of(config)[:2] == (True, None) and config.compilation_config.pass_config.fuse_norm_quant is True


@pytest.mark.parametrize("given", [{}, {"fuse_allreduce_rms": True}], ids=["default", "set"])
def test_a_configuration_that_is_completed_again_stays_and_says_nothing_more(
    folder: Path, lines: Any, given: dict[str, Any]
) -> None:
    """vLLM completes a configuration once more in its engine's process. It has lost by then what the user did not set."""
    config = engine_config(folder, compilation={"pass_config": given})
    before = of(config)
    assert len(lines()) == 1
    config.__post_init__()
    assert of(config) == before and len(lines()) == 1


def test_flashinfer_is_left_what_it_is_faster_at(folder: Path, monkeypatch: pytest.MonkeyPatch, lines: Any) -> None:
    """vLLM issue 44079: at TP8 on Hopper multimem is faster from 256 KiB, and vLLM fuses up to 512 KiB."""
    config = engine_config(folder, tensor_parallel_size=8, hf_overrides=HEADS)
    below = 256 * 1024 - ROW_BYTES
    assert config.compilation_config.pass_config.flashinfer_max_size(8) == below
    assert f"is on up to {below} bytes (vLLM has it on up to 512 KiB), unfused_faster: " in lines()[0]
    monkeypatch.setenv("VLLM_ALLREDUCE_USE_SYMM_MEM", "0")
    without = engine_config(folder, tensor_parallel_size=8, hf_overrides=HEADS)
    assert without.compilation_config.pass_config.flashinfer_max_size(8) == 512 * 1024


def test_a_limit_ends_the_range_where_the_tables_border_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A range of one size would have vLLM tune its GEMMs: 16 tokens of hidden 8192 are 256 KiB."""
    monkeypatch.delenv("TW_COMPILE_THRESHOLDS")
    model = {**HEADS, "hidden_size": 8192, "max_position_embeddings": 2048}
    more = {"max_num_batched_tokens": 2048, "max_model_len": 2048}
    config = engine_config(folder, tensor_parallel_size=8, hf_overrides=model, **more)
    assert of(config)[2] == [15, 2048]


def test_the_limit_stays_where_flashinfers_all_reduce_shares_the_buffers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, lines: Any
) -> None:
    monkeypatch.setenv("VLLM_ALLREDUCE_USE_FLASHINFER", "1")
    assert of(engine_config(folder)) == (True, None, [MAX_TOKENS])
    assert "(as in vLLM), shared_buffers: FlashInfer's all_reduce" in lines()[0]
