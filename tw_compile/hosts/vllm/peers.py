"""How the GPUs of an engine reach each other's memory, for the process that configures it. Imports vLLM."""

from __future__ import annotations

import logging
from itertools import permutations
from typing import NamedTuple

from tw_compile import environment

logger = logging.getLogger("tw_compile")

_READ, _WRITE, _NVLINK, _ATOMICS = range(4)
"""Values of ``nvmlGpuP2PCapsIndex_t``. They are defined here because vLLM's copy of the module has the first one as a tuple."""


class Peers(NamedTuple):
    """Whether GPUs reach each other's memory, and whether their links have native atomics, which our kernels need."""

    access: bool = True
    atomics: bool = True


def peers_among(ranks: int) -> Peers:
    """How the first ``ranks`` GPUs reach each other, as the driver's library says; they don't where that is switched off.

    CUDA isn't asked, because vLLM forks its workers from this process, so the process must not initialise CUDA. GPUs that the
    library can't be asked about, such as those of other nodes, count as reachable. The workers find out whether they are.
    NVLinks have atomics, whatever the library says of those: nobody has asked it on a node with NVLinks yet.
    """
    if not environment.peer_access():
        return Peers(access=False)
    from vllm.platforms import current_platform
    from vllm.third_party import pynvml

    if not current_platform.is_cuda():
        return Peers()
    try:
        pynvml.nvmlInit()
        try:
            numbers = [current_platform.device_id_to_physical_device_id(index) for index in range(ranks)]
            gpus = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in numbers]

            def can(gpu: object, peer: object, way: int) -> bool:
                return bool(pynvml.nvmlDeviceGetP2PStatus(gpu, peer, way) == pynvml.NVML_P2P_STATUS_OK)

            pairs = list(permutations(gpus, 2))
            access = all(can(*pair, _READ) and can(*pair, _WRITE) for pair in pairs)
            return Peers(access, access and all(can(*pair, _NVLINK) or can(*pair, _ATOMICS) for pair in pairs))
        finally:
            pynvml.nvmlShutdown()
    except (pynvml.NVMLError, IndexError, ValueError) as error:
        logger.debug("tw_compile: NVML does not say how GPUs reach each other: %s", error)
        return Peers()
