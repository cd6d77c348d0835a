"""FlashInfer's fusion, which vLLM has on by default where it is installed: what the plugin leaves it, and what it says."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import HIDDEN, MAX_TOKENS, engine_config

from tw_compile.hosts.vllm.flashinfer import JOINED, Peers

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
    assert config.compilation_config.pass_config.flashinfer_max_size(8) == 256 * 1024
    assert "is on up to 256 KiB (vLLM has it on up to 512 KiB), unfused_faster: " in lines()[0]
    monkeypatch.setenv("VLLM_ALLREDUCE_USE_SYMM_MEM", "0")
    without = engine_config(folder, tensor_parallel_size=8, hf_overrides=HEADS)
    assert without.compilation_config.pass_config.flashinfer_max_size(8) == 512 * 1024
