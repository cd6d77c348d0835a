"""What doctor says of links, on nodes that are played."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from tw_compile import compat, peer_routes, torch_files
from tw_compile.cli import doctor
from tw_compile.cli.app import app
from tw_compile.kernels.collective import peer_access
from tw_compile.kernels.collective.transports import NO_PEER_ATOMICS
from tw_compile.runner import gpus, machine, topology

ALL = [[True, True], [True, True]]
NONE = [[True, False], [False, True]]
PCIE4 = {"generation": 1, "width": 16, "max_generation": 4, "max_width": 16}


class Error(Exception):
    """pynvml.NVMLError."""


def library(hidden: tuple[str, ...] = (), nvlinks: int = 0) -> SimpleNamespace:
    """``pynvml`` of two GPUs; ``hidden``: functions that a virtual machine has not."""

    def figure(name: str, value: Any) -> Any:
        def ask(*handle: Any) -> Any:
            if name in hidden:
                raise Error(name)
            return value

        return ask

    def link_state(handle: int, link: int) -> bool:
        if link >= nvlinks:
            raise Error("no such link")
        return True

    functions = {function: figure(function, PCIE4[name]) for name, function in topology._PCIE.items()}
    return SimpleNamespace(
        NVMLError=Error,
        NVML_NVLINK_MAX_LINKS=18,
        nvmlInit=figure("nvmlInit", None),
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "580.1",
        nvmlDeviceGetHandleByUUID=["GPU-a", "GPU-b"].index,
        nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(busId=f"bus {handle}"),
        nvmlDeviceGetNvLinkState=link_state,
        nvmlDeviceGetNvLinkRemotePciInfo=lambda handle, link: SimpleNamespace(busId="bus of a switch"),
        **functions,
    )


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Play a node of two GPUs."""

    def play(peers: list[list[bool]], atomics: bool = True, nvml: SimpleNamespace | None = None) -> None:
        properties = SimpleNamespace(name="NVIDIA L4", total_memory=24 * 2**30, major=8, minor=9)
        for name, value in {
            "is_initialized": lambda: True,
            "device_count": lambda: 2,
            "get_device_properties": lambda index: properties,
            "get_device_capability": lambda index: (8, 9),
            "can_device_access_peer": lambda gpu, peer: peers[gpu][peer],
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(compat, "multicast_support", lambda index: False)
        monkeypatch.setattr(machine, "has_driver", lambda: True)
        monkeypatch.setattr(gpus, "device_uuids", lambda: ["a", "b"])
        for module in (gpus, peer_access):
            monkeypatch.setattr(module, "native_atomics", lambda gpu, peer: atomics)
        planted = nvml or library()
        planted.__spec__ = object()  # find_spec gives that of a module that is there
        monkeypatch.setitem(sys.modules, "pynvml", planted)

    return play


def report(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["doctor", *arguments, "--json", "-"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found | {"text": result.stderr}


def of_two(found: dict[str, Any]) -> dict[str, Any]:
    plan: dict[str, Any] = found["plans"][0]
    assert (plan["world_size"], plan["device"]) == (2, "cuda")
    return plan


def test_a_node_without_peer_access_says_so_and_what_runs(node: Any) -> None:
    node(NONE)
    found = report()
    plan = of_two(found)
    steps = "host_words (32 CTAs) to 1 MiB, host_one_shot (8 CTAs) to 8 MiB, host_two_shot (8 CTAs) beyond"
    kernels = f"{steps} (none measured for NVIDIA L4, 2 ranks)"
    assert (plan["transport"], plan["kernels"]) == ("host", kernels)
    assert plan["transport_why"] == "no peer access between the GPUs"
    assert found["peer_access"] == NONE and found["native_atomics"] == NONE
    assert found["nvlinks"] == [[0, 0], [0, 0]] and found["pcie"] == [PCIE4, PCIE4]
    lines = [" ".join(line.split()) for line in found["text"].splitlines()]
    assert "0 - no PCIe" in lines and "1 no PCIe -" in lines
    assert "0: NVIDIA L4, 24 GiB, sm89, PCIe 4 x16" in lines
    assert any("(no peer access between the GPUs)" in line for line in lines)
    assert plan["expected"] == [] and "2 ranks not known: nothing has been measured on this GPU" in " ".join(lines)


@pytest.mark.parametrize(("peers", "wires"), [(ALL, ["exact"]), (NONE, ["exact", "int8"])])
def test_a_known_gpu_is_told_what_it_gains(
    node: Any, monkeypatch: pytest.MonkeyPatch, peers: list[list[bool]], wires: list[str]
) -> None:
    node(peers)
    properties = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=80 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    found = report()
    rows = of_two(found)["expected"]
    models = ["llama-3.1-8b", "llama-3.3-70b"]
    assert [(row["model"], row["wire"]) for row in rows] == [(model, wire) for model in models for wire in wires]
    gains = {(row["model"], row["wire"]): row["gain"] for row in rows}
    asked = ["plan", "--model", models[0], "--tp", "2", "--tokens", "2048", "--device-profile", "H100", "--json", "-"]
    asked += [] if peers is ALL else ["--transport", "host"]
    planned = json.loads(CliRunner().invoke(app, asked).stdout)["plans"][0]["gain"]
    assert gains[models[0], "exact"] == pytest.approx(planned) and planned > 1.05
    if "int8" in wires:
        assert gains[models[0], "int8"] > gains[models[0], "exact"] > 1.5
    text = " ".join(found["text"].split())
    assert f"2 ranks llama-3.1-8b {planned:.2f}x" in text
    assert ("wire int8 sends rows in 8 bits" in text) is ("int8" in wires)


def test_nvlinks_peers_and_atomics_are_told_pair_by_pair(node: Any) -> None:
    node(ALL, nvml=library(nvlinks=2))
    found = report()
    assert of_two(found)["transport"] == "p2p" and found["nvlinks"] == [[0, 2], [2, 0]]
    assert "yes NVLink 2x atomics" in found["text"]


def test_a_link_without_atomics_is_no_way_for_the_kernels(node: Any) -> None:
    node(ALL, atomics=False)
    found = report()
    plan = of_two(found)
    assert plan["transport"] == "host" and "host_two_shot" in plan["kernels"]
    assert plan["transport_why"] == NO_PEER_ATOMICS
    assert "yes PCIe" in found["text"] and "atomics\n" not in found["text"].split("symmetric memory")[0]
    (line,) = [line for line in found["text"].splitlines() if "without native atomics, which most" in line]
    assert line.startswith("GPU 0 reaches the memory of GPU 1 over PCIe") and "fused rows through host memory" in line
    node(ALL)
    assert "without native atomics" not in report()["text"]


def test_a_route_that_was_tried_over_a_link_without_atomics_is_used_and_told(node: Any) -> None:
    node(ALL, atomics=False)
    on = peer_routes.on_device("NVIDIA L4")
    times = {"host": {"1024": 9.0, "16777216": 500.0}, "push": {"1024": 5.0, "16777216": 400.0}}
    tried = peer_routes.Tried(on, 2, "push", times, {"pull": "did not end within 60 s"})
    assert peer_routes.store(peer_routes.default_folder(), tried) is not None
    try:
        found = report()
    finally:
        (peer_routes.default_folder() / on.file_name).unlink()
    assert of_two(found)["transport"] == "p2p" and found["routes_tried"]["route"] == "push"
    (line,) = [line for line in found["text"].splitlines() if "without native atomics" in line]
    assert line == (
        "GPU 0 reaches the memory of GPU 1 over PCIe without native atomics: rows go by push over the link without native "
        "atomics, tried by 2 ranks: host takes 500 us for 16 MiB, push takes 400 us for 16 MiB, "
        "pull is out (did not end within 60 s)"
    )


def test_vllm_keeps_its_own_all_reduce_over_a_link_without_atomics(node: Any) -> None:
    node(ALL, atomics=False)
    found = report("--vllm")
    of_vllm = found["vllm"]
    assert (of_vllm["peer_access"], of_vllm["peer_atomics"]) == (True, False)
    text = " ".join(found["text"].split())
    assert f"fused through host memory: {NO_PEER_ATOMICS}" in text and "NCCL alone" not in text
    stretches = [one for group in of_vllm["groups"] for each in group["thresholds"].values() for one in each]
    assert "custom" in {one["backend"] for one in stretches}


def test_the_switch_is_told(node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    node(ALL)
    monkeypatch.setenv("TW_COMPILE_PEER_ACCESS", "0")
    found = report()
    assert of_two(found)["transport_why"] == "peer access is switched off (TW_COMPILE_PEER_ACCESS=0)"
    assert found["peer_access_used"] is False and found["peer_access"] == ALL, "which are facts of the machine"
    assert "TW_COMPILE_PEER_ACCESS=0: tw_compile leaves peer access unused" in found["text"]


def test_vllm_is_shown_with_nccl_where_peers_cannot_be_reached(node: Any) -> None:
    node(NONE)
    found = report("--vllm")
    of_vllm = found["vllm"]
    assert of_vllm["peer_access"] is False and "NCCL alone: no peer access between the GPUs" in found["text"]
    stretches = [one for group in of_vllm["groups"] for each in group["thresholds"].values() for one in each]
    assert {one["backend"] for one in stretches} == {"nccl"}
    assert {group["flashinfer_fusion_bytes"] for group in of_vllm["groups"]} == {None}
    node(ALL)
    of_vllm = report("--vllm")["vllm"]
    stretches = [one for group in of_vllm["groups"] for each in group["thresholds"].values() for one in each]
    assert of_vllm["peer_access"] is True and "custom" in {one["backend"] for one in stretches}


def test_what_a_virtual_machine_hides_is_not_known(node: Any) -> None:
    node(NONE, nvml=library(hidden=("nvmlDeviceGetMaxPcieLinkGeneration", "nvmlDeviceGetCurrPcieLinkWidth")))
    found = report()
    assert found["pcie"][0] == {"generation": 1, "width": None, "max_generation": None, "max_width": 16}
    assert "sm89\n" in found["text"] and found["versions"]["driver"] == "580.1"
    node(NONE, nvml=library(hidden=("nvmlInit",)))
    found = report()
    assert (found["pcie"], found["nvlinks"], found["versions"]["driver"]) == (None, None, None)


def test_atomics_are_unknown_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def no_driver(gpu: int, peer: int) -> bool:
        asked.append((gpu, peer))
        raise OSError("libcuda.so.1")

    monkeypatch.setattr(gpus, "native_atomics", no_driver)
    assert gpus.atomics(ALL) is None and len(asked) == 1
    assert gpus.atomics(NONE) == NONE and len(asked) == 1, "not asked of memory that can't be reached"


@pytest.mark.parametrize(
    ("figures", "text"),
    [
        (None, ""),
        (PCIE4, ", PCIe 4 x16"),
        (PCIE4 | {"width": 8}, ", PCIe 4 x8 of x16"),
        (PCIE4 | {"width": None}, ", PCIe 4 x16"),
        (PCIE4 | {"width": None, "max_width": None}, ", PCIe 4"),
    ],
)
def test_lanes_that_the_slot_lacks_are_told(figures: dict[str, int | None] | None, text: str) -> None:
    assert doctor.pcie_text(figures) == text


def test_the_shared_memory_of_the_host_has_a_size(tmp_path: Path) -> None:
    space = topology.shared_memory(tmp_path)
    assert space is not None and 0 <= space["free_bytes"] <= space["bytes"] > 2**20
    assert topology.shared_memory(tmp_path / "nowhere") is None


def test_a_driver_without_a_gpu_is_told_as_no_driver_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    found = []
    for driver in (False, True):
        monkeypatch.setattr(machine, "has_driver", lambda driver=driver: driver)
        found.append(report())
    assert found[0] == found[1] and found[0]["gpus"] == []


def test_what_torch_is_reads_the_same_in_its_files_as_in_the_module(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert (torch_files.torch_version(), torch_files.cuda_version()) == (torch.__version__, torch.version.cuda)
    assert torch_files.has_gloo() is dist.is_gloo_available()
    assert torch_files.has_symmetric_memory() is (find_spec("torch.distributed._symmetric_memory") is not None)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_python.so").write_bytes(b"\0ProcessGroupMPI\0")
    monkeypatch.setattr(torch_files, "_folder", lambda: tmp_path)
    torch_files.has_gloo.cache_clear()
    assert not torch_files.has_gloo() and not torch_files.has_symmetric_memory()
    torch_files.has_gloo.cache_clear()
