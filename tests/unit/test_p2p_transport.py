"""Host side of the P2P transport without a GPU: who may use it, what happens when something is missing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tw_compile.kernels.all_reduce_rms_norm import p2p
from tw_compile.kernels.all_reduce_rms_norm.p2p_group import RankFacts, agree, outside_pools, peer_obstacle
from tw_compile.kernels.all_reduce_rms_norm.spec import NormSpec, Request

WORLD_SIZE = 4
DEVICE = torch.device("cpu")
MIB = 2**20
FACTS = [RankFacts("host boot", uuid) for uuid in ("a", "b")]


def always(*_: int) -> bool:
    return True


def never(*_: int) -> bool:
    return False


@pytest.mark.parametrize(
    ("facts", "visible", "access", "atomics", "expected"),
    [
        (FACTS, ["a", "b"], always, always, None),
        ([FACTS[0], RankFacts("other boot", "b")], ["a", "b"], always, always, "2 hosts"),
        ([FACTS[0], FACTS[0]], ["a", "b"], always, always, "share a GPU"),
        (FACTS, ["a"], always, always, "rank 1 is not visible"),
        (FACTS, ["a", "b"], never, always, "no peer access to the GPU of rank 1"),
        (FACTS, ["a", "b"], always, never, "no atomics on the memory of rank 1"),
    ],
)
def test_obstacles(
    facts: list[RankFacts],
    visible: list[str],
    access: Callable[[int, int], bool],
    atomics: Callable[[int, int], bool],
    expected: str | None,
) -> None:
    obstacle = peer_obstacle(0, facts, visible, access, atomics)
    assert obstacle is None if expected is None else expected in str(obstacle)


def test_peers_are_looked_up_by_uuid() -> None:
    """Ordinals differ between processes with different CUDA_VISIBLE_DEVICES."""
    asked = []

    def access(own: int, peer: int) -> bool:
        asked.append((own, peer))
        return True

    assert peer_obstacle(2, FACTS, ["x", "b", "a"], access, always) is None
    assert asked == [(2, 1)]


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([(None, 1), (None, 1)], None),
        ([(None, 1), ("broken", 1)], "rank 1: broken"),
        ([(None, 1), (None, 2)], "ranks disagree: rank 0 has 1, rank 1 has 2"),
    ],
)
def test_agree(monkeypatch: pytest.MonkeyPatch, answers: list[Any], expected: str | None) -> None:
    def gather(into: list[Any], own: Any, group: Any) -> None:
        into[:] = answers

    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    assert agree(SimpleNamespace(size=lambda: 2), None, 1) == expected


def test_outside_pools_passes_results_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device", lambda device: torch.inference_mode(False))
    with torch.inference_mode():
        assert not outside_pools(DEVICE, lambda: torch.zeros(1)).is_inference()
        with pytest.raises(KeyError, match="gone"):
            outside_pools(DEVICE, lambda: dict[str, int]()["gone"])


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A transport whose device calls are replaced; ``agreement`` holds the answers of coming agreements (default: None)."""
    control = SimpleNamespace(capturing=False, agreement=[], freed=[])
    control.state = p2p.GroupState("g", SimpleNamespace(size=lambda: WORLD_SIZE), DEVICE, 1, WORLD_SIZE)
    control.transport = p2p.P2PTransport()
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: control.capturing)
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)
    monkeypatch.setattr(p2p, "outside_pools", lambda device, function: function())
    monkeypatch.setattr(
        p2p,
        "agree",
        lambda group, obstacle, fact: obstacle or (control.agreement.pop(0) if control.agreement else None),
    )
    monkeypatch.setattr(p2p.compat, "symm_mem_empty", lambda size, device: torch.full((size,), 1, dtype=torch.uint8))
    monkeypatch.setattr(
        p2p.compat, "symm_mem_rendezvous", lambda tensor, name: (None, [tensor.data_ptr()] * WORLD_SIZE, 0)
    )
    return control


def test_a_slot_starts_with_zeroed_pads_and_grows_on_demand(host: SimpleNamespace) -> None:
    slot = host.transport._slot(host.state, 0, {"x": 10, "hidden": 20})
    assert slot.pads.tensor.count_nonzero() == 0
    assert {name: buffer.capacity for name, buffer in slot.buffers.items()} == {"x": 32 * MIB, "hidden": 32 * MIB}
    small = slot.buffers["x"]
    pads = slot.pads
    assert host.transport._slot(host.state, 0, {"x": 32 * MIB, "hidden": 20}) is slot
    assert slot.buffers["x"] is small
    assert host.transport._slot(host.state, 0, {"x": 33 * MIB, "hidden": 20}) is slot
    assert slot.buffers["x"].capacity == 64 * MIB
    assert slot.retired == [small]
    assert slot.pads is pads  # flags and epochs go on: the other ranks' do too
    assert host.transport._slot(host.state, 1, {"x": 10}) is not slot


@pytest.mark.parametrize("agreement", [["rank 2: out of memory"], [None, "rank 2: rendezvous failed"]])
def test_a_failure_of_any_rank_sends_the_group_to_nccl(
    host: SimpleNamespace, agreement: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    host.agreement = agreement
    with caplog.at_level(logging.WARNING, logger="tw_compile"):
        assert host.transport._slot(host.state, 0, {"x": 10}) is None
        assert host.transport._slot(host.state, 1, {"x": 10}) is None
    assert host.state.slots == {}
    assert len(caplog.records) == 1
    assert "rank 2" in caplog.text and "'g' uses NCCL" in caplog.text


def test_in_capture_a_message_without_room_goes_through_nccl(
    host: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    slot = host.transport._slot(host.state, 0, {"x": 10})
    host.capturing = True
    assert host.transport._slot(host.state, 0, {"x": 20}) is slot
    with caplog.at_level(logging.WARNING, logger="tw_compile"):
        for _ in range(2):
            assert host.transport._slot(host.state, 0, {"x": 33 * MIB}) is None
    assert len(caplog.records) == 1
    host.capturing = False
    assert host.transport._slot(host.state, 0, {"x": 33 * MIB}) is slot  # the group did not give up


def test_a_lost_peer_is_reported_at_the_next_call_but_not_in_capture(host: SimpleNamespace) -> None:
    host.transport._spin_limit = 100
    slot = host.transport._slot(host.state, 0, {"x": 10})
    slot.status[3, 2] = 1
    host.capturing = True
    assert host.transport._slot(host.state, 0, {"x": 10}) is slot
    host.capturing = False
    with pytest.raises(RuntimeError, match=r"slot 0, cpu: rank 1, CTA 3 gave up waiting for rank 2 at barrier 1"):
        host.transport._slot(host.state, 0, {"x": 10})


def request_on(device: str, dtype: torch.dtype = torch.bfloat16, hidden_size: int = 64) -> Request:
    x = torch.zeros(2, hidden_size, dtype=dtype, device=device)
    return Request(x, None, None, None, NormSpec(1e-6, 0.0, None, dtype, dtype), False, "none", "g", 0)


@pytest.mark.parametrize(("dtype", "hidden_size"), [(torch.float64, 64), (torch.bfloat16, 63), (torch.bfloat16, 65536)])
def test_unsupported_rows_are_refused(dtype: torch.dtype, hidden_size: int) -> None:
    with pytest.raises(RuntimeError, match="supported"):
        p2p.P2PTransport().start(request_on("meta", dtype, hidden_size))


@pytest.mark.parametrize(
    ("device", "ranks", "capturing", "match"),
    [("cpu", 4, False, "needs CUDA"), ("cuda", 9, False, "9 ranks"), ("cuda", 4, True, "warm-up")],
)
def test_first_use_is_refused(
    monkeypatch: pytest.MonkeyPatch, device: str, ranks: int, capturing: bool, match: str
) -> None:
    monkeypatch.setattr(p2p.compat, "resolve_process_group", lambda name: SimpleNamespace(size=lambda: ranks))
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: capturing)
    with pytest.raises(RuntimeError, match=match):
        p2p.P2PTransport()._state("g", torch.device(device))
