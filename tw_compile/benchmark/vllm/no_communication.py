"""An extension of vLLM's workers without all_reduces: how fast an engine would be if they took no time. Imports vLLM.

The model's results are wrong, and ranks differ. What the sampler does is left as it is, so the logits are still gathered.
"""

from __future__ import annotations

import torch
from vllm.distributed.parallel_state import GroupCoordinator

from tw_compile.benchmark.vllm import worker


def _own_part(group: GroupCoordinator, input_: torch.Tensor) -> torch.Tensor:
    """Stands in for ``GroupCoordinator.all_reduce``, which layers and the embedding call; vLLM's compiled graphs trace it."""
    return input_


class WorkerExtension(worker.WorkerExtension):
    """Mixed into vLLM's worker in the place of the usual one. A process that imports it has no all_reduces any more."""


GroupCoordinator.all_reduce = _own_part  # before vLLM makes and compiles the model
