"""How the GPUs of an engine are joined, for the process that configures it. Imports vLLM."""

from __future__ import annotations

import logging
from itertools import permutations

from tw_compile import environment, peer_routes
from tw_compile.hosts.vllm.flashinfer import Peers

logger = logging.getLogger("tw_compile")

_READ, _WRITE, _NVLINK, _ATOMICS = range(4)
"""Values of ``nvmlGpuP2PCapsIndex_t``. They are defined here because vLLM's copy of the module has the first one as a tuple."""


def links_for_kernels(ranks: int) -> tuple[bool, bool, bool]:
    """Whether the first ``ranks`` GPUs have peer access, whether their links have native atomics, and whether we use them.

    vLLM's own all_reduces go by the hardware: ``TW_COMPILE_PEER_ACCESS`` is for our kernels alone. GPUs that the driver's
    library can't be asked about count as reachable, with atomics. The workers find out whether they are.
    """
    peers = peers_of(ranks)
    return peers.reach is not False, peers.atomics, environment.peer_access()


def peers_of(ranks: int) -> Peers:
    """What the driver's library says about the first ``ranks`` GPUs. It can't be asked about those of other nodes.

    Links without atomics count as having them where kernels were tried that do without (:mod:`tw_compile.peer_routes`). The
    workers of the first start try them, when this process has already decided.

    CUDA isn't asked, because vLLM forks its workers from this process, so the process must not initialise CUDA. NVLinks have
    atomics, whatever the library says of those: nobody has asked it on a node with NVLinks yet.
    """
    from vllm.platforms import current_platform
    from vllm.third_party import pynvml

    if not current_platform.is_cuda():
        return Peers(None, False)
    try:
        pynvml.nvmlInit()
        try:
            numbers = [current_platform.device_id_to_physical_device_id(index) for index in range(ranks)]
            gpus = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in numbers]

            def joined(*ways: int) -> bool:
                return all(any(can(*pair, way) for way in ways) for pair in permutations(gpus, 2))

            def can(gpu: object, peer: object, way: int) -> bool:
                return bool(pynvml.nvmlDeviceGetP2PStatus(gpu, peer, way) == pynvml.NVML_P2P_STATUS_OK)

            reach = joined(_READ) and joined(_WRITE)
            atomics = reach and (joined(_NVLINK, _ATOMICS) or _were_tried(ranks))
            return Peers(reach, reach and joined(_NVLINK), atomics)
        finally:
            pynvml.nvmlShutdown()
    except (pynvml.NVMLError, IndexError, ValueError) as error:
        logger.debug("tw_compile: NVML does not say how GPUs reach each other: %s", error)
        return Peers(None, False)


def _were_tried(ranks: int) -> bool:
    from vllm.platforms import current_platform

    on = peer_routes.on_device(current_platform.get_device_name())
    return bool(peer_routes.route_of(peer_routes.stored(peer_routes.default_folder(), on), ranks))
