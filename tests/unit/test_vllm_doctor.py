"""What ``doctor --vllm`` shows is what the plugin would do."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tw_compile.hosts.vllm.doctor import examine
from tw_compile.runner import machine


def test_long_steps_begin_behind_what_flashinfer_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """With NCCL's symmetric kernels FlashInfer is left 512 KiB at TP4; the engine's long steps begin behind that."""
    monkeypatch.setenv("VLLM_USE_NCCL_SYMM_MEM", "1")
    report = examine({"TW_COMPILE": "1"}, (10, 3))
    group = next(group for group in report["groups"] if group["world_size"] == 4)
    assert group["flashinfer_fusion_bytes"] == 512 * 1024 and group["flashinfer_fusion_bytes_of_vllm"] == 64 * 2**20
    assert group["groups_of_layers"] == {"from_tokens": 513}


def test_peer_access_that_is_switched_off_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the plugin: peers_among() finds none with TW_COMPILE_PEER_ACCESS=0."""
    from tw_compile.cli.app import app

    monkeypatch.setenv("TW_COMPILE_PEER_ACCESS", "0")
    gpu = {"index": 0, "name": "NVIDIA H100 80GB HBM3", "memory_bytes": 80 << 30, "capability": "90"}
    found = machine.examine() | {"gpus": [gpu, gpu | {"index": 1}], "peer_access": [[True, True], [True, True]]}
    monkeypatch.setattr(machine, "examine", lambda: found)
    shown = CliRunner().invoke(app, ["doctor", "--vllm", "--json", "-"])
    assert json.loads(shown.stdout)["vllm"]["peer_access"] is False
