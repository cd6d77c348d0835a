"""Whether the GPUs have other work. Times that are measured beside other work would say nothing."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

MOST_UTILISATION = 5
"""Percent."""
MOST_BYTES = 3 * 2**30
"""A GPU with more memory in use is busy. The driver and this process's context hold less than that."""
_SAMPLES = 3
_SAMPLE_SECONDS = 0.3


@dataclass(frozen=True)
class Usage:
    """How one GPU is used. ``utilisation``: percent, None where it is unknown. ``processes``: ids of other processes on it."""

    index: int
    used_bytes: int
    utilisation: int | None = None
    processes: tuple[int, ...] = ()


def obstacles(usages: Sequence[Usage]) -> list[str]:
    """Why the GPUs can't be measured now, one line for each reason. Empty where they are idle."""
    lines = []
    for usage in usages:
        if usage.processes:
            lines.append(f"GPU {usage.index} has processes {', '.join(map(str, usage.processes))}")
        if usage.utilisation is not None and usage.utilisation > MOST_UTILISATION:
            lines.append(f"GPU {usage.index} is {usage.utilisation}% busy")
        if usage.used_bytes > MOST_BYTES:
            lines.append(f"GPU {usage.index} has {usage.used_bytes / 2**30:.1f} GiB in use")
    return lines


def usages(count: int) -> list[Usage]:
    """How the first ``count`` GPUs that this process sees are used.

    nvidia-ml-py says it, if it is installed. Otherwise only the free memory is known.
    """
    if importlib.util.find_spec("pynvml") is not None:
        import pynvml

        try:
            pynvml.nvmlInit()
            try:
                return [_usage_by_nvml(index) for index in range(count)]
            finally:
                pynvml.nvmlShutdown()
        except pynvml.NVMLError:
            pass  # no permission, or a driver that does not answer
    memory = [torch.cuda.mem_get_info(index) for index in range(count)]
    return [Usage(index, total - free) for index, (free, total) in enumerate(memory)]


def _usage_by_nvml(index: int) -> Usage:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
    samples = []
    for number in range(_SAMPLES):
        if number:
            time.sleep(_SAMPLE_SECONDS)
        samples.append(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    processes = sorted({process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)} - {os.getpid()})
    used = pynvml.nvmlDeviceGetMemoryInfo(handle).used
    return Usage(index, used, max(samples), tuple(processes))
