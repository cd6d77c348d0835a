"""The programs that are compiled at the same time before kernels are loaded are those that are loaded then."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tw_compile.kernels.algorithms import ALGORITHMS
from tw_compile.kernels.collective.slot import GroupState
from tw_compile.kernels.collective.spec import NormSpec, Request
from tw_compile.kernels.transports import slot_transport
from tw_compile.kernels.transports.slot_transport import SlotTransport

BF16 = torch.bfloat16
NORM = NormSpec(1e-5, 0.0, None, BF16, torch.float32)
CHANGES: list[dict[str, Any]] = [
    {},
    {"residual_sharded": True, "residual": torch.zeros(2, 4096)},
    {"overlap_sms": 8},
    {"prefetch": [torch.zeros(4096)], "prefetch_bytes": 4096},
    {"wire": "int8"},
    {"norm": replace(NORM, hidden_dtype=torch.float8_e4m3fn, scale_columns=128)},
]
CUDA = [entry for entry in ALGORITHMS if not entry.factory.endswith(":TwoShot")]  # that one is Triton's


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows by each program that is loaded. The device is a Hopper GPU."""
    programs: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    for module in ("row_kernel", "barrier_kernel"):
        monkeypatch.setattr(
            f"tw_compile.kernels.algorithms.{module}.prepare", lambda program, index: programs.append(program)
        )
    return programs


def request(**changes: Any) -> Request:
    x = torch.zeros(4, 4096, dtype=BF16)
    residual, weight = torch.zeros(4, 4096), torch.ones(4096, dtype=BF16)
    return replace(Request(x, residual, None, weight, NORM, False, "sharded", "", 0), **changes)


def state() -> Any:
    return SimpleNamespace(world_size=2, device=torch.device("cuda", 0), rank=0, multimem=True)


@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: "+".join(changes) or "plain")
@pytest.mark.parametrize("entry", CUDA, ids=lambda entry: entry.name)
def test_all_that_is_loaded_is_known_before(entry: Any, changes: dict[str, Any], loaded: list[Any]) -> None:
    algorithm, asked = entry.make(), request(**changes)
    ahead = algorithm.programs(asked, state(), 0)
    algorithm.prepare(asked, state(), 0)
    assert set(ahead) == set(loaded)
    if algorithm.obstacle(asked, state()) is None:
        assert loaded, "what this kernel serves"
    else:
        assert changes or entry.feeds, "all others serve the plain form"


def test_a_transport_compiles_all_before_it_loads_the_first(monkeypatch: pytest.MonkeyPatch, loaded: list[Any]) -> None:
    steps: list[str] = []
    monkeypatch.setattr(slot_transport, "compile_all", lambda programs: steps.append(f"compile {len(list(programs))}"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    first, second = ALGORITHMS["push_one_shot"].make(), ALGORITHMS["push_two_shot"].make()
    for algorithm in (first, second):
        monkeypatch.setattr(algorithm, "prepare", lambda *given: steps.append("load"))
    transport: Any = SimpleNamespace(spin_limit=0)
    of_group: GroupState = state()
    SlotTransport._load(transport, (first, second), request(), of_group)
    assert steps == ["compile 6", "load", "load"]
