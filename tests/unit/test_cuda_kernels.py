"""CUDA kernels compiled as the operator asks for them: no GPU, but all that can be read from machine code."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from machine_code import check_end, dump
from machine_code import instructions as machine_instructions

from tw_compile.kernels.algorithms.barrier_kernel import BarrierKernel
from tw_compile.kernels.algorithms.multimem.multimem import Multimem
from tw_compile.kernels.algorithms.push.push import Push
from tw_compile.kernels.algorithms.stream.stream import Stream
from tw_compile.kernels.collective.fields import RMS_NORM
from tw_compile.kernels.collective.spec import NormSpec, Request, ResidualOut
from tw_compile.kernels.runtime.program import Program

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
HOPPER, BLACKWELL = (9, 0), (10, 0)
BEFORE_HOPPER = ((7, 5), (8, 0), (8, 6), (8, 9))
OLDEST_AND_FLOAT8 = ((7, 5), (8, 9))
"""For tests of many cases: no source asks for more than 7.5 and, for float8, 8.9."""
HIDDEN_SIZES = (1024, 2880, 4096, 5120, 7168, 8192, 18432)
MULTIMEM = ("multimem", "multimem_in_slot")
WITH_BARRIERS: dict[str, Callable[[], BarrierKernel]] = {
    "stream": Stream,
    "multimem": Multimem,
    "emulated_multimem": partial(Multimem, emulated=True),
}
PUSHES = {
    "one_shot": Push(True),
    "one_shot_clusters": Push(True, cluster=4),
    "one_shot_pairs": Push(True, cluster=2),
    "two_shot": Push(False),
    "two_shot_clusters": Push(False, cluster=4),
    "two_shot_pairs": Push(False, cluster=2),
}
KINDS = (*PUSHES, "stream", "stream_in_slot", *MULTIMEM, "emulated_multimem")
MOST_STACK_BYTES = 128
"""Of rows up to 8192: a few addresses, where a CTA of 1024 threads leaves 64 registers to each. Rows would need far more."""
FORMS_OF_CALLS = pytest.mark.parametrize(
    "form",
    [
        {"residual": False},
        {"residual_out": "none"},
        {"residual_out": "replicated", "residual_dtype": BF16, "bias": True},
        {"dtype": FP16, "residual_dtype": FP16, "cast": FP16, "residual_out": "replicated"},
        {"dtype": FP32, "bias": True},
        {"dtype": FP32, "residual_out": "replicated"},
        {"hidden_dtype": FP8},
        {"hidden_dtype": FP8, "residual_out": "replicated", "residual_dtype": BF16},
        {"epilogue": "layer_norm"},
        {"epilogue": "layer_norm", "norm_bias": True},
        {"dtype": FP32, "epilogue": "layer_norm", "norm_bias": True, "residual_out": "replicated"},
    ],
    ids=lambda form: " ".join(str(value).removeprefix("torch.") for value in form.values()),
)


def request(
    hidden_size: int,
    dtype: torch.dtype = BF16,
    *,
    residual: bool = True,
    residual_out: ResidualOut = "sharded",
    residual_dtype: torch.dtype = FP32,
    bias: bool = False,
    cast: torch.dtype | None = None,
    hidden_dtype: torch.dtype | None = None,
    epilogue: str = RMS_NORM,
    norm_bias: bool = False,
) -> Request:
    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    norm = NormSpec(1e-5, 0.0, cast, hidden_dtype or dtype, residual_dtype, epilogue=epilogue)
    return Request(
        empty(16, hidden_size, dtype=dtype),
        empty(16, hidden_size, dtype=residual_dtype) if residual else None,
        empty(hidden_size, dtype=dtype) if bias else None,
        empty(hidden_size, dtype=dtype),
        norm,
        residual and residual_out == "sharded",
        residual_out,
        "",
        0,
        empty(1, dtype=FP32) if hidden_dtype == FP8 else None,
        norm_bias=empty(hidden_size, dtype=dtype) if norm_bias else None,
    )


def program_of(
    kind: str,
    asked: Request,
    world_size: int,
    patch: pytest.MonkeyPatch,
    *,
    capability: tuple[int, int] = HOPPER,
    staged: bool = True,
) -> Program:
    """What the algorithm loads for the request; an in-slot result is not copied back, nor is in-slot ``x`` staged."""
    patch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    state: Any = SimpleNamespace(world_size=world_size, device=torch.device("cuda", 0), rank=0, multimem=True)
    if kind.startswith("one_shot"):
        whole: dict[str, Any] = {"residual_sharded": False}
        if asked.residual_out == "sharded":
            whole["residual_out"] = "replicated"
        asked = replace_fields(asked, **whole)
    if kind in PUSHES:
        return PUSHES[kind].program(asked, state, 0)
    algorithm = WITH_BARRIERS[kind.removesuffix("_in_slot")]()
    asked = replace_fields(asked, results_in_slot=kind.endswith("_in_slot"))
    assert algorithm.obstacle(asked, state) is None
    return algorithm.program(asked, state, 0, staged)


def replace_fields(asked: Request, **fields: Any) -> Request:
    return Request(**{**asked.__dict__, **fields})


def stack_bytes(cubin: bytes, folder: Path) -> int:
    found = re.search(r"STACK:(\d+)", dump(cubin, folder, "-res-usage"))
    assert found
    return int(found[1])


# --- everything compiles ---------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("hidden_size", HIDDEN_SIZES)
def test_rows_stay_in_registers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hidden_size: int, world_size: int
) -> None:
    """For sm_90a; rows of 18432 take three vectors a thread of the largest CTA, and push spills with 4 or more ranks."""
    for kind in KINDS:
        cubin = program_of(kind, request(hidden_size, cast=BF16), world_size, monkeypatch).cubin()
        if hidden_size <= 8192:
            assert stack_bytes(cubin, tmp_path) <= (0 if kind in MULTIMEM else MOST_STACK_BYTES), kind


@pytest.mark.full
@pytest.mark.parametrize("hidden_size", HIDDEN_SIZES)
def test_forms_of_models_compile_for_sm_100(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hidden_size: int) -> None:
    for kind in KINDS:
        cubin = program_of(kind, request(hidden_size, cast=BF16), 8, monkeypatch, capability=BLACKWELL).cubin()
        if hidden_size <= 8192:
            assert stack_bytes(cubin, tmp_path) <= (0 if kind in MULTIMEM else MOST_STACK_BYTES), kind


@pytest.mark.few(4)
@pytest.mark.parametrize("capability", OLDEST_AND_FLOAT8)
@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("hidden_size", [2880, 4096, 8192])
def test_rows_of_push_stay_in_registers_before_hopper(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hidden_size: int, world_size: int, capability: tuple[int, int]
) -> None:
    """Of the largest CTAs, too: 1024 threads have 64 registers each. Rows of 8192 of eight ranks spill as on Hopper."""
    for kind in ("one_shot", "two_shot"):
        program = program_of(kind, request(hidden_size, cast=BF16), world_size, monkeypatch, capability=capability)
        spills = hidden_size == 8192 and world_size == 8
        assert stack_bytes(program.cubin(), tmp_path) <= (48 if spills else 0), kind


@pytest.mark.few(8)
@pytest.mark.parametrize("capability", OLDEST_AND_FLOAT8)
@pytest.mark.parametrize("kind", ["one_shot", "two_shot"])
@FORMS_OF_CALLS
def test_every_form_of_push_compiles_before_hopper(
    monkeypatch: pytest.MonkeyPatch, form: dict[str, Any], kind: str, capability: tuple[int, int]
) -> None:
    asked = request(4096, **form)
    state: Any = SimpleNamespace(world_size=4, device=torch.device("cuda", 0), rank=0)
    program = program_of(kind, asked, 4, monkeypatch, capability=capability)
    if asked.norm.hidden_dtype == FP8 and capability < (8, 9):
        assert "needs compute capability 8.9" in str(PUSHES["two_shot"].obstacle(asked, state))
    else:
        assert PUSHES["two_shot"].obstacle(asked, state) is None
        assert program.cubin().startswith(b"\x7fELF")


@pytest.mark.few(21)
@pytest.mark.parametrize("capability", [HOPPER, pytest.param(BLACKWELL, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", KINDS)
@FORMS_OF_CALLS
def test_every_form_compiles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, form: dict[str, Any], kind: str, capability: tuple[int, int]
) -> None:
    cubin = program_of(kind, request(4096, **form), 4, monkeypatch, capability=capability, staged=False).cubin()
    assert cubin.startswith(b"\x7fELF")
    if kind in MULTIMEM:
        assert stack_bytes(cubin, tmp_path) == 0


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", KINDS)
def test_spin_limits_compile(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    program = program_of(kind, request(1024), 8, monkeypatch)
    limited = Program(program.source, program.params, program.arch, (*program.defines, ("SPIN_LIMIT", 2**31 - 1)))
    assert limited.cubin() != program.cubin()


# --- instructions ----------------------------------------------------------------------------------------------------


def sass_accesses(sass: str) -> set[str]:
    """Accesses to global memory and bulk copies, without their operands."""
    return set(re.findall(r"(?<![.\w])((?:LDG|STG|LD|ST|UBLKCP|ATOMG?|REDG?)\.[\w.]+)", sass))


@pytest.mark.parametrize("capability", [*BEFORE_HOPPER, HOPPER, BLACKWELL])
@pytest.mark.parametrize("kind", ["one_shot", "two_shot"])
def test_push_moves_rows_in_strong_16_byte_accesses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, capability: tuple[int, int]
) -> None:
    asked = request(4096, residual_out="replicated", residual_dtype=BF16)
    sass = dump(program_of(kind, asked, 4, monkeypatch, capability=capability).cubin(), tmp_path, "-sass")
    accesses = sass_accesses(sass)
    strong = {access for access in accesses if "STRONG.SYS" in access}
    assert strong == {"LDG.E.128.STRONG.SYS", "STG.E.128.STRONG.SYS"}
    # What is narrower is the state of the inbox, and addresses.
    adds = "REDG" if capability >= HOPPER else "RED"
    rest = {access.removesuffix(".SYS") for access in accesses - strong}  # as Turing's ordinary accesses are called
    assert rest == {"LDG.E.128", "STG.E.128", "LDG.E.64", "STG.E", f"{adds}.E.ADD.STRONG.GPU"}
    assert not re.search(r"MEMBAR|CCTL|ERRBAR|\bATOM", sass), "waits for memory"


@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL])
@pytest.mark.parametrize("kind", ["stream", "stream_in_slot"])
def test_stream_moves_rows_in_bulk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, capability: tuple[int, int]
) -> None:
    program = program_of(kind, request(4096), 4, monkeypatch, capability=capability)
    accesses = sass_accesses(dump(program.cubin(), tmp_path, "-sass"))
    assert {"UBLKCP.S.G", "UBLKCP.G.S"} <= accesses
    # Flags alone are strong; the epoch and addresses are narrow.
    assert {access for access in accesses if "STRONG" in access} == {"LDG.E.STRONG.SYS", "STG.E.STRONG.SYS"}
    rest = {"LDG.E.128", "STG.E.128", "LDG.E.64", "LDG.E", "STG.E"}
    assert {access for access in accesses if "STRONG" not in access and "UBLKCP" not in access} <= rest


def instructions(ptx: str) -> list[str]:
    """Memory instructions, fences and barriers in their order in the text, without operands and predicates."""
    names = "ld|st|atom|red|fence|barrier|mbarrier|cp|griddepcontrol|bar|multimem"
    return re.findall(rf"^\s*(?:@!?%\w+\s+)?((?:{names})\.[\w.:]+)", ptx, re.MULTILINE)


def test_push_needs_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    found = instructions(program_of("two_shot", request(4096), 4, monkeypatch).ptx())
    rows = [name for name in found if "sys" in name]
    assert set(rows) == {"ld.relaxed.sys.global.v4.b32", "st.relaxed.sys.global.v4.b32"}
    assert [name for name in found if name.startswith(("atom", "red", "fence"))] == [MOVED_ON]
    begin = found.index("griddepcontrol.wait")
    assert not any(name.startswith(("ld.global", "st.global", "ld.relaxed", "st.relaxed")) for name in found[:begin])
    # A CTA moves the state on when its threads have loaded it. Plain stores between these are the rest of the state.
    between = found[found.index(BARRIER_WITH) + 1 : found.index(MOVED_ON)]
    assert set(between) <= {"st.global.u32"}


@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL])
@pytest.mark.parametrize("kind", PUSHES)
def test_push_waits_for_no_memory_at_its_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, capability: tuple[int, int]
) -> None:
    """The next kernel waits for this one's end, so a memory barrier or an atomic's answer there would take its time."""
    code = machine_instructions(
        program_of(kind, request(8192), 4, monkeypatch, capability=capability).cubin(), tmp_path
    )
    check_end(code)


def test_ctas_of_a_cluster_wait_for_no_store_to_peers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A release before the cluster's sum would wait until what was sent to the peers has arrived."""
    programs = [program_of(kind, request(8192), 4, monkeypatch) for kind in ("one_shot", "one_shot_clusters")]
    found = instructions(programs[1].ptx())
    assert "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32" in found
    assert [name for name in found if name.startswith("barrier.cluster")] == [
        "barrier.cluster.arrive.relaxed.aligned",
        "barrier.cluster.wait.acquire.aligned",
    ]
    assert [name for name in found if name.startswith("fence")] == ["fence.mbarrier_init.release.cluster"]
    assert not any("MEMBAR" in dump(program.cubin(), tmp_path, "-sass") for program in programs)


@pytest.mark.parametrize("hidden_size", [4096, 5120, 8192])
@pytest.mark.parametrize("kind", ["one_shot", "one_shot_clusters", "one_shot_pairs"])
def test_layer_norm_has_few_instructions_more_than_rms_norm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, hidden_size: int
) -> None:
    """Short calls wait for all of them. Of shuffles, which take turns on an SM, there are 12 instead of 5."""
    found = []
    for epilogue in (RMS_NORM, "layer_norm"):
        asked = request(hidden_size, residual_dtype=BF16, epilogue=epilogue, norm_bias=True)
        lines = dump(program_of(kind, asked, 2, monkeypatch).cubin(), tmp_path, "-sass").splitlines()
        # What lies behind the kernel's last EXIT is for warps whose lanes are apart, and for divisions of odd numbers.
        whole = "\n".join(lines[: max(n for n, line in enumerate(lines) if re.search(r"\s EXIT", line))])
        found.append((len(re.findall(r"^\s+/\*[0-9a-f]{4}\*/", whole, re.MULTILINE)), whole))
    (rms_norm, _), (layer_norm, code) = found
    assert layer_norm <= rms_norm + 64
    assert code.count("SHFL") <= 13 and "MUFU.RCP" not in code


MOVED_ON, BARRIER_WITH = "red.relaxed.gpu.global.add.u32", "barrier.red.or.aligned.pred"
FENCE, FENCE_SHARED, BARRIER = "fence.proxy.async", "fence.proxy.async.shared::cta", "barrier.sync.aligned"
MEETING = [BARRIER, "st.release.sys.global.b32", "ld.acquire.sys.global.b32", BARRIER]
BULK_LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
BULK_STORE, BULK_COMMIT = "cp.async.bulk.global.shared::cta.bulk_group", "cp.async.bulk.commit_group"
BULK_WAIT, BULK_WAIT_READ = "cp.async.bulk.wait_group", "cp.async.bulk.wait_group.read"


@pytest.mark.parametrize("kind", ["stream", "stream_in_slot"])
def test_stream_releases_acquires_and_fences(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The order of the text, which follows the source; repeated copies are left out."""
    asked = request(4096, residual_out="replicated", residual_dtype=BF16)
    found = instructions(program_of(kind, asked, 4, monkeypatch).ptx())
    ordering = [
        name for name in found if name.startswith(("fence", "cp", "barrier", "griddepcontrol")) or "sys" in name
    ]
    once = [name for name, before in zip(ordering, ["", *ordering], strict=False) if name != before or name == FENCE]
    begin, end = (
        ["fence.mbarrier_init.release.cluster", "griddepcontrol.wait"],
        [*MEETING, "griddepcontrol.launch_dependents"],
    )
    copied = [FENCE, *[BULK_WAIT_READ, BULK_LOAD] * 2, BULK_STORE, BULK_COMMIT, BULK_WAIT]  # the loop is peeled once
    # MEETING ends with the barrier of the sum, too.
    summed = [FENCE_SHARED, FENCE, BULK_LOAD]
    published = [BULK_STORE, BULK_COMMIT, BULK_WAIT_READ, BULK_WAIT, FENCE]
    whole = [*begin, BARRIER, *copied, FENCE, *MEETING, *summed, *published, *end]
    assert once == whole + ([] if kind == "stream_in_slot" else copied * 2)


SUM = "multimem.ld_reduce.relaxed.sys.global.add."
SUMS = {BF16: "acc::f32.v4.bf16x2", FP16: "acc::f32.v4.f16x2", FP32: "v4.f32"}
PUBLISH, FENCE_ALIAS = "multimem.st.relaxed.sys.global.v4.f32", "fence.proxy.alias"
LOADED_SUM = {BF16: "BF16x8", FP16: "F16x8", FP32: "F32x4"}


@pytest.mark.few(4)
@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL])
@pytest.mark.parametrize("kind", MULTIMEM)
@pytest.mark.parametrize("dtype", SUMS)
@pytest.mark.parametrize("hidden_dtype", [None, FP8])
def test_multimem_moves_rows_by_the_switch_in_16_byte_accesses(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kind: str,
    dtype: torch.dtype,
    hidden_dtype: torch.dtype | None,
    capability: tuple[int, int],
) -> None:
    asked = request(8192, dtype, residual_out="replicated", residual_dtype=BF16, hidden_dtype=hidden_dtype)
    program = program_of(kind, asked, 8, monkeypatch, capability=capability, staged=False)
    depth, vectors = int(dict(program.defines)["DEPTH"]), 2  # rows on their way, and parts of eight elements a thread
    sums = 2 * depth * vectors * dtype.itemsize // 2  # before the loop, and in it
    results = depth * vectors * (1 if hidden_dtype == FP8 else dtype.itemsize // 2)  # two threads put theirs together
    found = [name for name in instructions(program.ptx()) if name.startswith("multimem")]
    assert [name for name in found if name.startswith(SUM)] == [SUM + SUMS[dtype]] * sums
    assert [name for name in found if not name.startswith(SUM)] == [PUBLISH] * (results + depth * vectors)

    sass = dump(program.cubin(), tmp_path, "-sass")
    loads = re.findall(r"\bLDGMC[\w.]*", sass)
    assert len(loads) == sums
    assert {LOADED_SUM[dtype] in load and load.endswith("RN.STRONG.SYS") for load in loads} == {True}
    if dtype != FP32:  # 16-bit elements are added in float32, as the one compiler and the other calls it
        assert {"F32ADD" in load or "HPADD" in load for load in loads} == {True}
    accesses = sass_accesses(sass)
    # Flags are the only strong accesses of 4 bytes, and what is published has 16.
    strong = {"STG.E.128.STRONG.SYS", "STG.E.STRONG.SYS", "LDG.E.STRONG.SYS"}
    assert {access for access in accesses if "STRONG" in access} == strong
    assert not re.search(r"\b(LDL|STL)\b", sass)


@pytest.mark.parametrize("hidden_dtype", [None, FP8])
@pytest.mark.parametrize("kind", MULTIMEM)
def test_multimem_releases_acquires_and_fences_aliases(
    monkeypatch: pytest.MonkeyPatch, kind: str, hidden_dtype: torch.dtype | None
) -> None:
    """The order of the text, which follows the source: the switch is used between the two fences alone."""
    asked = request(8192, residual_out="replicated", residual_dtype=BF16, hidden_dtype=hidden_dtype)
    program = program_of(kind, asked, 8, monkeypatch)
    found = instructions(program.ptx())
    ordering = [
        name for name in found if name.startswith(("fence", "barrier", "griddepcontrol", "multimem")) or "sys" in name
    ]
    once = [name for name, before in zip(ordering, ["", *ordering], strict=False) if name != before]
    # Sums of the next row are on their way before threads wait for each other, and for each other only.
    row = [SUM + SUMS[BF16], BARRIER, PUBLISH]
    rows = row * int(dict(program.defines)["DEPTH"])
    end = [*MEETING, "griddepcontrol.launch_dependents"]
    assert once == ["griddepcontrol.wait", *MEETING, FENCE_ALIAS, *rows, FENCE_ALIAS, *end]

    first, last = (index for index, name in enumerate(found) if name == FENCE_ALIAS)
    narrow = [name for name in found[first:last] if name.startswith(("ld.global", "st.global")) and ".v" not in name]
    # Multicast addresses, and the scale; rows are touched in whole vectors, of local tensors alone.
    assert set(narrow) <= {"ld.global.u64", "ld.global.f32"}
    if kind == "multimem_in_slot":
        assert not any(name.startswith("st.global") for name in found[first:last])


def test_emulated_multimem_has_no_instruction_of_multicast(monkeypatch: pytest.MonkeyPatch) -> None:
    found = instructions(
        program_of("emulated_multimem", request(4096, residual_out="replicated"), 4, monkeypatch).ptx()
    )
    assert not any(name.startswith("multimem") for name in found)
    strong = {name for name in found if "relaxed.sys" in name}
    assert strong == {"ld.relaxed.sys.global.v4.b32", "st.relaxed.sys.global.v4.b32"}


@pytest.mark.parametrize("kind", ["one_shot", "two_shot", "stream", "stream_in_slot"])
def test_nothing_else_uses_multicast(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    assert "multimem" not in program_of(kind, request(4096), 4, monkeypatch).ptx().replace("multimem.cu", "")
