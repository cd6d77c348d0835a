"""The split-K GEMM without a GPU: what it launches and when, and what can be read from its machine code."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from machine_code import REGISTERS_OF_AN_SM, count, instructions, ptx_with, resources, smallest_loop_with
from on_gpu import STREAM, OnGpu, record_launches
from test_joint_mm import LATEST_MAY_RUN, hgmma, slow

from tw_compile.kernels.gemm import by_rows, joint_mm
from tw_compile.kernels.gemm import split_k_mm as module
from tw_compile.kernels.gemm.split_k_mm import SplitKMmParams, shared_bytes, split_k_program, tiles_of
from tw_compile.kernels.runtime.program import FULL_SHARED_BYTES
from tw_compile.planning.joint_tiles import MOST_JOINT
from tw_compile.planning.split_k_tiles import TILE_ROWS, WIDTHS, SplitK, split_k

SMS, DEPTH = 132, 512
KERNELS = pytest.mark.parametrize(
    ("width", "biased"), [(width, biased) for width in WIDTHS for biased in (False, True)]
)


# --- the source and the machine code -----------------------------------------------------------------------------------


def test_tensor_maps_lie_where_the_copy_engine_reads_them() -> None:
    assert all(getattr(SplitKMmParams, name).offset % 64 == 0 for name in ("a", "matrices"))
    assert ctypes.sizeof(SplitKMmParams) % 64 == 0


@pytest.mark.few(2)
@KERNELS
def test_the_host_knows_the_kernels_sizes(tmp_path: Path, width: int, biased: bool) -> None:
    facts = {
        "TILE_ROWS": TILE_ROWS,
        "TILE_DEPTH": module._TILE_DEPTH,
        "MATRICES": MOST_JOINT,
        "THREADS": module._THREADS,
        "COLUMNS": width,
        "sizeof(Shared)": shared_bytes(width),
    }
    assert shared_bytes(width) <= FULL_SHARED_BYTES < shared_bytes(width) + (TILE_ROWS + width) * 128
    program = split_k_program(width, biased)
    ptx_with(program, tmp_path, *(f"{name} == {value}" for name, value in facts.items()))
    with pytest.raises(RuntimeError, match=r"sizeof\(Shared\) == "):
        ptx_with(program, tmp_path, f"sizeof(Shared) == {shared_bytes(width) - 8}")


Code = Callable[[int, bool], dict[int, str]]


@pytest.fixture(scope="module")
def code_of(tmp_path_factory: pytest.TempPathFactory) -> Code:
    @cache
    def code(width: int, biased: bool) -> dict[int, str]:
        return instructions(split_k_program(width, biased).cubin(), tmp_path_factory.mktemp("code"))

    return code


@pytest.mark.few(2)
@KERNELS
def test_the_main_loop_multiplies_all_columns_and_waits_for_no_memory(code_of: Code, width: int, biased: bool) -> None:
    code = code_of(width, biased)
    loop = smallest_loop_with(code, hgmma(width))
    assert count(code, "HGMMA") == count(loop, hgmma(width)) == 4
    assert [text for text in loop if "DEPBAR" in text] == [LATEST_MAY_RUN], "matmuls wait for each other"
    assert count(loop, "SYNCS.PHASECHK") == 2, "the wait, and the one that is repeated"
    assert slow(loop) == []


@pytest.mark.few(2)
@KERNELS
def test_sums_stay_in_registers(code_of: Code, tmp_path: Path, width: int, biased: bool) -> None:
    found = resources(split_k_program(width, biased).cubin(), tmp_path)
    assert found["STACK"] == found["LOCAL"] == 0
    assert found["REG"] * module._THREADS <= REGISTERS_OF_AN_SM
    code = code_of(width, biased)
    assert count(code, "LDL") == count(code, "STL") == 0


# --- launches --------------------------------------------------------------------------------------------------------


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What is launched on a device of ``SMS`` SMs."""
    found, kernel = record_launches(monkeypatch, module)
    monkeypatch.setattr(module, "kernel_on", lambda device, width, biased: kernel(width=width, biased=biased))
    monkeypatch.setattr(module, "sms_of", lambda device: SMS)
    return found


def operands(rows: int, columns: Sequence[int], depth: int = DEPTH) -> tuple[torch.Tensor, list[torch.Tensor]]:
    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.bfloat16).as_subclass(OnGpu)

    return zeros(rows, depth), [zeros(one, depth).t() for one in columns]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("columns", [(200, 64, 8), (200, 64), (200,)])
def test_a_launch_has_the_operands_and_the_kernels_shape(
    launches: list[dict[str, Any]], columns: tuple[int, ...], biased: bool
) -> None:
    a, matrices = operands(130, columns)
    biases = [torch.zeros(one, dtype=torch.bfloat16).as_subclass(OnGpu) for one in columns] if biased else []
    outs = module.joint_mm(a, matrices, biases, SplitK(128, 4, 6, 1.0))
    assert [out.shape for out in outs] == [(130, one) for one in columns]
    assert all(out.dtype == torch.bfloat16 and out.is_contiguous() for out in outs)
    (launch,) = launches
    params = launch.pop("params")
    no_matrix, missing = [0] * 4, MOST_JOINT - len(columns)
    boxes = 1 if len(columns) == 1 else 4  # the second matrix begins at column 224
    assert list(params.a)[:4] == [a.data_ptr(), 130, DEPTH, 64]
    maps = [[one.data_ptr(), one.shape[1], DEPTH, 128 // boxes] for one in matrices]
    assert [list(one)[:4] for one in params.matrices] == maps + [no_matrix] * missing
    assert list(params.out) == [out.data_ptr() for out in outs] + [None] * missing
    assert list(params.columns) == [*columns, *[0] * missing]
    assert list(params.biases) == ([one.data_ptr() for one in biases] + [None] * missing if biased else [None] * 3)
    assert list(params.begins) == [0, 224, 288][: len(columns)] + [2**31 - 1] * missing
    assert (params.boxes, params.high, params.rows, params.depth, params.parts) == (boxes, 2, 130, DEPTH, 4)
    sizes = {"block": module._THREADS, "shared_bytes": shared_bytes(128), "cluster": 4}
    assert launch == {"stream": STREAM, "grid": 24, "width": 128, "biased": biased, **sizes}


def test_tiles_are_those_of_the_plan(launches: list[dict[str, Any]]) -> None:
    a, matrices = operands(64, (2048, 512, 512), 4096)
    tiles = tiles_of(a, matrices)
    assert tiles is not None and tiles == split_k(64, 4096, (2048, 512, 512), SMS)
    assert tiles_of(a[:0], matrices) is None
    assert tiles_of(operands(2048, (2048, 512, 512), 4096)[0], matrices) is None


@pytest.mark.parametrize(("rows", "ours"), [(0, "whole"), (1, "split"), (128, "split"), (2048, "whole")])
def test_gemms_of_few_rows_split_their_depth(
    monkeypatch: pytest.MonkeyPatch, launches: list[dict[str, Any]], rows: int, ours: str
) -> None:
    """Both kernels are loaded by the first call, whatever its rows: a later one may be in a capture, when nothing can be."""
    loaded: list[tuple[torch.device, object]] = []
    monkeypatch.setattr(module, "load", lambda device, biased: loaded.append((device, biased)))
    monkeypatch.setattr(joint_mm, "load", lambda device, form: loaded.append((device, form)))
    monkeypatch.setattr(joint_mm, "multiplies", lambda *operands: True)
    monkeypatch.setattr(joint_mm, "joint_mm", lambda a, matrices, biases, reserved_sms: "whole")
    monkeypatch.setattr(module, "joint_mm", lambda a, matrices, biases, tiles: "split")
    a, matrices = operands(rows, (2048, 512, 512), 4096)
    assert by_rows.joint_mm_on_cuda(a, matrices, [], [0]) == ours
    assert loaded == [(a.device, "plain"), (a.device, False)]
