"""CUDA C++ sources become cubins, and cubins are found again. NVRTC needs no GPU."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import nvrtc
from machine_code import dump

from tw_compile.kernels.runtime import bindings, program
from tw_compile.kernels.runtime.program import Program, arch_of, cache_folder

HEADER = "#pragma once\nint scaled(int value) { return value * FACTOR; }\n"
SOURCE = """
#include "scale.cuh"

struct Params {
    int* out;
    int* peers[2];
    int rows;
    float eps;
};

extern "C" __global__ void __launch_bounds__(128, 1) scale(const __grid_constant__ Params params) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x < params.rows) params.out[threadIdx.x] = scaled(params.rows);
}
"""


class Params(ctypes.Structure):
    _fields_ = [
        ("out", ctypes.c_void_p),
        ("peers", ctypes.c_void_p * 2),
        ("rows", ctypes.c_int32),
        ("eps", ctypes.c_float),
    ]


@pytest.fixture
def scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """A program with a header, an empty cache folder and nothing in memory."""
    forget(monkeypatch)
    monkeypatch.setattr(program, "HEADERS", tmp_path / "headers")
    monkeypatch.setenv("TW_COMPILE_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "headers").mkdir()
    (tmp_path / "headers" / "scale.cuh").write_text(HEADER)
    source = tmp_path / "scale.cu"
    source.write_text(SOURCE)
    return Program(source, Params, "sm_90a", (("FACTOR", 0x1234),))


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows by one with every call of NVRTC's compiler."""
    calls: list[Any] = []
    real = nvrtc.nvrtcCompileProgram

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(nvrtc, "nvrtcCompileProgram", counted)
    return calls


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process: nothing in memory."""
    monkeypatch.setattr(program, "cubins_in_memory", {})


def cached_files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").iterdir())


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((10, 3), "sm_103a"), ((8, 0), "sm_80"), ((12, 0), "sm_120")],
)
def test_arch_of_a_device(capability: tuple[int, int], arch: str) -> None:
    assert arch_of(capability) == arch


@pytest.mark.parametrize(("arch", "target"), [("sm_90a", "sm_90"), ("sm_100a", "sm_100")])
def test_machine_code_has_the_instruction_and_the_definition(
    scale: Program, tmp_path: Path, arch: str, target: str
) -> None:
    cubin = replace(scale, arch=arch).cubin()
    assert cubin.startswith(b"\x7fELF")
    text = dump(cubin, tmp_path, "-sass")
    assert re.search(rf"code for {target}a?\n", text)
    assert "USETMAXREG" in text  # of the architecture-specific targets alone
    assert "0x1234" in text


def test_ptx_has_one_struct_as_parameter(scale: Program) -> None:
    ptx = scale.ptx()
    assert ".target sm_90a" in ptx
    assert f".param .align 8 .b8 scale_param_0[{ctypes.sizeof(Params)}]" in ptx
    assert "\0" not in ptx


def test_a_definition_may_be_text_or_a_flag(scale: Program) -> None:
    scale.source.write_text(SOURCE + "static_assert(ON == 1 && OFF == 0 && sizeof(TYPE) == 8);\n")
    defines = (*scale.defines, ("ON", True), ("OFF", False), ("TYPE", "unsigned long long"))
    assert replace(scale, defines=defines).cubin()


def test_error_shows_the_compilers_log_and_options(scale: Program, tmp_path: Path) -> None:
    broken = SOURCE.replace("scaled(", "no_such_function(")
    scale.source.write_text(broken)
    with pytest.raises(RuntimeError, match="no_such_function") as caught:
        scale.cubin()
    line = 1 + broken[: broken.index("no_such_function")].count("\n")
    assert f"{scale.source}({line}): error" in str(caught.value)
    assert "--gpu-architecture=sm_90a" in str(caught.value) and "-DFACTOR=4660" in str(caught.value)
    assert not (tmp_path / "cache").exists()


def test_error_of_an_unknown_architecture(scale: Program) -> None:
    with pytest.raises(RuntimeError, match="invalid value for --gpu-architecture"):
        replace(scale, arch="sm_999").cubin()


def test_only_the_packages_headers_are_read(scale: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    (scale.source.parent / "beside.cuh").write_text("")
    monkeypatch.chdir(scale.source.parent)
    scale.source.write_text('#include "beside.cuh"\n' + SOURCE)
    with pytest.raises(RuntimeError, match=r"beside\.cuh"):
        scale.cubin()


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    with pytest.raises(RuntimeError, match="pip install cuda-bindings"):
        bindings.load("nvrtc")


# --- layout of the parameters ----------------------------------------------------------------------------------------


def with_fields(*fields: tuple[str, Any]) -> type[ctypes.Structure]:
    return type("Params", (ctypes.Structure,), {"_fields_": list(fields)})


POINTER, PEERS, ROWS, EPS = Params._fields_


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (with_fields(POINTER, PEERS, EPS, ROWS), "offset of rows is 28"),
        (with_fields(POINTER, ("peers", ctypes.c_void_p * 3), ROWS, EPS), "size of peers is 24"),
        (with_fields(POINTER, PEERS, ROWS, EPS, ("more", ctypes.c_int32)), "size in bytes is 40"),
        (with_fields(POINTER, PEERS, ROWS), "python_has_3_fields"),
        (with_fields(POINTER, PEERS, ROWS, ("epsilon", ctypes.c_float)), "epsilon"),
    ],
    ids=["order", "size", "one more", "one less", "name"],
)
def test_other_layout_in_python_does_not_compile(scale: Program, params: type[ctypes.Structure], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        replace(scale, params=params).cubin()


# --- cache -----------------------------------------------------------------------------------------------------------


def test_second_call_compiles_nothing(
    scale: Program, compilations: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = scale.cubin()
    assert scale.cubin() == first
    assert len(compilations) == 1
    forget(monkeypatch)
    assert scale.cubin() == first
    assert len(compilations) == 1
    assert [path.suffix for path in cached_files(tmp_path)] == [".cubin"]


CHANGES: dict[str, Callable[[Program, pytest.MonkeyPatch], Program]] = {
    "source": lambda scale, _: (scale.source.write_text(SOURCE + "\n"), scale)[1],
    "header": lambda scale, _: ((program.HEADERS / "scale.cuh").write_text(HEADER + "\n"), scale)[1],
    "new header": lambda scale, _: ((program.HEADERS / "other.cuh").write_text(""), scale)[1],
    "definition": lambda scale, _: replace(scale, defines=(("FACTOR", 5),)),
    "architecture": lambda scale, _: replace(scale, arch="sm_100a"),
    "NVRTC": lambda scale, patch: (
        patch.setattr(nvrtc, "nvrtcVersion", lambda: (nvrtc.nvrtcResult.NVRTC_SUCCESS, 99, 0)),
        scale,
    )[1],
}


@pytest.mark.parametrize("change", CHANGES)
def test_change_compiles_anew(
    scale: Program, compilations: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: str
) -> None:
    scale.cubin()
    CHANGES[change](scale, monkeypatch).cubin()
    assert len(compilations) == 2
    assert len(cached_files(tmp_path)) == 2


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[:-1], lambda data: b"", lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda data: data[:32]],
    ids=["truncated", "empty", "flipped bit", "checksum alone"],
)
def test_damaged_file_is_replaced(
    scale: Program,
    compilations: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    damage: Callable[[bytes], bytes],
) -> None:
    cubin = scale.cubin()
    (file,) = cached_files(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    forget(monkeypatch)
    assert scale.cubin() == cubin
    assert len(compilations) == 2
    assert file.read_bytes() == whole


@pytest.mark.parametrize("obstacle", ["a file is there", "the disk is full"])
def test_folder_that_cannot_be_written_costs_one_debug_line(
    scale: Program,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tw_log: pytest.LogCaptureFixture,
    obstacle: str,
) -> None:
    if obstacle == "a file is there":
        (tmp_path / "cache").write_text("")
    else:
        monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("No space left on device")))
    assert scale.cubin().startswith(b"\x7fELF")
    lines = [record for record in tw_log.records if "not kept on disk" in record.message]
    assert [line.levelname for line in lines] == ["DEBUG"]
    assert (tmp_path / "cache").is_file() or cached_files(tmp_path) == []


def test_cache_folder_is_the_users_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TW_COMPILE_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("TW_COMPILE_CACHE_DIR")
    assert cache_folder() == tmp_path / "xdg" / "tw_compile"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / "home" / ".cache" / "tw_compile"


def test_user_without_a_home_compiles_in_memory(scale: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TW_COMPILE_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert cache_folder() is None
    assert scale.cubin().startswith(b"\x7fELF")


CHILD = """
import ctypes, hashlib, sys
from pathlib import Path
from tw_compile.kernels.runtime import program

class Params(ctypes.Structure):
    _fields_ = [("out", ctypes.c_void_p), ("peers", ctypes.c_void_p * 2), ("rows", ctypes.c_int32), ("eps", ctypes.c_float)]

folder = Path(sys.argv[1])
program.HEADERS = folder / "headers"
scale = program.Program(folder / "scale.cu", Params, "sm_90a", (("FACTOR", 0x1234),))
print("ready", flush=True)
sys.stdin.readline()
print(hashlib.sha256(scale.cubin()).hexdigest())
"""


def test_two_processes_may_compile_at_once(scale: Program, compilations: list[Any], tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/") for _ in range(2)
    ]
    for child in children:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    digests = {child.communicate(timeout=60)[0].strip() for child in children}
    assert [path.suffix for path in cached_files(tmp_path)] == [".cubin"]
    assert digests == {hashlib.sha256(scale.cubin()).hexdigest()}
    assert compilations == []


# --- several at once --------------------------------------------------------------------------------------------------


def test_distinct_programs_are_compiled_once_each_and_at_the_same_time(
    scale: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits until the others have begun, so one after the other would never end."""
    variants = [replace(scale, defines=(("FACTOR", factor),)) for factor in (1, 2)]
    all_here = threading.Barrier(len(variants), timeout=60)
    real, compiled = nvrtc.nvrtcCompileProgram, []

    def meeting(*arguments: Any) -> Any:
        all_here.wait()
        compiled.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(nvrtc, "nvrtcCompileProgram", meeting)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    program.compile_all([*variants, *variants])
    assert len(compiled) == len(variants)
    assert len({one.cubin() for one in variants}) == len(compiled), "they are in memory, and differ"


def test_an_error_in_one_of_several_is_raised(scale: Program) -> None:
    with pytest.raises(RuntimeError, match=r"NVRTC, .*scale\.cu: NVRTC_ERROR_COMPILATION"):
        program.compile_all([scale, replace(scale, defines=())])


def test_one_program_is_left_to_who_needs_it(scale: Program, compilations: list[Any]) -> None:
    program.compile_all([scale, scale])
    assert compilations == []
