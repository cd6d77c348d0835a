"""push.cu and host_rows.cu with wires, compiled for every architecture that they are for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from machine_code import dump, instructions, resources
from test_cuda_kernels import BEFORE_HOPPER, BF16, FP8, FP16, FP32, request, sass_accesses

from tw_compile.kernels.algorithms.host.host_rows import HostRows, shape_for, stage_budget
from tw_compile.kernels.algorithms.push.push import Push, threads_for
from tw_compile.kernels.collective.spec import Request
from tw_compile.kernels.collective.wires import EXACT, WIRES
from tw_compile.kernels.runtime.program import Program

CAPABILITIES = (*BEFORE_HOPPER, (9, 0), (10, 0), (12, 0))
IN_CODES = [name for name in WIRES if name != EXACT]
KERNELS = {"push": lambda: Push(False), "host_rows": lambda: HostRows(False)}


def program_of(
    kind: str, asked: Request, world_size: int, capability: tuple[int, int], patch: pytest.MonkeyPatch
) -> Program:
    patch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    state: Any = SimpleNamespace(world_size=world_size, device=torch.device("cuda", 0), rank=0)
    return KERNELS[kind]().program(asked, state, 0)


def on(wire: str, asked: Request) -> Request:
    return replace(asked, wire=wire)


@pytest.mark.few(10)
@pytest.mark.parametrize("wire", IN_CODES)
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("kind", KERNELS)
def test_compiles_for_every_architecture_without_local_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, capability: tuple[int, int], wire: str
) -> None:
    """Rows of two ranks stay in registers, with as many threads of a CTA as there can be."""
    asked = on(wire, request(8192, cast=BF16, residual_out="sharded"))
    used = resources(program_of(kind, asked, 2, capability, monkeypatch).cubin(), tmp_path)
    assert used["LOCAL"] == 0 and used["STACK"] == 0
    assert kind == "host_rows" or (threads_for(8192, 2) == 1024 and used["REG"] <= 64)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", KERNELS)
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
    """Of 640 columns the last warp of the threads has half of its vectors."""
    for wire, world_size, hidden_size in (("int8", 4, 4096), ("int6", 8, 4096), ("int4", 3, 640)):
        program = program_of(kind, on(wire, request(hidden_size, **form)), world_size, (9, 0), monkeypatch)
        assert program.cubin().startswith(b"\x7fELF")


def test_one_shot_has_no_wires(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = on("int8", replace(request(4096), residual_sharded=False, residual_out="replicated"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    state: Any = SimpleNamespace(world_size=2, device=torch.device("cuda", 0), rank=0)
    for algorithm in (Push(True), HostRows(True)):
        assert "not as int8" in str(algorithm.obstacle(asked, state))
        with pytest.raises(RuntimeError, match="only owners of rows read codes"):
            algorithm.program(asked, state, 0).cubin()


def test_words_in_codes_are_read_and_written_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = on("int6", request(4096, residual_out="sharded"))
    accesses = sass_accesses(dump(program_of("push", asked, 2, (9, 0), monkeypatch).cubin(), tmp_path, "-sass"))
    strong = {access for access in accesses if "STRONG.SYS" in access}
    kinds = ("LDG.E.64", "LDG.E", "STG.E.64", "STG.E")  # of eight columns in 8 and in 4 bits, and of their words
    assert strong == {f"{kind}.STRONG.SYS" for kind in kinds}


@pytest.mark.parametrize(("hidden_size", "world_size", "most"), [(4096, 2, 1480), (8192, 2, 1570), (4096, 4, 2100)])
def test_host_rows_have_few_instructions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hidden_size: int, world_size: int, most: int
) -> None:
    """They limit calls on few SMs. At most two values lie in local memory."""
    asked = replace(on("int8", request(hidden_size, cast=BF16, residual_out="sharded")), overlap_sms=8)
    cubin = program_of("host_rows", asked, world_size, (9, 0), monkeypatch).cubin()
    assert resources(cubin, tmp_path)["STACK"] <= 8
    assert len(instructions(cubin, tmp_path)) <= most


@pytest.mark.parametrize("hidden_size", [2048, 4096, 8192])
def test_codes_need_less_memory(hidden_size: int) -> None:
    """Of inboxes and of rings; a row in codes is its bytes, rounded up to 32."""
    asked = request(hidden_size, residual_out="sharded")
    exact = Push(False).needs(asked, 2)["inbox"]
    for wire, share in (("int8", 0.53), ("int6", 0.43), ("int4", 0.34)):
        assert Push(False).needs(on(wire, asked), 2)["inbox"] < share * exact
        for capability in CAPABILITIES:
            shape = shape_for(on(wire, asked), 2, False, stage_budget(capability))
            assert shape.ring > shape.ahead >= max(shape.depth, 1)
            assert shape.depth == 0 or shape.shared_bytes <= stage_budget(capability)
            assert shape.result_ring > shape.behind > shape.depth
