"""Plain GEMMs of one input, in one launch: ``joint_mm.cu``.

    joint_mm(a, matrices, biases, reserved_sms) -> [a @ one for one in matrices], each with its bias if there are any
    gated_mm(a, gate, up, reserved_sms) -> silu(a @ gate) * (a @ up)

Half of the tokens have half of the tiles, and what a last, partial wave leaves idle weighs twice as much. Queries, keys and
values, or gate and up, are GEMMs of one input: as one sequence of tiles they have one partial wave, and it is made of smaller
tiles where that fills it. Bits are those of a GEMM that does not split its depth.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from tw_compile import compat
from tw_compile.kernels.runtime.launch import Kernel, prepare
from tw_compile.kernels.runtime.program import Program, arch_of
from tw_compile.kernels.runtime.wgmma import BOX_COLUMNS, CAPABILITY, TensorMap, has_instructions, tensor_map
from tw_compile.planning.joint_tiles import MOST_JOINT, WIDTHS, tiling

_TILE_ROWS, _TILE_DEPTH = 128, BOX_COLUMNS
_THREADS = 384
Form = Literal["plain", "biased", "gated"]
"""The operations on sums before they are stored."""


class JointMmParams(ctypes.Structure):
    """``JointMmParams`` of joint_mm.cu."""

    _fields_ = [
        ("a", TensorMap),
        ("matrices", TensorMap * MOST_JOINT),
        ("out", ctypes.c_void_p * MOST_JOINT),
        ("biases", ctypes.c_void_p * MOST_JOINT),
        ("columns", ctypes.c_int32 * MOST_JOINT),
        ("rows", ctypes.c_int32),
        ("depth", ctypes.c_int32),
        ("whole", ctypes.c_int32),
        ("unused", ctypes.c_int32 * 14),
    ]


def can_multiply(a: torch.Tensor, matrix: torch.Tensor) -> bool:
    """Whether the kernel can multiply ``a`` [rows, depth] by ``matrix`` [depth, columns], as far as fake tensors tell.

    This looks at dtypes, sizes and strides. It does not check that the shapes fit each other.
    """
    depth, columns = matrix.shape
    return (
        a.dtype == matrix.dtype == torch.bfloat16
        and a.stride() == (depth, 1)
        and matrix.stride() == (1, depth)
        and depth > 0
        and depth % _TILE_DEPTH == 0
        and columns > 0
        and columns % 8 == 0
    )


def can_add(bias: torch.Tensor, matrix: torch.Tensor) -> bool:
    """Whether the kernel adds ``bias`` to each row of a product with ``matrix`` [depth, columns]."""
    return bias.dtype == torch.bfloat16 and bias.shape == matrix.shape[1:] and bias.stride() == (1,)


def multiplies(a: torch.Tensor, matrices: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] = ()) -> bool:
    """Whether the kernel is for these, on this device."""
    return (
        a.is_cuda
        and 1 <= len(matrices) <= MOST_JOINT
        and all(one.device == a.device for one in (*matrices, *biases))
        and all(can_multiply(a, one) and one.data_ptr() % 16 == 0 for one in matrices)
        and len(biases) in (0, len(matrices))
        and all(can_add(bias, one) and bias.data_ptr() % 4 == 0 for bias, one in zip(biases, matrices, strict=False))
        and a.data_ptr() % 16 == 0
        and has_instructions(a.device)
    )


def joint_mm(
    a: torch.Tensor, matrices: Sequence[torch.Tensor], biases: Sequence[torch.Tensor], reserved_sms: int
) -> list[torch.Tensor]:
    """[rows, columns] of each matrix, on all but ``reserved_sms`` SMs; the operands are what :func:`multiplies` is true for."""
    outs = [a.new_empty(len(a), one.shape[1]) for one in matrices]
    _launch("biased" if biases else "plain", a, matrices, biases, outs, reserved_sms)
    return outs


def gated_mm(a: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, reserved_sms: int) -> torch.Tensor:
    """``silu(a @ gate) * (a @ up)``, rounded once; as :func:`joint_mm`, for matrices of one shape."""
    out = a.new_empty(len(a), gate.shape[1])
    _launch("gated", a, (gate, up), (), [out], reserved_sms)
    return out


def _launch(
    form: Form,
    a: torch.Tensor,
    matrices: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    reserved_sms: int,
) -> None:
    rows, depth = a.shape
    if not rows:
        return
    clusters = max(sms_of(a.device) - reserved_sms, 2) // 2
    columns = [one.shape[1] for one in matrices]
    tiles = tiling(rows, (sum(columns),) if form == "gated" else tuple(columns), clusters)
    params = JointMmParams(
        a=tensor_map(a.data_ptr(), rows, depth, _TILE_ROWS // 2), rows=rows, depth=depth, whole=tiles.whole
    )
    for index, matrix in enumerate(matrices):
        params.matrices[index] = tensor_map(matrix.data_ptr(), columns[index], depth, tiles.width // 4)
    for index, out in enumerate(outs):
        params.out[index] = out.data_ptr()
        params.columns[index] = out.shape[1]
    for index, bias in enumerate(biases):
        params.biases[index] = bias.data_ptr()
    kernel_on(a.device, tiles.width, form).launch(
        params,
        stream=compat.current_stream(a.device).cuda_stream,
        grid=2 * min(clusters, tiles.whole + tiles.narrow + tiles.low),
        block=_THREADS,
        shared_bytes=shared_bytes(tiles.width),
        cluster=2,
    )


def shared_bytes(width: int) -> int:
    """``Shared`` of joint_mm.cu: as many stages as an SM has room for, and two barriers for each."""
    stage = (_TILE_ROWS + width) * _TILE_DEPTH * 2
    return 225 * 1024 // stage * (stage + 16)


def joint_mm_program(width: int, form: Form) -> Program:
    """The kernel for tiles of ``width`` columns."""
    defines = (("COLUMNS", width), ("BIASED", form == "biased"), ("GATED", form == "gated"))
    return Program(Path(__file__).with_name("joint_mm.cu"), JointMmParams, arch_of(CAPABILITY), defines)


def kernel_on(device: torch.device, width: int, form: Form) -> Kernel:
    return _kernels(device, form)[width]


@cache
def _kernels(device: torch.device, form: Form) -> dict[int, Kernel]:
    """The loaded kernels by tile width.

    All widths are loaded at once. The best width depends on the number of rows, and a new number of rows may come first while a
    CUDA graph is captured, when nothing can be loaded.
    """
    return {width: prepare(joint_mm_program(width, form), device.index) for width in WIDTHS}


@cache
def sms_of(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
