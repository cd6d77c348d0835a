"""What the CUDA C++ kernels of this operator share on the host: the variant of the source that a request needs."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import torch

from tw_compile.kernels.collective.spec import FP8, OPERAND_ALIGNMENT, SUPPORTED_DTYPES, Request

VECTOR = 8
"""Elements that a thread handles at a time, whatever their type."""
MIN_CAPABILITY = (9, 0)
"""What griddepcontrol and bulk copies need."""

_TYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", FP8: "e4m3"}
_RESIDUAL_OUT = {"none": "NO_ROWS", "sharded": "OWN_ROWS", "replicated": "ALL_ROWS"}


def row_obstacle(request: Request) -> str | None:
    """Why these kernels cannot serve the request; None when they can. The same on all ranks."""
    hidden_size = request.x.shape[1]
    capability = torch.cuda.get_device_capability(request.x.device)
    if capability < MIN_CAPABILITY:
        expected, got = (".".join(map(str, version)) for version in (MIN_CAPABILITY, capability))
        return f"needs compute capability {expected}, the device has {got}"
    if hidden_size % VECTOR:
        return f"hidden_size {hidden_size} is not a multiple of {VECTOR}"
    for tensor in (request.residual, request.bias, request.weight):
        if tensor is not None and tensor.dtype not in SUPPORTED_DTYPES:
            return f"dtype {tensor.dtype} is not supported"
    return None


def aligned(request: Request) -> Request:
    """The request with copies of the tensors, usually none, that don't begin at a multiple of 16 bytes.

    Nothing else can be done about them: such a tensor may be on one rank alone, and all ranks must launch the same kernel.
    """
    tensors = {name: getattr(request, name) for name in ("x", "residual", "bias", "weight")}
    copies = {
        name: tensor.clone()
        for name, tensor in tensors.items()
        if tensor is not None and tensor.data_ptr() % OPERAND_ALIGNMENT
    }
    return replace(request, **copies) if copies else request


def variant_of(request: Request) -> Hashable:
    """Equal for requests that one compiled kernel serves, but for the world size."""
    norm = request.norm
    return (
        request.x.shape[1],
        request.x.dtype,
        None if request.residual is None else request.residual.dtype,
        None if request.bias is None else request.bias.dtype,
        None if request.weight is None else request.weight.dtype,
        norm.hidden_dtype,
        norm.residual_dtype,
        norm.cast_before_weight,
        request.residual_sharded,
        request.residual_out,
        request.results_in_slot,
    )


def row_defines(request: Request, world_size: int, spin_limit: int) -> dict[str, int | str]:
    """The definitions of ``rms_norm_row.cuh`` and those that all sources of this operator share."""
    norm, weight = request.norm, request.weight
    return {
        "WORLD_SIZE": world_size,
        "SPIN_LIMIT": spin_limit,
        "HIDDEN": request.x.shape[1],
        "X_TYPE": _TYPE_NAMES[request.x.dtype],
        "RESIDUAL_TYPE": _type_name(request.residual),
        "BIAS_TYPE": _type_name(request.bias),
        "WEIGHT_TYPE": _type_name(weight),
        "HIDDEN_TYPE": _TYPE_NAMES[norm.hidden_dtype],
        "RESIDUAL_OUT_TYPE": _TYPE_NAMES[norm.residual_dtype],
        "CAST_TYPE": _TYPE_NAMES[norm.cast_before_weight] if norm.cast_before_weight and weight is not None else "none",
        "RESIDUAL_SHARDED": int(request.residual_sharded),
        "RESIDUAL_OUT": _RESIDUAL_OUT[request.residual_out],
    }


def address(tensor: torch.Tensor | None) -> int | None:
    """The device address, None for no tensor: what a pointer field of a parameter struct takes."""
    return None if tensor is None else tensor.data_ptr()


def _type_name(tensor: torch.Tensor | None) -> str:
    return "none" if tensor is None else _TYPE_NAMES[tensor.dtype]
