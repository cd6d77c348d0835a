"""How the GPUs of an engine are joined, for the process that configures it. Imports vLLM."""

from __future__ import annotations

import logging
from itertools import permutations

from tw_compile import environment
from tw_compile.hosts.vllm.flashinfer import Peers

logger = logging.getLogger("tw_compile")

_READ, _WRITE, _NVLINK = 0, 1, 2
"""Values of ``nvmlGpuP2PCapsIndex_t``. They are defined here because vLLM's copy of the module has the first one as a tuple."""


def gpus_reach_each_other(ranks: int) -> bool:
    """Whether the first ``ranks`` GPUs reach each other; False where peer access is switched off.

    GPUs that the driver's library can't be asked about count as reachable. The workers find out whether they are.
    """
    return environment.peer_access() and peers_of(ranks).reach is not False


def peers_of(ranks: int) -> Peers:
    """What the driver's library says about the first ``ranks`` GPUs. It can't be asked about those of other nodes.

    CUDA isn't asked, because vLLM forks its workers from this process, so the process must not initialise CUDA.
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
                return all(
                    pynvml.nvmlDeviceGetP2PStatus(gpu, peer, way) == pynvml.NVML_P2P_STATUS_OK
                    for gpu, peer in permutations(gpus, 2)
                    for way in ways
                )

            reach = joined(_READ, _WRITE)
            return Peers(reach, reach and joined(_NVLINK))
        finally:
            pynvml.nvmlShutdown()
    except (pynvml.NVMLError, IndexError, ValueError) as error:
        logger.debug("tw_compile: NVML does not say whether GPUs reach each other: %s", error)
        return Peers(None, False)
