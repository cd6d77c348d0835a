"""GEMMs of one input of few rows, in one launch that splits their depth: ``split_k_mm.cu``.

    joint_mm(a, matrices, biases, tiles) -> [a @ one for one in matrices], each with its bias if there are any

``a`` [rows, depth], matrices [depth, columns] and biases [columns], as :func:`joint_mm.multiplies` says. For few rows
``joint_mm.cu`` has fewer tiles than SMs. The SMs that have one wait for its whole depth, and the others are idle. Here
a cluster of two or four SMs computes a tile, each of them with a part of the depth. The parts are added in the order of the
SMs, so all calls with the same ``tiles`` have the same bits. They differ from those of ``joint_mm.py`` by rounding in float32.
:func:`tiles_of` says where this kernel is faster.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from tw_compile import compat
from tw_compile.kernels.gemm.joint_mm import NO_MATRIX, sms_of
from tw_compile.kernels.runtime.launch import Kernel, prepare
from tw_compile.kernels.runtime.program import Program, arch_of, compile_all
from tw_compile.kernels.runtime.wgmma import BOX_COLUMNS, CAPABILITY, TensorMap, tensor_map
from tw_compile.planning.joint_tiles import BOX, MOST_JOINT, begins
from tw_compile.planning.split_k_tiles import TILE_ROWS, WIDTHS, SplitK, split_k

_TILE_DEPTH = BOX_COLUMNS
_THREADS = 384


class SplitKMmParams(ctypes.Structure):
    """``SplitKMmParams`` of split_k_mm.cu."""

    _fields_ = [
        ("a", TensorMap),
        ("matrices", TensorMap * MOST_JOINT),
        ("out", ctypes.c_void_p * MOST_JOINT),
        ("biases", ctypes.c_void_p * MOST_JOINT),
        ("columns", ctypes.c_int32 * MOST_JOINT),
        ("begins", ctypes.c_int32 * MOST_JOINT),
        *((name, ctypes.c_int32) for name in ("boxes", "high", "rows", "depth", "parts")),
        ("unused", ctypes.c_int32 * 9),
    ]


def tiles_of(a: torch.Tensor, matrices: Sequence[torch.Tensor]) -> SplitK | None:
    """The tiles with which this kernel is faster than ``joint_mm.cu`` on the device of ``a``; None where it is slower."""
    columns = tuple(one.shape[1] for one in matrices)
    return split_k(len(a), a.shape[1], columns, sms_of(a.device)) if len(a) else None


def load(device: torch.device, biased: bool) -> None:
    """As :func:`joint_mm.load`."""
    _kernels(device, biased)


def joint_mm(
    a: torch.Tensor, matrices: Sequence[torch.Tensor], biases: Sequence[torch.Tensor], tiles: SplitK
) -> list[torch.Tensor]:
    """[rows, columns] for each matrix."""
    outs = [a.new_empty(len(a), one.shape[1]) for one in matrices]
    rows, depth = a.shape
    first_columns = begins((one.shape[1] for one in matrices), BOX)
    boxes = tiles.width // math.gcd(tiles.width, *first_columns[1:-1])
    params = SplitKMmParams(boxes=boxes, high=-(-rows // TILE_ROWS), rows=rows, depth=depth, parts=tiles.parts)
    params.a = tensor_map(a.data_ptr(), rows, depth, TILE_ROWS // 2)
    for index in range(MOST_JOINT):
        params.begins[index] = first_columns[index] if index < len(matrices) else NO_MATRIX
    for index, matrix in enumerate(matrices):
        params.matrices[index] = tensor_map(matrix.data_ptr(), matrix.shape[1], depth, tiles.width // boxes)
    for index, out in enumerate(outs):
        params.out[index] = out.data_ptr()
        params.columns[index] = out.shape[1]
    for index, bias in enumerate(biases):
        params.biases[index] = bias.data_ptr()
    kernel_on(a.device, tiles.width, bool(biases)).launch(
        params,
        stream=compat.current_stream(a.device).cuda_stream,
        grid=tiles.parts * tiles.tiles,
        block=_THREADS,
        shared_bytes=shared_bytes(tiles.width),
        cluster=tiles.parts,
    )
    return outs


def shared_bytes(width: int) -> int:
    """Bytes of ``Shared`` in split_k_mm.cu: as many stages as fit in an SM, and two barriers per stage."""
    stage = (TILE_ROWS + width) * _TILE_DEPTH * 2
    return 225 * 1024 // stage * (stage + 16)


def split_k_program(width: int, biased: bool) -> Program:
    """The program for tiles of ``width`` columns."""
    defines = {"COLUMNS": width, "BIASED": biased}
    source = Path(__file__).with_name("split_k_mm.cu")
    return Program(source, SplitKMmParams, arch_of(CAPABILITY), tuple(defines.items()))


def kernel_on(device: torch.device, width: int, biased: bool) -> Kernel:
    return _kernels(device, biased)[width]


@cache
def _kernels(device: torch.device, biased: bool) -> dict[int, Kernel]:
    """The loaded kernels by tile width, all at once as in ``joint_mm.py``."""
    programs = {width: split_k_program(width, biased) for width in WIDTHS}
    compile_all(programs.values())
    return {width: prepare(program, device.index) for width, program in programs.items()}
