"""Whether the ranks of a group can read and write each other's memory, or memory of their host.

Everything here is collective, waits on the host, and runs at the first use of a group only.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import TypeVar

import torch
import torch.distributed as dist

from tw_compile import compat
from tw_compile.agree import common_obstacle, gather
from tw_compile.environment import peer_access
from tw_compile.kernels.collective.peer_access import SWITCHED_OFF, pair_obstacle

T = TypeVar("T")

_PROBE_BYTES = 4096


def outside_pools(device: torch.device, function: Callable[[], T]) -> T:
    """Run ``function()`` on a thread of its own with ``device`` current. Returns its result, or raises its exception.

    CUDA-graph warm-up sends the allocations of *its thread* to the graph's private memory pool. Inference mode is a property of
    a thread, too. What ``function`` allocates outlives any graph, so it must neither come from that pool nor be made in
    inference mode.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with torch.cuda.device(device):
                results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=run, name="tw_compile-p2p-setup")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


@dataclass(frozen=True)
class RankFacts:
    """Where a rank runs, and the compute capability of its GPU."""

    host: str
    device_uuid: str
    capability: tuple[int, int]


def _host_id() -> str:
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot_id.read_text().strip() if boot_id.exists() else ''}".strip()


def device_uuids() -> list[str]:
    """UUIDs of the devices this process sees, by ordinal."""
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]


def sharing_obstacle(facts: Sequence[RankFacts]) -> str | None:
    """Why the ranks in ``facts`` cannot share GPUs as they do; None if each rank has a GPU of its own.

    This is a function of its own so that checks of results alone (``tests/gpu/checks/sharing.py``) can switch it off.
    """
    if len({fact.device_uuid for fact in facts}) < len(facts):
        return "two ranks share a GPU; kernels that wait for each other could not run at once"
    return None


def host_obstacle(facts: Sequence[RankFacts]) -> str | None:
    """Why kernels of the ranks in ``facts`` cannot wait for each other on one host; None where they can."""
    hosts = sorted({fact.host for fact in facts})
    if len(hosts) > 1:
        return f"the group spans {len(hosts)} hosts ({', '.join(hosts)})"
    capabilities = sorted({fact.capability for fact in facts})
    if len(capabilities) > 1:
        # The shapes of kernels depend on it, and so does where a kernel puts its rows for the others.
        named = ", ".join(f"{major}.{minor}" for major, minor in capabilities)
        return f"the GPUs of the group have different compute capabilities ({named})"
    return sharing_obstacle(facts)


def peer_obstacle(
    own: int,
    facts: Sequence[RankFacts],
    visible: Sequence[str],
    obstacle_between: Callable[[int, int], str | None],
) -> str | None:
    """Why the device with ordinal ``own`` cannot work on the memory of all ranks in ``facts``; None when it can."""
    obstacle = host_obstacle(facts)
    if obstacle is not None:
        return obstacle
    for rank, fact in enumerate(facts):
        if fact.device_uuid == visible[own]:
            continue
        if fact.device_uuid not in visible:
            return f"the GPU of rank {rank} is not visible to this process (CUDA_VISIBLE_DEVICES), access unknown"
        obstacle = obstacle_between(own, visible.index(fact.device_uuid))
        if obstacle is not None:
            return f"{obstacle} (to the GPU of rank {rank})"
    return None


def _facts(group: dist.ProcessGroup, device: torch.device) -> tuple[int, list[str], list[RankFacts]]:
    """This rank's CUDA ordinal, the devices it sees, and where all ranks run. Collective."""
    own = torch.cuda.current_device() if device.index is None else device.index
    visible = device_uuids()
    facts = RankFacts(_host_id(), visible[own], torch.cuda.get_device_capability(own))
    return own, visible, gather(facts, group)


def host_group_obstacle(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why the group cannot use kernels over host memory, or None; the same answer on every rank. Collective."""
    return common_obstacle(group, host_obstacle(_facts(group, device)[2]))


def group_obstacle(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why the group cannot use P2P kernels, or None; the same answer on every rank. Collective."""
    own, visible, facts = _facts(group, device)
    try:
        obstacle = peer_obstacle(own, facts, visible, pair_obstacle) if peer_access() else SWITCHED_OFF
        if obstacle is None:
            compat.symm_mem_empty(_PROBE_BYTES, device)
    except RuntimeError as error:
        obstacle = f"symmetric memory is not available: {error}"
    return common_obstacle(group, obstacle)
