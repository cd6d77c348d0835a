"""How the GPUs of this machine are joined: PCIe or NVLink, peer access, and the memory of the host that ranks can share.

Imports no torch: what only torch can tell is in ``gpus.py``.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tw_compile.calibration import Calibration
from tw_compile.gating.facts import Node
from tw_compile.kernels.collective.transports import GroupFacts
from tw_compile.peer_routes import Tried

Report = dict[str, Any]

WORLD_SIZES = (2, 4, 8)
"""World sizes of the groups that the report describes."""
SHARED_MEMORY = Path("/dev/shm")
_PCIE = {
    "generation": "nvmlDeviceGetCurrPcieLinkGeneration",
    "width": "nvmlDeviceGetCurrPcieLinkWidth",
    "max_generation": "nvmlDeviceGetMaxPcieLinkGeneration",
    "max_width": "nvmlDeviceGetMaxPcieLinkWidth",
}


@dataclass(frozen=True)
class Gpus:
    """What torch and the driver say of this machine's GPUs (:func:`tw_compile.runner.gpus.examine`).

    Attributes:
        each: Index, name, memory in bytes and compute capability.
        uuids: The driver's UUID of each GPU.
        reachable: Whether GPU ``[a]`` can reach the memory of GPU ``[b]``, its own included.
        atomics: Whether atomics of GPU ``[a]`` on memory of GPU ``[b]`` are atomic; None where the driver can't be asked.
        multicast: Whether there is NVLink multicast; None without a GPU, and where torch can't tell.
        node: The facts that gates depend on.
        calibrations: What groups of the first GPUs have measured by themselves.
        groups: The facts that the choice of a transport depends on, by world size, for world sizes with enough GPUs.
        nccl: Whether torch was built with NCCL.
        tried: What was tried of links without native atomics; None where there are none, and where nothing was.
    """

    each: list[Report]
    uuids: list[str]
    reachable: list[list[bool]]
    atomics: list[list[bool]] | None
    multicast: bool | None
    node: Node
    calibrations: list[Calibration]
    groups: dict[int, GroupFacts]
    nccl: bool
    tried: Tried | None = None


NO_GPUS = Gpus([], [], [], [], None, Node(None, False), [], {}, False)


def shared_memory(folder: Path = SHARED_MEMORY) -> Report | None:
    """Size and free bytes of the file system that ranks of a host can share memory by; None where there is none."""
    try:
        space = os.statvfs(folder)
    except OSError:
        return None
    return {
        "path": str(folder),
        "bytes": space.f_blocks * space.f_frsize,
        "free_bytes": space.f_bavail * space.f_frsize,
    }


def nvml(uuids: Sequence[str]) -> Report:
    """What the driver's management library (NVML) says about the GPUs ``uuids``.

    All values are None without nvidia-ml-py or without a driver. ``driver``: the driver's version. ``links``: the number of
    NVLinks between each pair of GPUs; GPUs behind NVSwitches have links to the switches only, which count for every pair.
    ``pcie``: for each GPU the PCIe generation and width, both current and maximum; an idle GPU lowers its generation. A figure
    that a virtual machine hides is None.
    """
    nothing: Report = {"driver": None, "links": None, "pcie": None}
    with _library() as pynvml:
        if pynvml is None:
            return nothing
        try:
            handles = [pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}") for uuid in uuids]
            return {
                "driver": pynvml.nvmlSystemGetDriverVersion(),
                "links": _links(pynvml, handles),
                "pcie": [_pcie(pynvml, handle) for handle in handles],
            }
        except pynvml.NVMLError:
            return nothing


@contextmanager
def _library() -> Iterator[Any]:
    """``pynvml``, initialised; None without the package or without a driver."""
    if importlib.util.find_spec("pynvml") is None:
        yield None
        return
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _pcie(pynvml: Any, handle: Any) -> dict[str, int | None]:
    figures: dict[str, int | None] = {}
    for name, function in _PCIE.items():
        try:
            figures[name] = getattr(pynvml, function)(handle)
        except pynvml.NVMLError:
            figures[name] = None
    return figures


def _links(pynvml: Any, handles: list[Any]) -> list[list[int]]:
    buses = {pynvml.nvmlDeviceGetPciInfo(handle).busId: index for index, handle in enumerate(handles)}
    count = len(handles)
    links = [[0] * count for _ in range(count)]
    for own, handle in enumerate(handles):
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
            try:
                if not pynvml.nvmlDeviceGetNvLinkState(handle, link):
                    continue
                peer = buses.get(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)
            except pynvml.NVMLError:
                continue
            for other in [peer] if peer is not None else [index for index in range(count) if index != own]:
                links[own][other] += 1
    return links
