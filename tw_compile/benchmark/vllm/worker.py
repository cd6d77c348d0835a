"""An extension of vLLM's workers (``worker_extension_cls``): random weights that matter, and facts. Imports vLLM."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import ReplicatedLinear

from tw_compile.hosts.vllm.ways import measure
from tw_compile.passes.prefetch import prefetching_calls
from tw_compile.report import collect_reports

STD = 0.02
CODES = 64.0
"""Standard deviation of float8 codes: a weight of 7 deviations is the largest code."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_collecting = ExitStack()
_reports = _collecting.enter_context(collect_reports())
"""Reports of all graphs of this process: vLLM imports this module before it compiles. ``_collecting`` keeps the collector in a
variable: it stops collecting when it is deleted."""


class WorkerExtension:
    """Mixed into vLLM's worker, whose ``rank``, ``vllm_config`` and ``get_model`` it reads."""

    def tw_compile_randomise(self: Any, seed: int, dtype: str) -> None:
        randomise(self.get_model(), self.rank, seed, getattr(torch, dtype))

    def tw_compile_measure(self: Any) -> None:
        """Choose by measurement again, as other engines on the same GPUs have disturbed what the start measured."""
        measure(self)

    def tw_compile_facts(self: Any) -> dict[str, Any]:
        """Seconds of compilation, the device, its peak bytes, whether the passes are in the engine, and wires of fused sums."""
        compilation = self.vllm_config.compilation_config
        inside = compilation.inductor_compile_config.values()
        return {
            "compile_seconds": compilation.compilation_time,
            "device_name": torch.cuda.get_device_name(),
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "passes": any(type(custom_pass).__module__.startswith("tw_compile.") for custom_pass in inside),
            "prefetching": prefetching_calls(_reports),
            "wires": dict(sum((Counter(report.wires) for report in _reports), Counter())),
        }


@torch.inference_mode()  # in whichever mode the parameters were made
def randomise(model: nn.Module, rank: int, seed: int, dtype: torch.dtype) -> None:
    """Set normal weights of deviation 0.02, different on every rank where they are sharded; norms are 1, biases 0.

    vLLM's dummy weights are the same on all ranks, so a sum over two ranks is exact in any order. They are also so small, those
    of norms too, that no layer changes a bit of the residual. With them wrong sums would give the same tokens. The values are
    rounded to ``dtype``, whatever the model's dtype is: a float32 model has the same. Float8 weights (of vLLM's dummy ones 98%
    are zero) get codes of deviation ``CODES``, and all scales of weights are the number that makes that ``STD``. Scales may be
    powers of two (``float8_e8m0fnu`` or packed in integers); these stay as they are, as other quantised weights do.
    """
    number = 0
    for module in model.modules():
        replicated = isinstance(module, ReplicatedLinear)
        for name, parameter in module.named_parameters(recurse=False):
            number += 1
            codes = parameter.dtype == torch.float8_e4m3fn
            if parameter.dtype not in _DTYPES and not codes:
                continue
            if "scale" in name:
                parameter.fill_(1.0 if "input" in name else STD / CODES)
                continue
            if parameter.dim() < 2:
                parameter.fill_(1.0 if name == "weight" else 0.0)
                continue
            generator = torch.Generator(parameter.device)
            generator.manual_seed((seed * 2**20 + number) * 2**10 + (0 if replicated else rank))
            drawn = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
            drawn.normal_(0.0, CODES if codes else STD, generator=generator)
            parameter.copy_(drawn.clamp_(-448, 448).to(parameter.dtype) if codes else drawn.to(dtype))
