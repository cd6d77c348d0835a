"""Host side of the P2P transport without a GPU: who may use it, what happens when something is missing."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tw_compile.kernels.algorithms.multimem.multimem import Multimem
from tw_compile.kernels.algorithms.push.push import MOST_INBOX_BYTES, PARTS, Push
from tw_compile.kernels.algorithms.two_shot.two_shot import TwoShot
from tw_compile.kernels.collective import slot
from tw_compile.kernels.collective.algorithm import Algorithm
from tw_compile.kernels.collective.p2p_group import RankFacts, outside_pools, peer_obstacle
from tw_compile.kernels.collective.slot import GroupState
from tw_compile.kernels.collective.spec import NormSpec, Request
from tw_compile.kernels.collective.transport import Started, get_transport
from tw_compile.kernels.collective.transports import (
    NCCL_MAX_HIDDEN,
    NO_PEER_ATOMICS,
    P2P_MAX_HIDDEN,
    GroupFacts,
    choose_transport,
)
from tw_compile.kernels.transports import p2p, slot_transport
from tw_compile.kernels.transports.selection import Insist, Selector, Step

WORLD_SIZE = 4
DEVICE = torch.device("cpu")
MIB = 2**20
FACTS = [RankFacts("host boot", uuid, (9, 0)) for uuid in ("a", "b")]


def always(*_: int) -> None:
    """No obstacle between any two GPUs."""


def never(*_: int) -> str:
    return NO_PEER_ATOMICS


@pytest.mark.parametrize(
    ("facts", "visible", "between", "expected"),
    [
        (FACTS, ["a", "b"], always, None),
        ([FACTS[0], RankFacts("other boot", "b", (9, 0))], ["a", "b"], always, "2 hosts"),
        ([FACTS[0], RankFacts("host boot", "b", (8, 9))], ["a", "b"], always, "compute capabilities (8.9, 9.0)"),
        ([FACTS[0], FACTS[0]], ["a", "b"], always, "share a GPU"),
        (FACTS, ["a"], always, "rank 1 is not visible"),
        (FACTS, ["a", "b"], never, f"{NO_PEER_ATOMICS} (to the GPU of rank 1)"),
    ],
)
def test_obstacles(
    facts: list[RankFacts],
    visible: list[str],
    between: Callable[[int, int], str | None],
    expected: str | None,
) -> None:
    obstacle = peer_obstacle(0, facts, visible, between)
    assert obstacle is None if expected is None else expected in str(obstacle)


def test_peers_are_looked_up_by_uuid() -> None:
    """Ordinals differ between processes with different CUDA_VISIBLE_DEVICES."""
    asked = []

    def between(own: int, peer: int) -> None:
        asked.append((own, peer))

    assert peer_obstacle(2, FACTS, ["x", "b", "a"], between) is None
    assert asked == [(2, 1)]


def test_outside_pools_passes_results_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device", lambda device: torch.inference_mode(False))
    with torch.inference_mode():
        assert not outside_pools(DEVICE, lambda: torch.zeros(1)).is_inference()
        with pytest.raises(KeyError, match="gone"):
            outside_pools(DEVICE, lambda: dict[str, int]()["gone"])


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A transport whose device calls are replaced; ``agreement`` holds the answers of coming agreements (default: None)."""
    control = SimpleNamespace(capturing=False, agreement=[], freed=[], multicast=0)
    control.state = GroupState("g", SimpleNamespace(size=lambda: WORLD_SIZE), DEVICE, 1, WORLD_SIZE, Selector())
    control.transport = p2p.P2PTransport()
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: control.capturing)
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(slot_transport, "outside_pools", lambda device, function: function())
    monkeypatch.setattr(
        slot,
        "common_obstacle",
        lambda group, obstacle, fact=None: obstacle or (control.agreement.pop(0) if control.agreement else None),
    )
    monkeypatch.setattr(
        slot_transport.compat, "symm_mem_empty", lambda size, device: torch.full((size,), 1, dtype=torch.uint8)
    )
    monkeypatch.setattr(
        slot_transport.compat,
        "symm_mem_rendezvous",
        lambda tensor, name: (None, [tensor.data_ptr()] * WORLD_SIZE, control.multicast, 0),
    )
    return control


def test_a_slot_starts_with_zeroed_pads_and_grows_on_demand(host: SimpleNamespace) -> None:
    slot = host.transport.slot_for(host.state, 0, {"x": 10, "hidden": 20})
    assert slot.pads.tensor.count_nonzero() == 0
    assert {name: buffer.capacity for name, buffer in slot.buffers.items()} == {"x": 32 * MIB, "hidden": 32 * MIB}
    small = slot.buffers["x"]
    pads = slot.pads
    assert host.transport.slot_for(host.state, 0, {"x": 32 * MIB, "hidden": 20}) is slot
    assert slot.buffers["x"] is small
    assert host.transport.slot_for(host.state, 0, {"x": 33 * MIB, "hidden": 20}) is slot
    assert slot.buffers["x"].capacity == 64 * MIB
    assert slot.retired == [small]
    assert slot.nbytes == (64 + 32 + 32) * MIB + slot.pads.capacity, "retired buffers are still there"
    assert slot.pads is pads  # flags and epochs go on: the other ranks' do too
    other = host.transport.slot_for(host.state, 1, {"x": 10})
    assert other is not slot
    host.transport.states["group", DEVICE] = host.state
    assert host.transport.reserved_bytes() == slot.nbytes + other.nbytes
    assert get_transport("gloo").reserved_bytes() == 0


def test_ranks_agree_on_sizes_and_then_on_offsets_when_all_that_was_filled_in_is_there(
    host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[Any] = []
    monkeypatch.setattr(slot, "common_obstacle", lambda group, obstacle, fact=None: log.append(fact))
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: log.append("synchronize"))
    pads = host.transport.slot_for(host.state, 0, {"x": 10}).pads
    assert log == [{"x": 32 * MIB, "pads": pads.capacity}, "synchronize", {"x": 0, "pads": 0}]


def test_a_slots_memory_is_made_outside_of_the_pools_of_graphs(
    host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside: list[torch.device] = []
    made: list[list[torch.device]] = []

    def apart(device: torch.device, function: Callable[[], Any]) -> Any:
        outside.append(device)
        result = function()
        outside.pop()
        return result

    empty = slot_transport.compat.symm_mem_empty
    monkeypatch.setattr(slot_transport, "outside_pools", apart)
    monkeypatch.setattr(
        slot_transport.compat, "symm_mem_empty", lambda *given: made.append(list(outside)) or empty(*given)
    )
    assert host.transport.slot_for(host.state, 0, {"x": 10}) is not None
    assert made == [[DEVICE]] * 2


@pytest.mark.parametrize("agreement", [["rank 2: out of memory"], [None, "rank 2: rendezvous failed"]])
def test_a_failure_of_any_rank_sends_the_group_to_nccl(
    host: SimpleNamespace, agreement: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    host.agreement = agreement
    with caplog.at_level(logging.WARNING, logger="tw_compile"):
        assert host.transport.slot_for(host.state, 0, {"x": 10}) is None
        assert host.transport.slot_for(host.state, 1, {"x": 10}) is None
    assert host.state.slots == {}
    assert len(caplog.records) == 1
    assert "rank 2" in caplog.text and "'g' uses host instead" in caplog.text


def test_in_capture_a_message_without_room_goes_through_nccl(
    host: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    slot = host.transport.slot_for(host.state, 0, {"x": 10})
    host.capturing = True
    assert host.transport.slot_for(host.state, 0, {"x": 20}) is slot
    with caplog.at_level(logging.WARNING, logger="tw_compile"):
        for _ in range(2):
            assert host.transport.slot_for(host.state, 0, {"x": 33 * MIB}) is None
    assert len(caplog.records) == 1
    host.capturing = False
    assert host.transport.slot_for(host.state, 0, {"x": 33 * MIB}) is slot  # the group did not give up


def message_of(tokens: int, hidden_size: int = 1024, **changed: Any) -> Request:
    x = torch.empty(1, dtype=torch.bfloat16).expand(tokens, hidden_size)
    norm = NormSpec(1e-6, 0.0, None, torch.bfloat16, torch.float32)
    return dataclasses.replace(Request(x, None, None, None, norm, False, "replicated", "g", 0), **changed)


@pytest.fixture
def transport(host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> p2p.P2PTransport:
    """That of ``host``, which finds the state of ``host`` for every group."""
    monkeypatch.setattr(host.transport, "group_state", lambda name, device: host.state)
    return host.transport


def test_a_message_buffer_is_what_peers_read(host: SimpleNamespace, transport: p2p.P2PTransport) -> None:
    buffer = transport.message_buffer(message_of(7))
    assert buffer is not None and (buffer.shape, buffer.dtype) == ((7, 1024), torch.bfloat16)
    assert buffer.is_contiguous()
    buffers = host.state.slots[0].buffers
    assert buffer.data_ptr() == buffers["x"].tensor.data_ptr()
    assert set(buffers) == {"x", "hidden", "residual"}  # start will find all that it needs
    again = transport.message_buffer(message_of(3))
    assert again is not None and again.data_ptr() == buffer.data_ptr()
    other = transport.message_buffer(message_of(3, slot=1))
    assert other is not None and other.data_ptr() != buffer.data_ptr()


@pytest.mark.parametrize("one_shot", [False, True])
def test_there_is_no_message_buffer_for_no_tokens(
    host: SimpleNamespace, transport: p2p.P2PTransport, one_shot: bool
) -> None:
    host.state.selector = Insist(Push(one_shot))
    assert transport.message_buffer(message_of(0)) is None and not host.state.slots


def test_a_message_buffer_grows_with_the_message(host: SimpleNamespace, transport: p2p.P2PTransport) -> None:
    small = transport.message_buffer(message_of(7))
    large = transport.message_buffer(message_of(2**15))
    assert small is not None and large is not None and large.data_ptr() != small.data_ptr()
    assert large.data_ptr() == host.state.slots[0].buffers["x"].tensor.data_ptr()


def test_in_capture_there_is_a_message_buffer_if_there_is_room_for_the_call(
    host: SimpleNamespace, transport: p2p.P2PTransport
) -> None:
    kept = message_of(7, residual_out="sharded")
    assert transport.message_buffer(kept) is not None
    host.capturing = True
    assert transport.message_buffer(kept) is not None
    assert transport.message_buffer(message_of(7)) is None  # there is room for x, but none for a residual
    assert transport.message_buffer(message_of(2**15, residual_out="sharded")) is None


def test_no_message_buffer_where_peers_would_not_read_it(host: SimpleNamespace, transport: p2p.P2PTransport) -> None:
    assert transport.message_buffer(message_of(0)) is None
    host.state.selector = Insist(Push(one_shot=True))
    assert transport.message_buffer(message_of(7)) is None
    own_rows = torch.empty(2, 1024)
    by_two_shot = message_of(7, residual=own_rows, residual_sharded=True)
    assert transport.message_buffer(by_two_shot) is not None
    host.state.selector = Selector()
    host.state.give_up("no peer access")
    assert transport.message_buffer(message_of(7)) is None


@pytest.fixture
def prepared(
    host: SimpleNamespace, transport: p2p.P2PTransport, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[Request, int]]:
    """What the two kernels of a table were asked to load: the request and the limit of spins."""
    calls: list[tuple[Request, int]] = []

    class Noting(TwoShot):
        def prepare(self, request: Request, state: slot.GroupState, spin_limit: int) -> None:
            assert state is host.state
            calls.append((request, spin_limit))

    alternatives = (Noting(), Noting())
    host.state.selector = SimpleNamespace(
        route="",
        settled=lambda request, _: request,
        alternatives=lambda *_: alternatives,
        choose=lambda *_: alternatives[0],
    )
    monkeypatch.setattr("torch.cuda.device", lambda device: nullcontext())
    transport.limit_spins(5)
    return calls


def test_all_kernels_are_loaded_when_a_variant_is_first_seen(
    transport: p2p.P2PTransport, prepared: list[tuple[Request, int]]
) -> None:
    first = message_of(7)
    transport.choose(first)
    assert prepared == [(first, 5), (first, 5)]
    for tokens in (7, 1, 3000):
        transport.message_buffer(message_of(tokens))
    assert len(prepared) == 2
    for other in (message_of(7, hidden_size=2048), message_of(7, residual_out="sharded")):
        transport.message_buffer(other)
        assert prepared[-1] == (other, 5)
    assert len(prepared) == 6


def test_the_kernels_for_calls_beside_other_work_are_loaded_at_the_first_of_them(
    transport: p2p.P2PTransport, prepared: list[tuple[Request, int]]
) -> None:
    transport.choose(message_of(7))
    first = message_of(7, overlap_sms=4)
    for request in (first, message_of(3000, overlap_sms=8), message_of(7)):
        transport.choose(request)
    assert prepared[2:] == [(first, 5), (first, 5)]


def test_a_check_waits_for_all_streams_before_it_looks(
    host: SimpleNamespace, transport: p2p.P2PTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = transport.slot_for(host.state, 0, {"x": 10})
    transport.states["g", DEVICE] = host.state
    assert slot is not None

    def give_up(device: torch.device) -> None:
        slot.status[3, 2] = 1

    monkeypatch.setattr("torch.cuda.synchronize", give_up)
    with pytest.raises(RuntimeError, match="CTA 3 gave up waiting for rank 2"):
        transport.check()


def test_in_capture_nothing_is_loaded_that_is_not_needed(
    host: SimpleNamespace, transport: p2p.P2PTransport, prepared: list[tuple[Request, int]]
) -> None:
    host.capturing = True
    transport.choose(message_of(7))
    assert prepared == []
    host.capturing = False
    transport.choose(message_of(7))
    assert len(prepared) == 2


def test_a_group_that_uses_nccl_loads_nothing(
    host: SimpleNamespace, transport: p2p.P2PTransport, prepared: list[tuple[Request, int]]
) -> None:
    host.state.give_up("no peer access")
    transport.choose(message_of(7))
    assert prepared == []


def test_without_a_choice_nothing_is_loaded_ahead(host: SimpleNamespace, transport: p2p.P2PTransport) -> None:
    transport.choose(message_of(7))
    assert host.state.prepared == set()


def test_a_lost_peer_is_reported_at_the_next_call_but_not_in_capture(host: SimpleNamespace) -> None:
    host.transport.limit_spins(100)
    slot = host.transport.slot_for(host.state, 0, {"x": 10})
    slot.status[3, 2] = 1
    host.capturing = True
    assert host.transport.slot_for(host.state, 0, {"x": 10}) is slot
    host.capturing = False
    with pytest.raises(RuntimeError, match=r"slot 0, cpu: rank 1, CTA 3 gave up waiting for rank 2 at barrier 1"):
        host.transport.slot_for(host.state, 0, {"x": 10})


def test_a_table_ends_with_the_multicast_address(host: SimpleNamespace) -> None:
    host.multicast = 1 << 40
    table = host.transport.slot_for(host.state, 0, {"x": 10}).buffers["x"].table
    assert len(table) == WORLD_SIZE + 1
    assert int(table[-1]) == 1 << 40


@pytest.mark.parametrize(
    ("multicast", "agreement", "used"),
    [(1 << 40, [], True), (0, [], False), (1 << 40, [None, None, "rank 2: no multicast address"], False)],
)
def test_multicast_is_used_where_all_ranks_have_it(
    host: SimpleNamespace,
    caplog: pytest.LogCaptureFixture,
    multicast: int,
    agreement: list[Any],
    used: bool,
) -> None:
    host.multicast, host.agreement, host.state.multimem = multicast, list(agreement), True
    transport = p2p.P2PTransport("multimem")
    with caplog.at_level(logging.WARNING, logger="tw_compile"):
        for index in range(2):
            assert transport.slot_for(host.state, index, {"x": 10}) is not None
    assert host.state.multimem is used
    assert host.state.obstacle is None  # without multicast the group still works peer to peer
    lines = [record.getMessage() for record in caplog.records]
    if used:
        assert lines == []
    else:
        assert len(lines) == 1
        assert "no multicast address" in lines[0] and "peer loads and stores" in lines[0]


@pytest.mark.parametrize(
    ("multicast", "hidden_size", "dtype", "served"),
    [
        (1 << 40, 1024, torch.bfloat16, "multimem"),
        (1 << 40, 2884, torch.float32, "two_shot"),  # no whole vectors of eight elements
        (0, 1024, torch.bfloat16, "two_shot"),
    ],
)
def test_multimem_serves_what_it_can_and_another_kernel_the_rest(
    host: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    multicast: int,
    hidden_size: int,
    dtype: torch.dtype,
    served: str,
) -> None:
    """Whether there is multicast is known when the first call has made the slot's memory, and that call is served, too."""
    calls: list[str] = []

    def launch(self: Algorithm, request: Request, state: slot.GroupState, slot: slot.Slot, spin_limit: int) -> Started:
        assert int(slot.buffers["x"].table[-1]) == multicast
        calls.append(self.name)
        return Started(*request.allocate(WORLD_SIZE))

    for kind in (Multimem, TwoShot):
        monkeypatch.setattr(kind, "launch", launch)
    monkeypatch.setattr("torch.cuda.device", lambda device: nullcontext())
    monkeypatch.setattr(slot_transport.compat, "resolve_process_group", lambda name: host.state.group)
    transport = p2p.P2PTransport("multimem")
    host.multicast, host.state.multimem = multicast, True
    host.state.selector = Insist(transport.algorithm)
    transport.states["g", DEVICE] = host.state
    for tokens in (7, 3):
        transport.start(message_of(tokens, x=torch.empty(tokens, hidden_size, dtype=dtype)))
    assert calls == [served, served]


@pytest.mark.parametrize(
    ("transport", "ranks", "wanted"),
    [
        (p2p.P2PTransport(), 8, False),
        (p2p.P2PTransport("multimem"), 2, True),
        (p2p.P2PTransport("multimem"), 8, True),
    ],
)
def test_which_groups_want_multicast(
    monkeypatch: pytest.MonkeyPatch, transport: p2p.P2PTransport, ranks: int, wanted: bool
) -> None:
    monkeypatch.setattr(
        slot_transport.compat, "resolve_process_group", lambda name: SimpleNamespace(size=lambda: ranks)
    )
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("torch.distributed.get_rank", lambda group: 0)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "GPU")
    monkeypatch.setattr(p2p.P2PTransport, "route", lambda self, group: "")
    monkeypatch.setattr(slot_transport, "common_obstacle", lambda group, obstacle, fact: None)
    monkeypatch.setattr(slot_transport, "outside_pools", lambda device, function: None)
    assert transport.group_state(f"of {ranks}", torch.device("cuda", 0)).multimem is wanted


def test_ranks_whose_tables_differ_use_nccl(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    facts: list[Any] = []
    steps = (Step(2, 1024, "push_one_shot", 8),)
    monkeypatch.setattr(slot_transport.compat, "resolve_process_group", lambda name: SimpleNamespace(size=lambda: 2))
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("torch.distributed.get_rank", lambda group: 0)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "GPU")
    monkeypatch.setattr(slot_transport, "steps_for", lambda name, ranks, transport: steps)
    monkeypatch.setattr(p2p, "group_obstacle", lambda group, device: None)
    monkeypatch.setattr(p2p.P2PTransport, "route", lambda self, group: "push")
    monkeypatch.setattr(
        slot_transport, "common_obstacle", lambda group, obstacle, fact: facts.append(fact) or "ranks disagree"
    )
    monkeypatch.setattr(slot_transport, "outside_pools", lambda device, function: function())
    with caplog.at_level(logging.WARNING, logger="tw_compile"):
        state = p2p.P2PTransport().group_state("g", torch.device("cuda", 0))
    assert facts == [("GPU", steps, "p2p", "push")]
    assert state.obstacle == "ranks disagree" and "'g' uses host instead" in caplog.text


def test_multimem_by_name() -> None:
    transports = [get_transport(name) for name in ("p2p", "multimem")]
    assert [transport.name for transport in transports] == ["p2p", "multimem"]
    assert all(isinstance(transport, p2p.P2PTransport) for transport in transports)
    few = Multimem(4)
    assert p2p.P2PTransport("multimem", few).algorithm is few


@pytest.mark.parametrize(
    ("facts", "hidden_size", "name"),
    [
        (GroupFacts("cuda", 2, 1), 4096, "multimem"),
        (GroupFacts("cuda", 2, 2), 4096, None),
        (GroupFacts("cuda", 2, 1), 4097, None),
        (GroupFacts("cpu", 2, 1), 4096, None),
    ],
)
def test_multimem_is_chosen_on_request_only(facts: GroupFacts, hidden_size: int, name: str | None) -> None:
    assert choose_transport(facts, hidden_size, torch.bfloat16.itemsize, "multimem").name == name
    for world_size in range(2, 9):
        assert choose_transport(GroupFacts("cuda", world_size, 1), 4096, torch.bfloat16.itemsize).name == "p2p"


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
    monkeypatch.setattr(
        slot_transport.compat, "resolve_process_group", lambda name: SimpleNamespace(size=lambda: ranks)
    )
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: capturing)
    with pytest.raises(RuntimeError, match=match):
        p2p.P2PTransport().group_state("g", torch.device(device))


@pytest.mark.parametrize(
    ("hidden_size", "name"),
    [(P2P_MAX_HIDDEN, "p2p"), (P2P_MAX_HIDDEN + 8, "nccl"), (NCCL_MAX_HIDDEN, "nccl"), (NCCL_MAX_HIDDEN + 8, None)],
)
def test_the_longest_rows_of_each_transport(hidden_size: int, name: str | None) -> None:
    assert choose_transport(GroupFacts("cuda", 2, 1), hidden_size, torch.bfloat16.itemsize).name == name
    refused = nullcontext() if name == "p2p" else pytest.raises(RuntimeError, match=f"at most {P2P_MAX_HIDDEN}")
    with refused:
        slot_transport.require_supported("P2P transport", hidden_size, torch.bfloat16)


@pytest.mark.parametrize("hidden_size", [8, 16, 24])
def test_no_inbox_is_larger_than_it_may_be(hidden_size: int) -> None:
    """Of rows so short that three parts without gaps would fill it."""
    tokens = MOST_INBOX_BYTES // PARTS // (hidden_size * torch.bfloat16.itemsize)
    (nbytes,) = Push(True).needs(message_of(tokens, hidden_size), 2).values()
    assert nbytes <= MOST_INBOX_BYTES
