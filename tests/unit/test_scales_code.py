"""Kernels that make the scales of float8 results, compiled for every architecture that they are for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from machine_code import resources
from test_cuda_kernels import BF16, BLACKWELL, FP8, FP32, HOPPER, request

from tw_compile.kernels.algorithms.host.host_rows import HostRows
from tw_compile.kernels.algorithms.host.host_words import HostWords
from tw_compile.kernels.algorithms.multimem.multimem import Multimem
from tw_compile.kernels.algorithms.push.push import Push
from tw_compile.kernels.algorithms.stream.stream import Stream
from tw_compile.kernels.algorithms.two_shot.two_shot import TwoShot
from tw_compile.kernels.collective.algorithm import Algorithm
from tw_compile.kernels.collective.cuda_variant import MAKES_NO_SCALES
from tw_compile.kernels.collective.spec import Request
from tw_compile.kernels.runtime.program import Program

KERNELS: dict[str, tuple[Callable[[], Any], tuple[tuple[int, int], ...]]] = {
    "push_one_shot": (lambda: Push(True), ((8, 9), HOPPER, (12, 0))),
    "push_two_shot": (lambda: Push(False), ((8, 9), HOPPER, BLACKWELL, (12, 0))),
    "stream": (Stream, (HOPPER, BLACKWELL)),
    "host_words": (HostWords, ((8, 9), HOPPER)),
    "host_one_shot": (lambda: HostRows(True), ((8, 9), HOPPER)),
    "host_two_shot": (lambda: HostRows(False), ((8, 9), HOPPER, (12, 0))),
}
MOST_STACK = dict.fromkeys(KERNELS, 64) | {"push_one_shot": 0, "push_two_shot": 0, "stream": 104}
"""Bytes of a thread, around the subroutine that a rounded division is."""
STATE: Any = SimpleNamespace(multimem=True, world_size=2, device=torch.device("cuda", 0), rank=0)


def asked(columns: int, **form: Any) -> Request:
    made = request(8192, hidden_dtype=FP8, **form)
    norm = replace(made.norm, scale_columns=columns, min_scale=1e-10 / 448, divides_by_scale=True)
    return replace(made, norm=norm, hidden_scale=None)


def program_of(kernel: str, given: Request, capability: tuple[int, int], patch: pytest.MonkeyPatch) -> Program:
    patch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    algorithm = KERNELS[kernel][0]()
    assert algorithm._row_obstacle(given) is None if hasattr(algorithm, "_row_obstacle") else True
    rest = (True,) if isinstance(algorithm, Stream) else ()
    program: Program = algorithm.program(given, STATE, 0, *rest)
    return program


@pytest.mark.few(8)
@pytest.mark.parametrize("columns", [128, 8192])
@pytest.mark.parametrize(
    ("kernel", "capability"), [(name, capability) for name, (_, all_of) in KERNELS.items() for capability in all_of]
)
def test_compiles_with_little_memory_of_threads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernel: str, capability: tuple[int, int], columns: int
) -> None:
    given = asked(columns, cast=BF16, residual_out="sharded", residual_dtype=FP32)
    if kernel in ("push_one_shot", "host_words", "host_one_shot"):
        given = replace(given, residual_sharded=False, residual_out="replicated")
    used = resources(program_of(kernel, given, capability, monkeypatch).cubin(), tmp_path)
    assert used["LOCAL"] == 0 and used["STACK"] <= MOST_STACK[kernel]
    assert not kernel.startswith("push") or used["REG"] <= 64


def test_other_kernels_say_that_they_make_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: HOPPER)
    others: tuple[Algorithm, ...] = (TwoShot(), Multimem())
    for algorithm in others:
        assert algorithm.obstacle(asked(128), STATE) == MAKES_NO_SCALES
