"""Times a short kernel in this process. A longer time than at first means that kernels of the process end late.

After a few launches on a second stream all kernels of a process end later (``kernels/runtime/own_graph.py``). Then all variants
that share the process lose time for each of their kernels.
"""

from __future__ import annotations

import torch

from tw_compile.harness.measure import capture, gpu_us

_NODES = 400
_REPLAYS = 20


class ShortKernels:
    """A CUDA graph of kernels of one CTA, captured once. ``us``: microseconds of one kernel, first at creation."""

    def __init__(self, device: torch.device) -> None:
        self._value = torch.ones(32, device=device)
        self._value.mul_(1.0)  # loaded before it is captured
        self._graph = capture([lambda: self._value.mul_(1.0)], _NODES)
        self.us = [self._now()]

    def again(self) -> list[float]:
        """Time the kernel again; returns the microseconds at creation and now."""
        self.us = [self.us[0], self._now()]
        return self.us

    def _now(self) -> float:
        return min(gpu_us(self._graph.replay) for _ in range(_REPLAYS)) / _NODES
