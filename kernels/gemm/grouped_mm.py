"""A grouped GEMM for Hopper whose groups may have few rows: ``grouped_mm.cu``.

    grouped_mm(a, weights, ends, reserved_sms) -> a[ends[i - 1] : ends[i]] @ weights[i], for all groups i

PyTorch's grouped GEMM computes 256 rows of a group at a time, two tiles of 128. The work on rows beyond the group's end is
wasted. Half of the tokens have the same number of groups, each with half of the rows. So a split into two halves pays for this
waste twice. This kernel computes 128 rows at a time.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

from tw_compile import compat
from tw_compile.kernels.runtime.launch import Kernel, prepare
from tw_compile.kernels.runtime.program import Program, arch_of
from tw_compile.kernels.runtime.wgmma import BOX_COLUMNS, CAPABILITY, TensorMap, has_instructions, tensor_map

TILE_ROWS, TILE_COLUMNS, _TILE_DEPTH = 128, 256, BOX_COLUMNS
_STAGES, _MAX_GROUPS, _THREADS = 4, 1024, 384
_STAGE_BYTES = (TILE_ROWS + TILE_COLUMNS) * _TILE_DEPTH * 2
_SHARED_BYTES = _STAGES * (_STAGE_BYTES + 16) + 4 * _MAX_GROUPS
"""Bytes of ``Shared`` in grouped_mm.cu: the stages, two barriers for each stage, and the ends of the groups."""


class GroupedMmParams(ctypes.Structure):
    """``GroupedMmParams`` of grouped_mm.cu."""

    _fields_ = [
        ("a", TensorMap),
        ("weights", TensorMap),
        ("out", ctypes.c_void_p),
        ("ends", ctypes.c_void_p),
        ("groups", ctypes.c_int32),
        ("columns", ctypes.c_int32),
        ("depth", ctypes.c_int32),
        ("unused", ctypes.c_int32 * 9),
    ]


def multiplies(a: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> bool:
    """Whether the kernel can multiply ``a`` [rows, depth] by ``weights`` [groups, depth, columns].

    The groups of rows end at ``ends`` [groups]. This looks at dtypes, sizes and layout in memory. It does not check that the
    shapes fit each other.
    """
    groups, depth, columns = weights.shape
    return (
        a.dtype == weights.dtype == torch.bfloat16
        and a.stride() == (depth, 1)
        and weights.stride() == (depth * columns, 1, depth)
        and depth > 0
        and depth % _TILE_DEPTH == 0
        and columns % TILE_COLUMNS == 0
        and groups <= _MAX_GROUPS
        and ends.dtype == torch.int32
        and ends.is_contiguous()
        and a.is_cuda
        and has_instructions(a.device)
        and (a.data_ptr() | weights.data_ptr()) % 16 == 0
    )


def grouped_mm(a: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor, reserved_sms: int) -> torch.Tensor:
    """[rows, columns], computed on all but ``reserved_sms`` SMs. :func:`multiplies` must be true for the operands.

    ``ends`` [groups] is ascending, and its last element is the number of rows.
    """
    groups, depth, columns = weights.shape
    out = a.new_empty(len(a), columns)
    if not len(a):
        return out
    params = GroupedMmParams(
        tensor_map(a.data_ptr(), len(a), depth, TILE_ROWS // 2),
        tensor_map(weights.data_ptr(), groups * columns, depth, TILE_COLUMNS // 2),
        out.data_ptr(),
        ends.data_ptr(),
        groups,
        columns,
        depth,
    )
    kernel, sms = kernel_on(a.device)
    kernel.launch(
        params,
        stream=compat.current_stream(a.device).cuda_stream,
        grid=max(sms - reserved_sms, 2) // 2 * 2,
        block=_THREADS,
        shared_bytes=_SHARED_BYTES,
        cluster=2,
    )
    return out


def grouped_mm_program() -> Program:
    """The program of the kernel."""
    return Program(Path(__file__).with_name("grouped_mm.cu"), GroupedMmParams, arch_of(CAPABILITY))


@cache
def kernel_on(device: torch.device) -> tuple[Kernel, int]:
    """The loaded kernel, and the number of SMs of the device."""
    kernel = prepare(grouped_mm_program(), device.index)
    return kernel, torch.cuda.get_device_properties(device).multi_processor_count
