"""Host code for kernels with ``wgmma.cuh``: which devices have the instructions, and tensor maps of matrices."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache

import torch

from tw_compile.kernels.runtime import bindings

CAPABILITY = (9, 0)
TensorMap = ctypes.c_uint64 * 16
BOX_COLUMNS = 64


@cache
def has_instructions(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == CAPABILITY


@lru_cache(maxsize=1024)
def tensor_map(pointer: int, rows: int, columns: int, box_rows: int) -> TensorMap:  # type: ignore[valid-type]
    """Tensor map of a row-major matrix of 16-bit elements: boxes of ``box_rows`` rows x 128 bytes, swizzled for ``wgmma``."""
    driver = bindings.load("driver")
    code = bindings.call(
        driver.cuTensorMapEncodeTiled,
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        2,
        pointer,
        [driver.cuuint64_t(columns), driver.cuuint64_t(rows)],
        [driver.cuuint64_t(2 * columns)],
        [driver.cuuint32_t(BOX_COLUMNS), driver.cuuint32_t(box_rows)],
        [driver.cuuint32_t(1), driver.cuuint32_t(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        where="tensor map",
    )
    return TensorMap.from_buffer_copy(ctypes.string_at(code.getPtr(), ctypes.sizeof(TensorMap)))
