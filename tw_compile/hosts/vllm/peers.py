"""Whether the GPUs of an engine reach each other's memory, for the process that configures it. Imports vLLM."""

from __future__ import annotations

import logging
from itertools import permutations

from tw_compile import environment

logger = logging.getLogger("tw_compile")

_READ, _WRITE = 0, 1
"""Values of ``nvmlGpuP2PCapsIndex_t``. They are defined here because vLLM's copy of the module has the first one as a tuple."""


def gpus_reach_each_other(ranks: int) -> bool:
    """Whether the first ``ranks`` GPUs reach each other, as the driver's library says; False where peer access is switched off.

    CUDA isn't asked, because vLLM forks its workers from this process, so the process must not initialise CUDA. GPUs that the
    library can't be asked about, such as those of other nodes, count as reachable. The workers find out whether they are.
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
