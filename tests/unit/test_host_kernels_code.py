"""host_words.cu and host_rows.cu compiled as the operator asks for them, for every architecture that they are for."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from machine_code import check_end, dump, resources
from machine_code import instructions as machine_instructions
from test_cuda_kernels import BF16, FP8, FP16, FP32, instructions, request, sass_accesses

from tw_compile.kernels.algorithms.host.host_rows import HostRows, shape_for, stage_budget
from tw_compile.kernels.algorithms.host.host_words import HostWords
from tw_compile.kernels.collective.spec import Request
from tw_compile.kernels.runtime.program import Program

CAPABILITIES = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
KIB = 1024
MOST_SHARED_BYTES = {(7, 5): 64 * KIB, (8, 0): 163 * KIB, (9, 0): 227 * KIB, (10, 0): 227 * KIB} | {
    capability: 99 * KIB for capability in ((8, 6), (8, 9), (12, 0))
}
"""The most that a CTA can have, by compute capability."""
KINDS = {"words": HostWords, "one_shot": lambda: HostRows(True), "two_shot": lambda: HostRows(False)}


def program_of(
    kind: str, asked: Request, world_size: int, patch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)
) -> Program:
    patch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    state: Any = SimpleNamespace(world_size=world_size, device=torch.device("cuda", 0), rank=0)
    return KINDS[kind]().program(asked, state, 0)


@pytest.mark.few(7)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compiles_for_every_architecture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: tuple[int, int], kind: str
) -> None:
    """Rows of two ranks stay in registers. The oldest devices have fewer conversions, also for float16."""
    program = program_of(kind, request(4096, cast=BF16, residual_out="replicated"), 2, monkeypatch, capability)
    assert resources(program.cubin(), tmp_path)["STACK"] <= 8
    of_fp16 = request(4096, dtype=FP16, residual_dtype=FP16, cast=FP16, residual_out="replicated")
    assert program_of(kind, of_fp16, 2, monkeypatch, capability).cubin()


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "form",
    [
        {"residual": False, "residual_out": "none"},
        {"residual_out": "replicated", "residual_dtype": BF16, "bias": True},
        {"dtype": FP16, "residual_dtype": FP16, "cast": FP16, "residual_out": "replicated"},
        {"dtype": FP32, "residual_out": "replicated"},
        {"hidden_dtype": FP8, "residual_out": "replicated", "residual_dtype": BF16},
    ],
    ids=lambda form: " ".join(str(value).removeprefix("torch.") for value in form.values()),
)
def test_every_form_compiles(monkeypatch: pytest.MonkeyPatch, form: dict[str, Any], kind: str) -> None:
    for world_size, capability in ((4, (8, 9)), (8, (9, 0))):
        program = program_of(kind, request(4096, **form), world_size, monkeypatch, capability)
        assert program.cubin().startswith(b"\x7fELF")


def test_words_are_read_and_written_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = request(4096, residual_out="replicated", residual_dtype=BF16)
    program = program_of("words", asked, 4, monkeypatch)
    accesses = sass_accesses(dump(program.cubin(), tmp_path, "-sass"))
    assert {access for access in accesses if "STRONG.SYS" in access} == {"LDG.E.128.STRONG.SYS", "STG.E.128.STRONG.SYS"}
    of_words = [name for name in instructions(program.ptx()) if "sys" in name]
    assert set(of_words) == {"ld.relaxed.sys.global.v2.b64", "st.relaxed.sys.global.v2.b64"}
    assert not re.search("fence|membar", program.ptx()), "nothing waits for memory"


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_words_wait_for_no_memory_at_their_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: tuple[int, int]
) -> None:
    asked = request(4096, residual_out="replicated", residual_dtype=BF16)
    check_end(machine_instructions(program_of("words", asked, 2, monkeypatch, capability).cubin(), tmp_path))


@pytest.mark.parametrize("kind", ["one_shot", "two_shot"])
def test_rows_are_announced_behind_a_fence_and_heard_by_acquires(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    found = instructions(program_of(kind, request(4096, residual_out="replicated"), 2, monkeypatch).ptx())
    assert found.count("fence.acq_rel.sys") == 1
    announced = found.index("st.relaxed.sys.global.v4.b32")
    assert found.index("fence.acq_rel.sys") < announced
    assert "ld.acquire.sys.global.b32" in found
    assert {"ld.acquire.cta.shared.b32", "st.release.cta.shared.b32"} <= set(found)
    assert "cp.async.cg.shared.global" in found and "cp.async.wait_group" in found


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("one_shot", [True, False])
@pytest.mark.parametrize("hidden_size", [1024, 2880, 4096, 8192, 32768])
def test_shapes_keep_ranks_from_waiting_for_each_other(hidden_size: int, one_shot: bool, world_size: int) -> None:
    for capability in CAPABILITIES:
        budget = stage_budget(capability)
        shape = shape_for(request(hidden_size), world_size, one_shot, budget)
        assert shape.ring > shape.ahead >= max(shape.depth, 1)
        assert shape.depth == 0 or shape.stage_bytes <= budget
        assert shape.shared_bytes <= MOST_SHARED_BYTES[capability]
        assert one_shot or shape.result_ring > shape.behind > shape.depth
        assert (
            shape.block <= 1024 and shape.threads * shape.groups * 8 <= max(hidden_size * shape.groups, 512 * 8) + 256
        )


@pytest.mark.parametrize(
    ("world_size", "hidden_size", "one_shot", "wire", "groups", "depth", "ahead", "behind"),
    [
        (2, 4096, True, "exact", 2, 1, 4, 0),
        (2, 8192, True, "exact", 1, 1, 4, 0),
        (2, 8192, False, "exact", 1, 1, 5, 4),
        (2, 8192, False, "int8", 1, 1, 4, 4),
        (4, 4096, False, "exact", 1, 2, 6, 5),
        (4, 4096, False, "int8", 1, 1, 4, 4),
        (4, 8192, False, "exact", 1, 1, 2, 3),
        (4, 8192, False, "int8", 1, 1, 4, 4),
    ],
)
def test_shapes_that_were_fastest(
    world_size: int, hidden_size: int, one_shot: bool, wire: str, groups: int, depth: int, ahead: int, behind: int
) -> None:
    """Of all that were forced on two and four H100. Threads of small GPUs can't load to shared memory asynchronously."""
    for capability in ((7, 5), (8, 9), (9, 0)):
        asked = replace(request(hidden_size), wire=wire)
        shape = shape_for(asked, world_size, one_shot, stage_budget(capability))
        assert (shape.groups, shape.ahead, shape.behind) == (groups, ahead, behind)
        assert shape.depth == (0 if capability == (7, 5) else depth)


@pytest.mark.few(4)
@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_rows_of_more_ranks_stay_in_registers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: tuple[int, int], world_size: int
) -> None:
    program = program_of("two_shot", request(4096, cast=BF16, residual_dtype=BF16), world_size, monkeypatch, capability)
    assert resources(program.cubin(), tmp_path)["STACK"] <= 8
