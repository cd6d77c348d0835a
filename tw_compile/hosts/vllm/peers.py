"""Whether the GPUs of an engine reach each other's memory, for the process that configures it. Imports vLLM."""

from __future__ import annotations

import logging
from itertools import permutations

from tw_compile import environment

logger = logging.getLogger("tw_compile")

_READ, _WRITE = 0, 1
"""``nvmlGpuP2PCapsIndex_t``; the module that vLLM ships has the first one as a tuple."""


def gpus_reach_each_other(ranks: int) -> bool:
    """As the driver's library says of the first ``ranks`` GPUs; False where peer access is switched off.

    CUDA isn't asked: vLLM forks its workers from this process, which must not have made it ready. GPUs that can't be asked
    about, as those of other nodes, are taken to be reached. Workers find out what is so.
    """
    if not environment.peer_access():
        return False
    from vllm.platforms import current_platform
    from vllm.third_party import pynvml

    if not current_platform.is_cuda():
        return True
    try:
        pynvml.nvmlInit()
        try:
            numbers = [current_platform.device_id_to_physical_device_id(index) for index in range(ranks)]
            gpus = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in numbers]
            return all(
                pynvml.nvmlDeviceGetP2PStatus(gpu, peer, way) == pynvml.NVML_P2P_STATUS_OK
                for gpu, peer in permutations(gpus, 2)
                for way in (_READ, _WRITE)
            )
        finally:
            pynvml.nvmlShutdown()
    except (pynvml.NVMLError, IndexError, ValueError) as error:
        logger.debug("tw_compile: NVML does not say whether GPUs reach each other: %s", error)
        return True
