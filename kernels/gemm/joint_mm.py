"""Plain GEMMs of one input, in one launch: ``joint_mm.cu``.

    joint_mm(a, matrices, biases, reserved_sms) -> [a @ one for one in matrices], each with its bias if there are any
    gated_mm(a, gate, up, reserved_sms) -> silu(a @ gate) * (a @ up)
    fed_joint_mm(fed, matrices, biases), fed_gated_mm(fed, gate, up): the same for rows that arrive meanwhile (fed.py)

Half of the tokens have half of the tiles, so the SMs that a last, partial wave leaves idle cost twice as much in relation.
Queries, keys and values, or gate and up, are GEMMs of one input. As one GEMM of all their columns they have only one partial
wave. It is made of smaller tiles where these fill the wave. The results have the same bits as those of a GEMM that does not
split its depth.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal, TypeVar

import torch

from tw_compile import compat
from tw_compile.kernels.gemm.fed import SHARED_BYTES, FedParams, FedRows
from tw_compile.kernels.runtime.launch import Kernel, prepare
from tw_compile.kernels.runtime.program import Program, arch_of, compile_all
from tw_compile.kernels.runtime.wgmma import BOX_COLUMNS, CAPABILITY, TensorMap, has_instructions, tensor_map
from tw_compile.planning.joint_tiles import MOST_JOINT, WIDTHS, Tiling, begins, tiles_beside, tiling

_TILE_ROWS, _TILE_DEPTH = 128, BOX_COLUMNS
_THREADS = 384
NO_MATRIX = 2**31 - 1
"""Where a matrix begins that does not exist."""
Form = Literal["plain", "biased", "gated"]
"""What is done with the sums before they are stored: nothing, add a bias, or multiply by ``silu`` of the gate."""


class JointMmParams(ctypes.Structure):
    """``JointMmParams`` of joint_mm.cu."""

    _fields_ = [
        ("a", TensorMap),
        ("matrices", TensorMap * MOST_JOINT),
        ("out", ctypes.c_void_p * MOST_JOINT),
        ("biases", ctypes.c_void_p * MOST_JOINT),
        ("columns", ctypes.c_int32 * MOST_JOINT),
        ("begins", ctypes.c_int32 * MOST_JOINT),
        *((name, ctypes.c_int32) for name in ("boxes_a", "boxes_b", "wide", "rows", "depth", "whole")),
        ("unused", ctypes.c_int32 * 8),
    ]


class FedJointMmParams(ctypes.Structure):
    """``JointMmParams`` of joint_mm.cu with FED."""

    _fields_ = [*JointMmParams._fields_, ("fed", FedParams)]


FedJointMmParams.__name__ = JointMmParams.__name__
_Params = TypeVar("_Params", bound=ctypes.Structure)


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
    """Whether the kernel can multiply ``a`` by all of ``matrices`` and add ``biases``, on the device of ``a``."""
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
    """[rows, columns] for each matrix, on all but ``reserved_sms`` SMs. :func:`multiplies` must be true for the operands."""
    outs = [a.new_empty(len(a), one.shape[1]) for one in matrices]
    _launch("biased" if biases else "plain", a, matrices, biases, outs, reserved_sms)
    return outs


def gated_mm(a: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, reserved_sms: int) -> torch.Tensor:
    """``silu(a @ gate) * (a @ up)``, rounded once; as :func:`joint_mm`, for matrices of one shape."""
    out = a.new_empty(len(a), gate.shape[1])
    _launch("gated", a, (gate, up), (), [out], reserved_sms)
    return out


def fed_joint_mm(fed: FedRows, matrices: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """As :func:`joint_mm`, for ``fed.rows``, with the same bits. All ranks must call it. Afterwards all rows are there."""
    outs = [fed.rows.new_empty(len(fed.rows), one.shape[1]) for one in matrices]
    _launch("biased" if biases else "plain", fed.rows, matrices, biases, outs, 0, fed)
    return outs


def fed_gated_mm(fed: FedRows, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """As :func:`gated_mm`, for ``fed.rows``, with the same bits. All ranks must call it. Afterwards all rows are there."""
    out = fed.rows.new_empty(len(fed.rows), gate.shape[1])
    _launch("gated", fed.rows, (gate, up), (), [out], 0, fed)
    return out


def _launch(
    form: Form,
    a: torch.Tensor,
    matrices: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    reserved_sms: int,
    fed: FedRows | None = None,
) -> None:
    rows = len(a)
    if not rows:
        return
    clusters = max(sms_of(a.device) - reserved_sms, 2) // 2
    tiles = tiling(rows, _columns_beside(form, matrices), clusters)
    params = params_of(JointMmParams if fed is None else FedJointMmParams, form, a, matrices, biases, outs, tiles)
    used = min(clusters, tiles.whole + tiles.narrow + tiles.low)
    if fed is not None:
        params.fed = fed.params(used)
    loaded = (
        kernel_on(a.device, tiles.width, form)
        if fed is None
        else fed_kernels(a.device, form, fed.spin_limit)[tiles.width]
    )
    loaded.launch(
        params,
        stream=compat.current_stream(a.device).cuda_stream,
        grid=2 * used,
        block=_THREADS,
        shared_bytes=shared_bytes(tiles.width) + (SHARED_BYTES if fed is not None else 0),
        cluster=2,
    )


def params_of(
    kind: type[_Params],
    form: Form,
    a: torch.Tensor,
    matrices: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    tiles: Tiling,
) -> _Params:
    """What a launch with ``tiles`` gets. Boxes are as large as they can be, as a thread takes time to ask for each."""
    rows, depth = a.shape
    beside = _columns_beside(form, matrices)
    first_columns = begins(beside, tiles.multiple)
    params = kind(
        boxes_a=2 if tiles.low else 1,
        boxes_b=_boxes(form, tiles, first_columns[1:-1]),
        wide=tiles_beside(beside, tiles.width, tiles.multiple),
        rows=rows,
        depth=depth,
        whole=tiles.whole,
    )
    params.a = tensor_map(a.data_ptr(), rows, depth, _TILE_ROWS // params.boxes_a)
    for index in range(MOST_JOINT):
        params.begins[index] = first_columns[index] if index < len(beside) else NO_MATRIX
    for index, matrix in enumerate(matrices):
        params.matrices[index] = tensor_map(matrix.data_ptr(), matrix.shape[1], depth, tiles.width // params.boxes_b)
    for index, out in enumerate(outs):
        params.out[index] = out.data_ptr()
        params.columns[index] = out.shape[1]
    for index, bias in enumerate(biases):
        params.biases[index] = bias.data_ptr()
    return params


def _columns_beside(form: Form, matrices: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Columns of the matrices that lie beside each other. A gated GEMM has both matrices' columns in each tile."""
    columns = tuple(matrix.shape[1] for matrix in matrices)
    return (sum(columns),) if form == "gated" else columns


def _boxes(form: Form, tiles: Tiling, first_columns: Sequence[int]) -> int:
    """Into how many boxes a whole tile's columns are cut. Other matrices than the first begin at ``first_columns``.

    Both CTAs of a cluster load at least one box of a tile. A narrow tile has half as many boxes as a whole one. A gated tile
    has as many boxes of either matrix.
    """
    fewest = 4 if tiles.narrow else 2
    if form == "gated":
        return fewest
    box = math.gcd(tiles.width // (2 if tiles.narrow else 1), *first_columns)
    return max(tiles.width // box, fewest)


def shared_bytes(width: int) -> int:
    """Bytes of ``Shared`` in joint_mm.cu, without what FED adds: as many stages as fit in an SM, and two barriers per stage."""
    stage = (_TILE_ROWS + width) * _TILE_DEPTH * 2
    return 225 * 1024 // stage * (stage + 16)


def joint_mm_program(width: int, form: Form) -> Program:
    """The program for tiles of ``width`` columns."""
    return _program(width, form, JointMmParams, FED=0)


def fed_mm_program(width: int, form: Form, spin_limit: int) -> Program:
    """The program for tiles of ``width`` columns and rows that arrive meanwhile."""
    return _program(width, form, FedJointMmParams, FED=1, SPIN_LIMIT=spin_limit)


def _program(width: int, form: Form, params: type[ctypes.Structure], **more: int) -> Program:
    defines = {"COLUMNS": width, "BIASED": form == "biased", "GATED": form == "gated", **more}
    return Program(Path(__file__).with_name("joint_mm.cu"), params, arch_of(CAPABILITY), tuple(defines.items()))


def load(device: torch.device, form: Form) -> None:
    """Load the kernels. The first call that needs one may come while a CUDA graph is captured, when loading may fail."""
    _kernels(device, form)


def kernel_on(device: torch.device, width: int, form: Form) -> Kernel:
    return _kernels(device, form)[width]


@cache
def _kernels(device: torch.device, form: Form) -> dict[int, Kernel]:
    """The loaded kernels by tile width.

    All widths are loaded at once. The best width depends on the number of rows, and a new number of rows may come first while a
    CUDA graph is captured, when nothing can be loaded.
    """
    return _prepared({width: joint_mm_program(width, form) for width in WIDTHS}, device)


@cache
def fed_kernels(device: torch.device, form: Form, spin_limit: int) -> dict[int, Kernel]:
    """As :func:`_kernels`, for rows that arrive meanwhile."""
    return _prepared({width: fed_mm_program(width, form, spin_limit) for width in WIDTHS}, device)


def _prepared(programs: dict[int, Program], device: torch.device) -> dict[int, Kernel]:
    compile_all(programs.values())
    return {width: prepare(program, device.index) for width, program in programs.items()}


@cache
def sms_of(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
