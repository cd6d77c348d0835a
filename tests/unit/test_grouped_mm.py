"""The grouped GEMM without a GPU: which operands it takes, what it launches, and what can be read from its machine code."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import driver
from machine_code import (
    MEMORY_ACCESSES,
    MEMORY_BARRIERS,
    REGISTERS_OF_AN_SM,
    count,
    instructions,
    moved_registers,
    ptx_with,
    resources,
    smallest_loop_with,
)
from on_gpu import STREAM, OnGpu, hopper_for, off_by, record_launches

from tw_compile.kernels.gemm import grouped_mm as module
from tw_compile.kernels.gemm.grouped_mm import GroupedMmParams, grouped_mm, grouped_mm_program, multiplies
from tw_compile.kernels.runtime import bindings
from tw_compile.kernels.runtime.program import FULL_SHARED_BYTES

HGMMA = "HGMMA.64x256x16.F32.BF16"
LATEST_MAY_RUN = "WARPGROUP.DEPBAR.LE gsb0, 0x1"
ROWS, DEPTH, COLUMNS, GROUPS, SMS = 70, 128, 512, 3, 132


# --- the source ------------------------------------------------------------------------------------------------------


def test_it_is_compiled_for_the_one_architecture_that_has_the_instructions() -> None:
    """Compiling compares the layouts of the parameters, too."""
    program = grouped_mm_program()
    assert program.arch == "sm_90a" and program.cubin().startswith(b"\x7fELF")


def test_parameters_in_another_order_do_not_compile() -> None:
    fields = dict(GroupedMmParams._fields_)
    order = ["a", "weights", "ends", "out", *list(fields)[4:]]
    other = type("GroupedMmParams", (ctypes.Structure,), {"_fields_": [(name, fields[name]) for name in order]})
    with pytest.raises(RuntimeError, match="GroupedMmParams in Python: offset of ends is 256"):
        replace(grouped_mm_program(), params=other).cubin()


def test_tensor_maps_lie_where_the_copy_engine_reads_them() -> None:
    assert all(getattr(GroupedMmParams, name).offset % 64 == 0 for name in ("a", "weights"))
    assert ctypes.sizeof(GroupedMmParams) % 64 == 0


def test_the_host_knows_the_kernels_sizes(tmp_path: Path) -> None:
    facts = {
        "TILE_ROWS": module.TILE_ROWS,
        "TILE_COLUMNS": module.TILE_COLUMNS,
        "TILE_DEPTH": module._TILE_DEPTH,
        "STAGES": module._STAGES,
        "STAGE_BYTES": module._STAGE_BYTES,
        "MAX_GROUPS": module._MAX_GROUPS,
        "THREADS": module._THREADS,
        "sizeof(Shared)": module._SHARED_BYTES,
    }
    assert module._SHARED_BYTES <= FULL_SHARED_BYTES
    ptx_with(grouped_mm_program(), tmp_path, *(f"{name} == {value}" for name, value in facts.items()))
    with pytest.raises(RuntimeError, match=r"sizeof\(Shared\) == "):
        ptx_with(grouped_mm_program(), tmp_path, f"sizeof(Shared) == {module._SHARED_BYTES - 8}")


# --- machine code ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    return instructions(grouped_mm_program().cubin(), tmp_path_factory.mktemp("code"))


def test_the_main_loop_waits_for_no_memory(code: dict[int, str]) -> None:
    """Arrivals with more order than they need put a barrier and an invalidation in it: 25% of the kernel's time."""
    loop = smallest_loop_with(code, HGMMA)
    assert count(loop, HGMMA) == 4 == count(code, "HGMMA")
    assert [text for text in loop if "DEPBAR" in text] == [LATEST_MAY_RUN], "matmuls wait for each other"
    assert [text for text in loop if MEMORY_BARRIERS.search(text) or MEMORY_ACCESSES.search(text)] == []
    assert count(code, "MEMBAR"), "they have another name, which this does not look for"


def test_the_loop_that_fills_stages_waits_for_no_memory(code: dict[int, str]) -> None:
    """Both ways to share, each with two loads of its own and one for both CTAs. (Each load is a small loop itself.)"""
    loop = smallest_loop_with(code, "UTMALDG", 6)
    assert (count(loop, "UTMALDG"), count(loop, "UTMALDG.2D.MULTICAST")) == (6, 2)
    assert count(loop, "SYNCS.PHASECHK") == 2, "the wait, and the one that is repeated"
    assert [text for text in loop if MEMORY_BARRIERS.search(text)] == []


def test_sums_stay_in_registers(tmp_path: Path, code: dict[int, str]) -> None:
    found = resources(grouped_mm_program().cubin(), tmp_path)
    assert found["STACK"] == found["LOCAL"] == 0
    assert found["REG"] * module._THREADS <= REGISTERS_OF_AN_SM
    assert count(code, "LDL") == count(code, "STL") == 0


def test_registers_that_one_warpgroup_gives_are_those_that_others_take(code: dict[int, str]) -> None:
    taken, given = moved_registers(code)
    assert (taken, given) == ([232], [40])
    assert 128 * (2 * taken[0] + given[0]) <= REGISTERS_OF_AN_SM


# --- operands --------------------------------------------------------------------------------------------------------


@pytest.fixture
def hopper() -> Iterator[list[tuple[int, int]]]:
    with hopper_for(module) as capability:
        yield capability


def make_a(rows: int = ROWS, depth: int = DEPTH, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(rows, depth, dtype=dtype).as_subclass(OnGpu)


def make_weights(
    groups: int = GROUPS, depth: int = DEPTH, columns: int = COLUMNS, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    return torch.zeros(groups, columns, depth, dtype=dtype).as_subclass(OnGpu).transpose(1, 2)


def no_rows(groups: int = GROUPS, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Where groups end that have none."""
    return torch.zeros(groups, dtype=dtype)


@pytest.mark.parametrize("rows", [0, 1, ROWS])
@pytest.mark.parametrize("groups", [1, GROUPS, 1024])
def test_it_multiplies(hopper: object, groups: int, rows: int) -> None:
    depth, columns = (64, 256) if groups == 1024 else (DEPTH, COLUMNS)
    assert multiplies(make_a(rows, depth), make_weights(groups, depth, columns), no_rows(groups))


def test_ends_of_groups_are_whole_numbers_of_32_bits_side_by_side(hopper: object) -> None:
    for ends in (no_rows(dtype=torch.int64), no_rows(2 * GROUPS)[::2]):
        assert not multiplies(make_a(), make_weights(), ends)


def test_it_multiplies_from_multiples_of_16_bytes_on(hopper: object) -> None:
    assert multiplies(off_by(8, make_a()), off_by(16, make_weights()), no_rows())


@pytest.mark.parametrize(
    ("a", "weights"),
    [
        (make_a(dtype=torch.float16), make_weights(dtype=torch.float16)),
        (make_a(), make_weights(dtype=torch.float16)),
        (make_a(dtype=torch.float32), make_weights()),
        (make_a(DEPTH, ROWS).T, make_weights()),
        (make_a(depth=2 * DEPTH)[:, :DEPTH], make_weights()),
        (make_a(2 * ROWS)[::2], make_weights()),
        (make_a(), make_weights().contiguous()),
        (make_a(), make_weights(columns=2 * COLUMNS)[:, :, :COLUMNS]),
        (make_a(), make_weights(2 * GROUPS)[::2]),
        (make_a(depth=0), make_weights(depth=0)),
        (make_a().as_strided((ROWS, 0), (0, 1)), make_weights().as_strided((GROUPS, 0, COLUMNS), (0, 1, 0))),
        (make_a(depth=96), make_weights(depth=96)),
        (make_a(depth=32), make_weights(depth=32)),
        (make_a(), make_weights(columns=COLUMNS + 128)),
        (make_a(depth=64), make_weights(1025, 64, 256)),
        (make_a().as_subclass(torch.Tensor), make_weights()),
        (off_by(4, make_a()), make_weights()),
        (make_a(), off_by(4, make_weights())),
    ],
    ids=[
        "float16",
        "weights of another dtype",
        "a of another dtype",
        "a in columns",
        "rows of a apart",
        "every other row of a",
        "weights in rows",
        "weights' matrices apart",
        "every other matrix",
        "no depth",
        "no depth, and no strides for it",
        "depth of one tile and a half",
        "depth of half a tile",
        "columns of half a tile",
        "too many groups",
        "on a CPU",
        "a off 16 bytes",
        "weights off 16 bytes",
    ],
)
def test_it_is_not_for_other_operands(hopper: object, a: torch.Tensor, weights: torch.Tensor) -> None:
    assert not multiplies(a, weights, no_rows())


@pytest.mark.parametrize("capability", [(8, 9), (10, 0), (12, 0)])
def test_it_is_not_for_other_devices(hopper: list[tuple[int, int]], capability: tuple[int, int]) -> None:
    hopper[0] = capability
    assert not multiplies(make_a(), make_weights(), no_rows())


# --- launches --------------------------------------------------------------------------------------------------------


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What is launched on a device of ``SMS`` SMs."""
    found, kernel = record_launches(monkeypatch, module)
    monkeypatch.setattr(module, "kernel_on", lambda device: (kernel(), SMS))
    return found


def make_ends() -> torch.Tensor:
    return torch.tensor([20, 20, ROWS], dtype=torch.int32)


def test_a_launch_has_the_operands_and_the_kernels_shape(launches: list[dict[str, Any]]) -> None:
    a, weights, ends = make_a(), make_weights(), make_ends()
    out = grouped_mm(a, weights, ends, 0)
    assert out.shape == (ROWS, COLUMNS) and out.dtype == torch.bfloat16 and out.is_contiguous()
    (launch,) = launches
    params = launch.pop("params")
    assert list(params.a)[:4] == [a.data_ptr(), ROWS, DEPTH, 64]
    assert list(params.weights)[:4] == [weights.data_ptr(), GROUPS * COLUMNS, DEPTH, 128]
    assert (params.out, params.ends) == (out.data_ptr(), ends.data_ptr())
    assert (params.groups, params.columns, params.depth) == (GROUPS, COLUMNS, DEPTH)
    sizes = {"block": module._THREADS, "shared_bytes": module._SHARED_BYTES, "cluster": 2}
    assert launch == {"stream": STREAM, "grid": SMS, **sizes}


@pytest.mark.parametrize(("reserved", "grid"), [(0, 132), (1, 130), (16, 116), (15, 116), (130, 2), (131, 2), (200, 2)])
def test_a_grid_leaves_sms_and_is_of_whole_clusters(launches: list[dict[str, Any]], reserved: int, grid: int) -> None:
    grouped_mm(make_a(), make_weights(), make_ends(), reserved)
    assert [launch["grid"] for launch in launches] == [grid]


def test_nothing_is_launched_for_no_rows(launches: list[dict[str, Any]]) -> None:
    out = grouped_mm(make_a(0), make_weights(), torch.zeros(GROUPS, dtype=torch.int32), 16)
    assert out.shape == (0, COLUMNS) and out.dtype == torch.bfloat16 and launches == []


def test_a_tensor_map_is_of_swizzled_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 bytes of each row, in the pattern that the kernel's descriptors name; what lies outside are zeros."""
    calls: list[tuple[Any, ...]] = []
    encoded = (ctypes.c_uint64 * 16)(*range(16))

    class FakeDriver:
        def __getattr__(self, name: str) -> Any:
            return getattr(driver, name)

        def cuTensorMapEncodeTiled(self, *arguments: Any) -> tuple[Any, ...]:
            calls.append(arguments)
            return driver.CUresult.CUDA_SUCCESS, SimpleNamespace(getPtr=lambda: ctypes.addressof(encoded))

    monkeypatch.setattr(bindings, "load", lambda name: FakeDriver())
    found = module.tensor_map.__wrapped__(4096, 100, 320, 64)
    assert list(found) == list(range(16)) and ctypes.addressof(found) != ctypes.addressof(encoded)
    (call,) = calls
    dtype, rank, pointer, *lists, interleave, swizzle, _, outside = call
    sizes, strides, box, steps = ([int(value) for value in values] for values in lists)
    assert (rank, pointer, sizes, strides, box, steps) == (2, 4096, [320, 100], [640], [64, 64], [1, 1])
    assert dtype == driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    assert interleave == driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE
    assert swizzle == driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B
    assert outside == driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE
