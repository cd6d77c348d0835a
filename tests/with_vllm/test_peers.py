"""What the process that configures an engine is told of peer access, by an NVML that is planted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tw_compile import peer_routes
from tw_compile.hosts.vllm.flashinfer import Peers
from tw_compile.hosts.vllm.peers import links_for_kernels, peers_of

pytestmark = pytest.mark.usefixtures("folder")  # vLLM is imported on the fake node


def plant(monkeypatch: pytest.MonkeyPatch, refused: set[tuple[int, int, int]], gpus: int = 4) -> None:
    from vllm.platforms import current_platform
    from vllm.third_party import pynvml

    def handle(index: int) -> int:
        if index >= gpus:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return index

    def status(gpu: int, peer: int, way: Any) -> int:
        return 1 if (gpu, peer, way) in refused else pynvml.NVML_P2P_STATUS_OK

    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    monkeypatch.setattr(
        type(current_platform), "device_id_to_physical_device_id", staticmethod(lambda index: index), raising=False
    )
    for name, planted in (
        ("nvmlInit", lambda: None),
        ("nvmlShutdown", lambda: None),
        ("nvmlDeviceGetHandleByIndex", handle),
        ("nvmlDeviceGetP2PStatus", status),
    ):
        monkeypatch.setattr(pynvml, name, planted)


@pytest.mark.parametrize("way", [0, 1])
def test_one_pair_that_cannot_read_or_write_is_enough(monkeypatch: pytest.MonkeyPatch, way: int) -> None:
    plant(monkeypatch, {(2, 1, way)})
    assert peers_of(3) == peers_of(4) == Peers(False, False, False) and links_for_kernels(3) == (False, False, True)
    assert peers_of(2) == Peers(True, True)  # the third GPU is not the engine's


def test_a_link_has_atomics_if_the_library_says_so_or_if_it_is_of_nvlinks(monkeypatch: pytest.MonkeyPatch) -> None:
    nvlink, atomics = (2, 1, 2), (2, 1, 3)
    for refused, has in (({nvlink}, True), ({atomics}, True), ({nvlink, atomics}, False)):
        plant(monkeypatch, refused)
        assert links_for_kernels(3) == (True, has, True) and links_for_kernels(2) == (True, True, True)


def test_kernels_that_were_tried_over_a_link_make_up_for_its_atomics(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from vllm.platforms import current_platform

    plant(monkeypatch, {(1, 0, 2), (1, 0, 3)}, gpus=2)
    monkeypatch.setattr(type(current_platform), "get_device_name", lambda self, device_id=0: "NVIDIA L40S")
    monkeypatch.setattr(peer_routes, "default_folder", lambda: tmp_path)
    on = peer_routes.on_device("NVIDIA L40S")
    for route, atomics in (("push", True), ("pull", True), ("host", False)):
        peer_routes.store(tmp_path, peer_routes.Tried(on, 2, route, {}, {}))
        assert links_for_kernels(2) == (True, atomics, True)
    peer_routes.store(tmp_path, peer_routes.Tried(peer_routes.on_device("NVIDIA L4"), 2, "push", {}, {}))
    assert links_for_kernels(2) == (True, False, True), "of another device"


def test_the_switch_is_told_beside_the_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, set())
    assert links_for_kernels(4) == (True, True, True)
    monkeypatch.setenv("TW_COMPILE_PEER_ACCESS", "0")
    assert links_for_kernels(4) == (True, True, False)


def test_gpus_that_cannot_be_asked_about_are_taken_to_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, {(0, 1, 0)}, gpus=2)
    assert links_for_kernels(8) == (True, True, True) and links_for_kernels(2) == (False, False, True)
    assert peers_of(8) == Peers(None, False)


@pytest.mark.parametrize(
    ("refused", "expected"),
    [(set(), Peers(True, True)), ({(1, 0, 2)}, Peers(True, False)), ({(1, 0, 1)}, Peers(False, False, False))],
)
def test_gpus_that_nvlink_joins_are_told_from_others(
    monkeypatch: pytest.MonkeyPatch, refused: set[tuple[int, int, int]], expected: Peers
) -> None:
    plant(monkeypatch, refused, gpus=2)
    monkeypatch.setenv("TW_COMPILE_PEER_ACCESS", "0")  # what the GPUs can do does not depend on it
    assert peers_of(2) == expected
