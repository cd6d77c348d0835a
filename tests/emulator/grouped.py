"""The grouped GEMM in the emulator, called as the host calls it: what reaches the driver runs here."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cuda.bindings import driver

from emulator import Emulator, tensor_map
from tw_compile import compat
from tw_compile.kernels.gemm import grouped_mm as module
from tw_compile.kernels.runtime import bindings

SOURCE = Path(module.__file__).with_name("grouped_mm.cu")
NOT_WRITTEN = 0xFFFF  # a NaN that no result is
STALL_LIMIT = 100_000


class TileDriver:
    """The driver's encoder of tensor maps, for those that the emulator knows."""

    def __getattr__(self, name: str) -> Any:
        return getattr(driver, name)

    def cuTensorMapEncodeTiled(self, dtype: Any, rank: int, address: int, *given: Any) -> tuple[Any, ...]:
        (columns, rows), (row_bytes,), (box_columns, box_rows), steps = (
            [int(one) for one in values] for values in given[:4]
        )
        interleave, swizzle, _, outside = given[4:]
        assert dtype == driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
        assert (rank, steps, int(interleave), int(outside)) == (2, [1, 1], 0, 0)
        assert swizzle == driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B
        encoded = ctypes.create_string_buffer(tensor_map(address, rows, columns, row_bytes, box_rows, box_columns), 128)
        return driver.CUresult.CUDA_SUCCESS, SimpleNamespace(getPtr=lambda: ctypes.addressof(encoded), kept=encoded)


def bits_of(address: int, count: int) -> Any:
    """``count`` numbers of 16 bits at an address, as an array of numpy's."""
    return np.ctypeslib.as_array((ctypes.c_uint16 * count).from_address(address))


def whole_numbers(*shape: int, seed: int) -> torch.Tensor:
    """Few enough bits that sums of some hundred products are exact in float32, in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-99, 100, shape, generator=generator).to(torch.bfloat16)


def expected(a: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    bounds = [0, *ends.tolist()]
    parts = [a[begin:end].float() @ one.float() for begin, end, one in zip(bounds, bounds[1:], weights, strict=False)]
    return torch.cat(parts).to(torch.bfloat16)


def multiply(
    a: torch.Tensor,
    weights: torch.Tensor,
    ends: torch.Tensor,
    seed: int,
    *,
    sms: int = 4,
    reserved_sms: int = 0,
    resident: int = 16,
    source: Path = SOURCE,
) -> torch.Tensor:
    """``grouped_mm`` on a device of ``sms`` SMs, at most ``resident`` of which run a CTA at a time."""
    emulator = Emulator(source, "grouped_mm", 1, seed, resident=resident, stall_limit=STALL_LIMIT)

    def launch(
        params: module.GroupedMmParams, *, stream: int, grid: int, block: int, shared_bytes: int, cluster: int
    ) -> None:
        out = bits_of(params.out, len(a) * weights.shape[2])
        out.fill(NOT_WRITTEN)
        for name, buffer in (("out", out), ("a", a), ("weights", weights.transpose(1, 2))):
            emulator.alloc(0, buffer, name=name)
        emulator.launch(0, stream, grid, block, shared_bytes, params, cluster=cluster)
        emulator.run()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bindings, "load", lambda name: TileDriver())
        patch.setattr(module, "tensor_map", module.tensor_map.__wrapped__)
        patch.setattr(module, "kernel_on", lambda device: (SimpleNamespace(launch=launch), sms))
        patch.setattr(compat, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
        return module.grouped_mm(a, weights, ends, reserved_sms)


def check(rows: Sequence[int], columns: int, depth: int, seed: int, **options: Any) -> None:
    """Groups of ``rows`` rows: every element is what it must be, to the bit, and no operand was written to."""
    a = whole_numbers(sum(rows), depth, seed=2 * seed)
    weights = whole_numbers(len(rows), columns, depth, seed=2 * seed + 1).transpose(1, 2)
    ends = torch.tensor(list(accumulate(rows)), dtype=torch.int32)
    given = [tensor.clone() for tensor in (a, weights, ends)]
    found, want = multiply(a, weights, ends, seed, **options), expected(a, weights, ends)
    wrong = found.view(torch.int16) != want.view(torch.int16)
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} are wrong, first at {wrong.nonzero()[0].tolist()}"
    assert all(torch.equal(now, before) for now, before in zip((a, weights, ends), given, strict=True))
