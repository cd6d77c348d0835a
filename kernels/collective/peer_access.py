"""Whether the GPUs of a node can read and write each other's memory, and whether they may.

PCIe cards with the stock driver, virtual machines and containers often lack peer access. The checks here need no communication
and create no CUDA context. ``p2p_group.py`` checks what only the first use can tell.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import permutations

import torch
import torch.distributed as dist

from tw_compile.agree import agreed
from tw_compile.environment import PEER_ACCESS, peer_access
from tw_compile.kernels.collective.transports import NO_PEER_ACCESS

SWITCHED_OFF = f"peer access is switched off ({PEER_ACCESS}=0)"


def local_world_size() -> int:
    """How many ranks run on each host, by the launcher's LOCAL_WORLD_SIZE; without a launcher the whole world size."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def reach_each_other(gpus: Iterable[int], can_access: Callable[[int, int], bool]) -> bool:
    """Whether each of ``gpus``, CUDA ordinals, can reach the memory of every other."""
    return all(can_access(gpu, peer) for gpu, peer in permutations(sorted(set(gpus)), 2))


def gpus_reach_each_other(gpus: Iterable[int]) -> bool:
    """Whether ``gpus`` reach each other, as far as this process can tell without initialising CUDA.

    GPUs that this process does not see are assumed to be reachable.
    """
    if not torch.cuda.is_initialized():
        return True
    visible = torch.cuda.device_count()
    return reach_each_other((gpu for gpu in gpus if gpu < visible), torch.cuda.can_device_access_peer)


def peer_access_obstacle(local_ranks: Sequence[int]) -> str | None:
    """Why ranks of one host can't work on each other's memory; None if they can, or if only the first use can tell.

    All ranks get the same answer: the answer of the rank that asks first. A rank's GPU is assumed to have the rank's local
    number, as launchers set it up. If each rank sees only its own GPU, nothing is known.
    """
    gpus = tuple(sorted(set(local_ranks)))
    if not torch.cuda.is_initialized():
        return _own_obstacle(gpus)
    return agreed(f"peer_access/{gpus}", partial(_own_obstacle, gpus))


def _own_obstacle(gpus: Sequence[int]) -> str | None:
    if not peer_access():
        return SWITCHED_OFF
    return None if gpus_reach_each_other(gpus) else NO_PEER_ACCESS
