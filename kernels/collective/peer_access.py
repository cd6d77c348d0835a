"""Whether kernels on the GPUs of a node can work on each other's memory, and whether they may.

PCIe cards with the stock driver, virtual machines and containers often lack peer access. Other PCIe cards have it, but their
link has no native atomics. Then CUDA does not promise that a word that a peer writes arrives whole, and behind what was written
before. All our kernels over peer memory need that, also those that signal by stores (``docs/decisions/host-memory.md``). Such a
link is used only by kernels that ranks have tried there, if these were right and fast (:mod:`tw_compile.peer_routes`).

:func:`pair_obstacle` says both, at compile time and at the first use, so that both find the same. The checks here need no
communication, and create no CUDA context unless a link lacks native atomics. ``p2p_group.py`` checks what only the first use
can tell.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import permutations

import torch
import torch.distributed as dist

from tw_compile import peer_routes
from tw_compile.agree import agreed
from tw_compile.environment import PEER_ACCESS, peer_access, peer_atomics
from tw_compile.kernels.collective.transports import NO_PEER_ACCESS, NO_PEER_ATOMICS

_NATIVE_ATOMIC_SUPPORTED = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
SWITCHED_OFF = f"peer access is switched off ({PEER_ACCESS}=0)"


def local_world_size() -> int:
    """How many ranks run on each host, by the launcher's LOCAL_WORLD_SIZE; without a launcher the whole world size."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def native_atomics(device: int, peer: int) -> bool:
    """Whether ``device`` has native atomics on memory of ``peer`` (CUDA ordinals): over NVLink it has, over PCIe mostly not.

    Raises:
        OSError: There is no library of NVIDIA's driver.
    """
    if not peer_atomics():
        return False
    driver = ctypes.CDLL("libcuda.so.1")
    handles = (ctypes.c_int(), ctypes.c_int())
    value = ctypes.c_int()
    codes = [driver.cuDeviceGet(ctypes.byref(handle), n) for handle, n in zip(handles, (device, peer), strict=True)]
    codes.append(driver.cuDeviceGetP2PAttribute(ctypes.byref(value), _NATIVE_ATOMIC_SUPPORTED, *handles))
    return not any(codes) and value.value == 1


def pair_obstacle(gpu: int, peer: int) -> str | None:
    """Why kernels on ``gpu`` can't work on the memory of ``peer`` (CUDA ordinals); None if they can, or if some may."""
    if not torch.cuda.can_device_access_peer(gpu, peer):
        return NO_PEER_ACCESS
    return NO_PEER_ATOMICS if is_plain(gpu, peer) and not peer_routes.over_link(1 + max(gpu, peer)) else None


def is_plain(gpu: int, peer: int) -> bool:
    """Whether the link of two GPUs that have peer access lacks native atomics. A driver that can't be asked promises none."""
    try:
        return not native_atomics(gpu, peer)
    except OSError:
        return True


def plain_route(gpus: Iterable[int]) -> str:
    """``push`` or ``pull``, if only such kernels may work on each other's memory of ``gpus``; empty if all may, or none.

    GPUs that this process does not see count as having native atomics; the first use refuses them.
    """
    visible = torch.cuda.device_count()
    seen = sorted({gpu for gpu in gpus if gpu < visible})
    if not any(is_plain(gpu, peer) for gpu, peer in permutations(seen, 2)):
        return ""
    return peer_routes.over_link(1 + seen[-1])


def link_obstacle(gpus: Iterable[int]) -> str | None:
    """Why kernels on some of ``gpus`` (CUDA ordinals) can't work on each other's memory. Initialises CUDA.

    Missing peer access comes before missing atomics, because without it nobody else can use the link either.
    """
    found = {pair_obstacle(gpu, peer) for gpu, peer in permutations(sorted(set(gpus)), 2)}
    return next((obstacle for obstacle in (NO_PEER_ACCESS, NO_PEER_ATOMICS) if obstacle in found), None)


def known_link_obstacle(gpus: Iterable[int]) -> str | None:
    """:func:`link_obstacle`, as far as this process can tell without initialising CUDA.

    GPUs that this process does not see are assumed to have no obstacle.
    """
    if not torch.cuda.is_initialized():
        return None
    visible = torch.cuda.device_count()
    return link_obstacle(gpu for gpu in gpus if gpu < visible)


def peer_access_obstacle(local_ranks: Sequence[int]) -> str | None:
    """Why kernels of ranks of one host can't work on each other's memory; None if they can, or if only the first use can tell.

    All ranks get the same answer: the answer of the rank that asks first. A rank's GPU is assumed to have the rank's local
    number, as launchers set it up. If each rank sees only its own GPU, nothing is known.
    """
    gpus = tuple(sorted(set(local_ranks)))
    if not torch.cuda.is_initialized():
        return _own_obstacle(gpus)
    tried = "" if peer_routes.known() is None else "/tried"
    return agreed(f"peer_access/{gpus}{tried}", partial(_own_obstacle, gpus))


def copy_obstacle(local_ranks: Sequence[int]) -> str | None:
    """:func:`peer_access_obstacle` for what asks for no atomics: copies, and kernels of others."""
    obstacle = peer_access_obstacle(local_ranks)
    return None if obstacle == NO_PEER_ATOMICS else obstacle


def _own_obstacle(gpus: Sequence[int]) -> str | None:
    return known_link_obstacle(gpus) if peer_access() else SWITCHED_OFF
