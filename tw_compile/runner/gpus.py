"""What torch and the driver say of this machine's GPUs. Imports torch; creates neither a context nor a communicator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tw_compile import compat, peer_routes
from tw_compile.calibration import Calibration, default_folder, stored
from tw_compile.current import measured_on
from tw_compile.gating.facts import Node
from tw_compile.kernels.collective.p2p_group import device_uuids
from tw_compile.kernels.collective.peer_access import native_atomics
from tw_compile.kernels.collective.transport import node_facts
from tw_compile.kernels.transports import selection
from tw_compile.runner.topology import WORLD_SIZES, Gpus

Report = dict[str, Any]


def examine() -> Gpus:
    """Describe the GPUs that torch can use; the result has no GPU where a driver finds none."""
    count = torch.cuda.device_count()
    reachable = peer_access(count)
    multicast = compat.multicast_support(0) if count else None
    native = atomics(reachable)
    node, tried = Node(None, False), None
    if count:
        access, has_atomics = all(map(all, reachable)), native is not None and all(map(all, native))
        tried = None if has_atomics or not access else peer_routes.in_use()
        kernels = has_atomics or bool(peer_routes.route_of(tried, count))
        node = Node(torch.cuda.get_device_capability(0), bool(multicast), access, kernels)
    each = [_gpu(index) for index in range(count)]
    return Gpus(
        each,
        device_uuids()[:count],
        reachable,
        native,
        multicast,
        node,
        calibrations_of(each, node),
        {ranks: node_facts("cuda", ranks) for ranks in WORLD_SIZES if ranks <= count},
        dist.is_nccl_available(),
        tried,
    )


def peer_access(count: int) -> list[list[bool]]:
    """Whether GPU ``[a]`` can reach the memory of GPU ``[b]``, its own included."""
    return _pairs(count, torch.cuda.can_device_access_peer, True)


def atomics(reachable: Sequence[Sequence[bool]]) -> list[list[bool]] | None:
    """Whether atomics of GPU ``[a]`` on memory of GPU ``[b]`` are atomic; None where the driver can't be asked."""

    def has(gpu: int, peer: int) -> bool:
        return reachable[gpu][peer] and native_atomics(gpu, peer)

    try:
        return _pairs(len(reachable), has, True)
    except OSError:  # no driver
        return None


def calibrations_of(gpus: list[Report], node: Node) -> list[Calibration]:
    """The calibrations of groups of this host's first GPUs. From now on this process chooses kernels by them."""
    folder = default_folder()
    found = [
        calibration
        for ranks in WORLD_SIZES
        if len(gpus) >= ranks
        for here in [measured_on(gpus[0]["name"], ranks, node, node_facts("cuda", ranks).peer_access)]
        if (calibration := stored(folder, here)) is not None
    ]
    if found:
        steps = tuple(step for calibration in found for step in calibration.steps)
        selection.use_measured({gpus[0]["name"]: steps})
    return found


def _pairs(count: int, ask: Callable[[int, int], bool], of_itself: bool) -> list[list[bool]]:
    return [[of_itself if a == b else ask(a, b) for b in range(count)] for a in range(count)]


def _gpu(index: int) -> Report:
    properties = torch.cuda.get_device_properties(index)
    return {
        "index": index,
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}{properties.minor}",
    }
