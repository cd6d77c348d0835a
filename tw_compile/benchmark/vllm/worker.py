"""An extension of vLLM's workers (``worker_extension_cls``): random weights that matter, and facts. Imports vLLM."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from vllm.distributed.device_communicators import flashinfer_all_reduce as communicator
from vllm.model_executor.layers.linear import LinearBase, ReplicatedLinear

from tw_compile.hosts.vllm.ways import measure
from tw_compile.passes.prefetch import prefetching_calls
from tw_compile.report import collect_reports

STD = 0.02
SCALE = 2.0**-12
"""Of float8 weights: the largest code is 5.5 deviations. Codes times a power of two are exact in all ``_DTYPES``."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_FLOAT8 = torch.float8_e4m3fn

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
        """Seconds of compilation, the device, its peak bytes, whether the passes are in, wires, FlashInfer's part."""
        compilation = self.vllm_config.compilation_config
        inside = compilation.inductor_compile_config.values()
        return {
            "compile_seconds": compilation.compilation_time,
            "device_name": torch.cuda.get_device_name(),
            "flashinfer_importable": communicator.fi_ar_available,
            "flashinfer_fusion_bytes": flashinfer_fusion_bytes(self.vllm_config),
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "passes": any(type(custom_pass).__module__.startswith("tw_compile.") for custom_pass in inside),
            "prefetching": prefetching_calls(_reports),
            "wires": dict(sum((Counter(report.wires) for report in _reports), Counter())),
        }


def flashinfer_fusion_bytes(config: Any) -> int:
    """Up to how many bytes vLLM's own fusion, by FlashInfer, serves this process; 0: it is off, or could not be set up."""
    limits, ranks = config.compilation_config.pass_config, config.parallel_config.tensor_parallel_size
    if not limits.fuse_allreduce_rms or communicator._fi_ar_workspace is None:
        return 0
    return limits.flashinfer_max_size(ranks) or 0


@torch.inference_mode()  # in whichever mode the parameters were made
def randomise(model: nn.Module, rank: int, seed: int, dtype: torch.dtype) -> None:
    """Set normal weights of deviation 0.02, different on every rank where they are sharded; norms are 1, biases 0.

    vLLM's dummy weights are the same on all ranks, so a sum over two ranks is exact in any order. They are also so small, those
    of norms too, that no layer changes a bit of the residual. With them wrong sums would give the same tokens. The values are
    rounded to ``dtype``, whatever the model's dtype is: a float32 model has the same. They depend on a parameter's name, so
    that it does not matter which others a model has. Float8 weights (of vLLM's dummy ones 98% are zero) get codes, and all
    scales of weights are ``SCALE``. If ``dtype`` is float8, other weights are codes times ``SCALE``, too. So a model without
    the quantisation has the same values, whichever layers are quantised. Scales may be powers of two (``float8_e8m0fnu`` or
    packed in integers); these stay as they are, as other quantised weights do.

    Raises:
        ValueError: ``dtype`` is float8, and a kernel of vLLM's has put a layer's weight into another layout.
    """
    for prefix, module in model.named_modules():
        replicated = isinstance(module, ReplicatedLinear)
        for name, parameter in module.named_parameters(recurse=False):
            path = f"{prefix}.{name}"
            if dtype == _FLOAT8 and isinstance(module, LinearBase) and name == "weight":
                parameter = _out_in(path, module, parameter)
            codes = parameter.dtype == _FLOAT8
            if parameter.dtype not in _DTYPES and not codes:
                continue
            if "scale" in name:
                parameter.fill_(1.0 if "input" in name else SCALE)
                continue
            if parameter.dim() < 2:
                parameter.fill_(1.0 if name == "weight" else 0.0)
                continue
            generator = torch.Generator(parameter.device)
            generator.manual_seed(random.Random(f"{path} {seed} {0 if replicated else rank}").getrandbits(63))
            drawn = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
            drawn.normal_(0.0, STD, generator=generator)
            if codes or dtype == _FLOAT8:
                drawn = drawn.div_(SCALE).clamp_(-448, 448).to(_FLOAT8)
                parameter.copy_(drawn if codes else drawn.float().mul_(SCALE))
            else:
                parameter.copy_(drawn.to(dtype))


def _out_in(path: str, layer: LinearBase, weight: torch.Tensor) -> torch.Tensor:
    """``weight`` as [out, in]: itself, or a view if it is held as [in, out]. Strides tell square ones apart."""
    out, inner = (
        getattr(layer, f"{side}_size_per_partition", getattr(layer, f"{side}_size")) for side in ("output", "input")
    )
    found = weight.t() if weight.dim() == 2 and (weight.stride(0) == 1 or weight.shape != (out, inner)) else weight
    if found.shape != (out, inner) or found.dtype not in (*_DTYPES, _FLOAT8):
        raise ValueError(
            f"{path}: expected a weight of [{out}, {inner}] or its transpose, in float8 or not quantised, got "
            f"{list(weight.shape)} in {weight.dtype}; a kernel of vLLM's has repacked it"
        )
    return found
