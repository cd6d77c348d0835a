"""Host code that the CUDA C++ kernels of this operator share: which variant of a source a request needs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from ctypes import c_float, c_void_p
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from tw_compile.kernels.collective.fields import LAST_POINTERS, MESSAGE, PARAMETERS, POINTERS, ROWS, VARIANT, Field
from tw_compile.kernels.collective.spec import FP8, OPERAND_ALIGNMENT, SUPPORTED_DTYPES, NormSpec, Request
from tw_compile.kernels.collective.wires import EXACT, WIRES, Codes
from tw_compile.kernels.epilogues import EPILOGUES

VECTOR = 8
"""Elements that a thread handles at a time, whatever their type."""
LOADS_AND_STORES = (7, 5)
"""The lowest compute capability for kernels that reach other ranks' rows by loads and stores, in peer or in host memory.

Their accesses are relaxed, acquire or release at system scope, which GPUs have from 7.0 on. NVRTC 13 compiles from 7.5 on.
"""
HOPPER = (9, 0)
"""The lowest compute capability for bulk copies, clusters, multicast addresses and programmatic launches."""
CODED_ROW_ALIGNMENT = 32
"""Alignment of rows in codes, in bytes; wire.cuh has it too."""
MAKES_NO_SCALES = "float8 results have one scale, which is given"
"""Why a kernel does not serve a call that wants scales made of its rows."""
_FP8_CAPABILITY = (8, 9)

_TYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", FP8: "e4m3"}
_RESIDUAL_OUT = {"none": "NO_ROWS", "sharded": "OWN_ROWS", "replicated": "ALL_ROWS"}

POINTER_FIELDS = tuple((name, c_void_p) for name in POINTERS)
"""The first fields of the parameter structs of these kernels."""
LAST_FIELDS: tuple[tuple[str, Any], ...] = (
    *((name, c_float) for name in PARAMETERS),
    *((name, c_void_p) for name in LAST_POINTERS),
)
"""The last fields of these parameter structs."""
_numbers = attrgetter(*PARAMETERS)


def numbers_of(norm: NormSpec) -> dict[str, float]:
    """The values of the numbers among :data:`LAST_FIELDS`."""
    return dict(zip(PARAMETERS, _numbers(norm), strict=True))


def row_obstacle(
    request: Request, min_capability: tuple[int, int] = HOPPER, *, wires: bool = False, scales: bool = False
) -> str | None:
    """Why a kernel that needs ``min_capability`` cannot serve the request; None if it can. The same on all ranks.

    ``wires``: whether the kernel can let rows travel in codes. ``scales``: whether it can compute scales for float8 results.
    """
    if request.norm.scale_columns and not scales:
        return MAKES_NO_SCALES
    if request.norm.scale_columns and request.norm_bias is not None:
        return "no scales are made of results of a norm with a bias"
    if request.wire != EXACT and not wires:
        return f"rows travel as they are, not as {request.wire}"
    hidden_size = request.x.shape[1]
    capability = torch.cuda.get_device_capability(request.x.device)
    needed = max(min_capability, _FP8_CAPABILITY) if request.norm.hidden_dtype == FP8 else min_capability
    if capability < needed:
        expected, got = (".".join(map(str, version)) for version in (needed, capability))
        return f"needs compute capability {expected}, the device has {got}"
    if hidden_size % VECTOR:
        return f"hidden_size {hidden_size} is not a multiple of {VECTOR}"
    if EPILOGUES[request.norm.epilogue].header is None:
        return f"epilogue {request.norm.epilogue} has no CUDA header"
    for tensor in _rows(request):
        if tensor is not None and tensor.dtype not in SUPPORTED_DTYPES:
            return f"dtype {tensor.dtype} is not supported"
    return None


def travelling_bytes(hidden_size: int, dtype: torch.dtype, codes: Codes | None) -> int:
    """Bytes of a row in memory that peers write or read (``ROW_BYTES`` of wire.cuh). Rows of float8 never travel in codes."""
    if codes is None or dtype == FP8:
        return hidden_size * dtype.itemsize
    return -(-codes.row_bytes(hidden_size) // CODED_ROW_ALIGNMENT) * CODED_ROW_ALIGNMENT


def result_bytes(request: Request) -> int:
    """Bytes of a normalised row, and of scales computed from it, in memory that peers access (``ResultRow`` of wire.cuh)."""
    hidden_size, norm = request.x.shape[1], request.norm
    if not norm.scale_columns:
        return travelling_bytes(hidden_size, norm.hidden_dtype, WIRES[request.wire].results)
    made = hidden_size + 4 * hidden_size // norm.scale_columns
    return -(-made // CODED_ROW_ALIGNMENT) * CODED_ROW_ALIGNMENT


def result_vector_bytes(request: Request) -> int:
    """Bytes of a thread's part of a normalised row in shared memory."""
    norm = request.norm
    return 2 * VECTOR if norm.scale_columns else vector_bytes(norm.hidden_dtype, WIRES[request.wire].results)


def statistics_bytes(request: Request, rows: int, warps: int) -> int:
    """Bytes in shared memory for the statistics of ``rows`` rows of ``warps`` warps each.

    There are two sets of statistics, which are used in turn, and a maximum per warp if scales are computed.
    """
    of_a_warp = 2 * EPILOGUES[request.norm.epilogue].statistics_bytes + (4 if request.norm.scale_columns else 0)
    return rows * warps * of_a_warp


def vector_bytes(dtype: torch.dtype, codes: Codes | None) -> int:
    """Bytes of a thread's part of a row of ``dtype`` in ``codes`` in shared memory (``STAGED_BYTES`` of wire.cuh)."""
    return VECTOR * dtype.itemsize if codes is None or dtype == FP8 else 2 * codes.bits


def aligned(request: Request) -> Request:
    """The request with copies of the tensors that don't begin at a multiple of 16 bytes. Usually there are no such tensors.

    Such a tensor must be copied: it may be on one rank only, and all ranks must launch the same kernel.
    """
    copies: dict[str, Any] = {
        name: tensor.clone()
        for name, tensor in zip((MESSAGE, *ROWS), (request.x, *_rows(request)), strict=True)
        if tensor is not None and tensor.data_ptr() % OPERAND_ALIGNMENT
    }
    return replace(request, **copies) if copies else request


def variant_of(request: Request) -> Hashable:
    """A key that is equal for requests that one compiled kernel serves. The world size is not part of it."""
    values = (value.dtype if isinstance(value, torch.Tensor) else value for value in _variant_values(request))
    return request.x.shape[1], request.x.dtype, *values


def row_defines(request: Request, world_size: int, spin_limit: int) -> dict[str, int | str]:
    """The definitions for ``row.cuh``, and the definitions that all sources of this operator share."""
    defines: dict[str, int | str] = {
        "WORLD_SIZE": world_size,
        "SPIN_LIMIT": spin_limit,
        "HIDDEN": request.x.shape[1],
        "X_TYPE": _TYPE_NAMES[request.x.dtype],
    }
    for field, value in zip(VARIANT, _variant_values(request), strict=True):
        if field.role.define is not None:
            defines[field.role.define] = _definition(field, value)
    if request.weight is None:
        defines["CAST_TYPE"] = "none"  # there is no product with a weight, so nothing is rounded before it
    return defines


def _definition(field: Field, value: Any) -> int | str:
    if field.name == "residual_out":
        return _RESIDUAL_OUT[value]
    if isinstance(value, (bool, int)):
        return int(value)
    if isinstance(value, float):
        return f"{value!r}f"
    if isinstance(value, str):
        return value
    dtype = value.dtype if isinstance(value, torch.Tensor) else value
    return "none" if dtype is None else _TYPE_NAMES[dtype]


def headers_of(request: Request) -> tuple[Path, ...]:
    """The header of the request's epilogue; :func:`row_obstacle` has checked that it exists."""
    header = EPILOGUES[request.norm.epilogue].header
    return () if header is None else (header,)


def address(tensor: torch.Tensor | None) -> int | None:
    """The tensor's device address for a pointer field of a parameter struct; None without a tensor."""
    return None if tensor is None else tensor.data_ptr()


def _path(field: Field) -> str:
    """The path of the field's attribute in a :class:`Request`."""
    return f"norm.{field.name}" if field.role.kind == "norm" else field.name


_rows: Callable[[Request], tuple[torch.Tensor | None, ...]] = attrgetter(*ROWS)
_variant_values: Callable[[Request], tuple[Any, ...]] = attrgetter(*map(_path, VARIANT))
