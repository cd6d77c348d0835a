"""What one rank measures must not decide which bits it computes: other ranks compute the same GEMM, as that of a router."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tw_compile import agree
from tw_compile.autotune import measured_reserve as reserve
from tw_compile.autotune import turns

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A group with a store. ``agree.forget()`` makes this process the next rank."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(turns, "has_instructions", lambda device: True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ranks_take_the_same_kernels_for_a_gemm_that_all_of_them_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    gemms, chosen = turns.Gemms(64, (16, 64, 64)), []
    for measured in ((0,), ()):  # the two kernels take about as long, so noise decides on each rank
        agree.forget()
        monkeypatch.setattr(turns, "_measured_once", lambda *key, measured=measured: measured)
        chosen.append(turns.measured_turns(gemms, (64,), CUDA))
    assert chosen[0] == chosen[1]


def test_ranks_leave_the_same_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    operands, chosen = (reserve.Operand((64, 64), (64, 1), torch.bfloat16),), []
    for sms in (8, 12):
        agree.forget()
        monkeypatch.setattr(reserve, "measured_once", lambda *key, sms=sms: reserve.Reserve(sms, 100.0))
        chosen.append(reserve.measured_reserve(torch.mm, operands, CUDA, 8, 50.0))
    assert chosen[0] == chosen[1]


def test_a_routers_gemm_is_among_those_that_a_measurement_decides_about() -> None:
    from joint_graphs import products

    from tw_compile.passes.join import find_joinable

    graph, _, (router, gate, up) = products((16, 128, 128))  # the router's matrix is the same on all ranks
    graph.output((router, gate, up))
    (found,) = find_joinable(graph, None, lambda *question: (0,))
    assert router in found.nodes
