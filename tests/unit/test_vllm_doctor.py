"""What ``doctor --vllm`` shows is what the plugin would do."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from tw_compile.cli.doctor import _joined_by_nvlink
from tw_compile.hosts.vllm.doctor import examine, sections
from tw_compile.hosts.vllm.flashinfer import Peers
from tw_compile.runner import machine


def test_long_steps_begin_behind_what_flashinfer_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """With NCCL's symmetric kernels FlashInfer is left what is below 512 KiB at TP4; long steps begin behind that."""
    monkeypatch.setenv("VLLM_USE_NCCL_SYMM_MEM", "1")
    report = examine({"TW_COMPILE": "1"}, (10, 3))
    group = next(group for group in report["groups"] if group["world_size"] == 4)
    assert group["flashinfer_fusion_bytes"] == 31 * 16 * 1024 and group["flashinfer_fusion_bytes_of_vllm"] == 64 * 2**20
    assert group["groups_of_layers"] == {"from_tokens": 513}


def test_vllm_has_its_own_all_reduces_where_our_kernels_leave_peer_access_unused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in the plugin and in the workers: TW_COMPILE_PEER_ACCESS=0 is for our kernels alone."""
    from tw_compile.cli.app import app

    monkeypatch.setenv("TW_COMPILE_PEER_ACCESS", "0")
    gpu = {"index": 0, "name": "NVIDIA H100 80GB HBM3", "memory_bytes": 80 << 30, "capability": "90"}
    found = machine.examine() | {"gpus": [gpu, gpu | {"index": 1}], "peer_access": [[True, True], [True, True]]}
    monkeypatch.setattr(machine, "examine", lambda: found)
    shown = CliRunner().invoke(app, ["doctor", "--vllm", "--json", "-"])
    of_vllm = json.loads(shown.stdout)["vllm"]
    assert of_vllm["peer_access"] is True and of_vllm["peer_access_used"] is False
    text = str(sections(of_vllm))
    assert "through host memory: TW_COMPILE_PEER_ACCESS=0" in text and "NCCL alone" not in text
    stretches = [one for group in of_vllm["groups"] for each in group["thresholds"].values() for one in each]
    assert {"custom", "multimem"} <= {one["backend"] for one in stretches}


def test_doctor_says_what_flashinfer_is_left_as_the_start_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_two(**given: Any) -> dict[str, Any]:
        report = examine({"TW_COMPILE": "1"}, (9, 0), **given)
        assert report["groups"][0]["flashinfer_fusion"] in str(sections(report))
        return report["groups"][0]

    joined, by_pcie, apart = (
        of_two(),
        of_two(peers=Peers(True, False)),
        of_two(peers=Peers(False, False)),
    )
    reasons = [group["flashinfer_fusion_reason"] for group in (joined, by_pcie, apart)]
    assert reasons == ["measured_faster", "not_measured", "no_peer_access"]
    assert [group["flashinfer_fusion_bytes"] for group in (joined, by_pcie, apart)] == [None, 64 * 2**20, None]
    assert [group["groups_of_layers"]["from_tokens"] for group in (joined, by_pcie, apart)] == [513, 4097, 513]
    monkeypatch.setattr("tw_compile.hosts.vllm.doctor.installed_version", lambda: "0.24.0")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert of_two()["flashinfer_fusion"] == ""  # vLLM is here without FlashInfer


@pytest.mark.parametrize(("links", "joined"), [(None, False), ([[0, 18], [18, 0]], True), ([[0, 18], [0, 0]], False)])
def test_links_between_every_two_gpus_count(links: Any, joined: bool) -> None:
    assert _joined_by_nvlink(links) is joined
