"""Calls of a form that was served before: made again as they were, and never where something has changed; no GPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tw_compile.kernels.algorithms import barrier_kernel, row_kernel
from tw_compile.kernels.algorithms.barrier_kernel import BarrierKernel
from tw_compile.kernels.algorithms.multimem.multimem import Multimem
from tw_compile.kernels.algorithms.push.push import Push
from tw_compile.kernels.algorithms.stream.stream import Stream
from tw_compile.kernels.collective import ops
from tw_compile.kernels.collective.known import MOST_FORMS
from tw_compile.kernels.collective.side_stream import events_of, side_stream
from tw_compile.kernels.collective.slot import GroupState, Slot, SymmetricBuffer, grow
from tw_compile.kernels.collective.spec import slice_of_whole_residual
from tw_compile.kernels.collective.transport import instances
from tw_compile.kernels.gemm.mm_leaving_sms import mm
from tw_compile.kernels.transports import p2p, slot_transport
from tw_compile.kernels.transports.selection import Insist
from tw_compile.testing import fake_process_group

RANKS, T, H = 2, 6, 64
BF16 = torch.bfloat16
DEVICE = torch.device("cpu")


class Device:
    """What is launched: parameters as they were then, and how. ``choices``: how often it was settled what serves a call."""

    def __init__(self) -> None:
        self.launches: list[dict[str, Any]] = []
        self.choices = 0
        self.log: list[str] = []

    def launch(self, params: Any, **options: Any) -> None:
        names = [name for name, *_ in params._fields_]
        values = {name: getattr(params, name) for name in names}
        if "prefetch" in values:
            prefetch = values["prefetch"]
            values["prefetch"] = [*prefetch.begin], [*prefetch.bytes], prefetch.row_ctas
        self.launches.append(values | options)
        self.log.append(f"kernel on {options['stream']}")


class FakeStream:
    def __init__(self, name: int, device: Device) -> None:
        self.cuda_stream, self._device = name, device

    def wait_event(self, event: FakeEvent) -> None:
        self._device.log.append(f"{self.cuda_stream} waits for {event.recorded}")


class FakeEvent:
    recorded = 0

    def record(self, stream: FakeStream) -> None:
        stream._device.log.append(f"record {stream.cuda_stream}")
        self.recorded = stream.cuda_stream


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    made = Device()
    side = FakeStream(2, made)
    current = [FakeStream(1, made)]

    @contextmanager
    def on(stream: FakeStream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    side_stream.cache_clear()
    events_of.cache_clear()
    for module in (row_kernel, barrier_kernel):
        monkeypatch.setattr(module, "prepare", lambda program, index: made)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[-1])
    monkeypatch.setattr(slot_transport.compat, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: side)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: DEVICE.index)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield made
    side_stream.cache_clear()
    events_of.cache_clear()


class Group:
    """A group whose slots have all memory that calls need, served by one algorithm under the name "p2p"."""

    def __init__(self, device: Device, algorithm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.transport = p2p.P2PTransport("p2p", algorithm)
        group = slot_transport.compat.resolve_process_group("0")
        self.state = GroupState("0", group, DEVICE, 0, RANKS, Insist(algorithm))
        for index in range(2):
            buffers = {name: buffer() for name in ("x", "hidden", "residual", "inbox")}
            self.state.slots[index] = Slot(buffer(), torch.zeros(32), torch.zeros(4, 8), buffers)
        self.transport.states["0", DEVICE] = self.state
        choose = self.transport.choose

        def counted(request: Any) -> Any:
            device.choices += 1
            return choose(request)

        monkeypatch.setattr(self.transport, "choose", counted)
        monkeypatch.setitem(instances, "p2p", self.transport)


def buffer() -> SymmetricBuffer:
    return SymmetricBuffer(torch.zeros(2**16, dtype=torch.uint8), None, torch.zeros(3), 2**16, torch.zeros(5))


@pytest.fixture(
    params=[partial(Push, False), Stream, partial(Multimem, emulated=True)], ids=["push", "stream", "multimem"]
)
def group(request: pytest.FixtureRequest, device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    with fake_process_group(RANKS):
        ops.in_flight.clear()
        yield Group(device, request.param(), monkeypatch)
        ops.in_flight.clear()


NAMED = {
    "eps": 1e-5,
    "weight_offset": 0.0,
    "cast_before_weight": None,
    "hidden_dtype": BF16,
    "residual_dtype": BF16,
    "residual_sharded": False,
    "residual_out": "sharded",
    "group_name": "0",
    "transport": "p2p",
    "slot": 0,
    "scale": 1.0,
    "hidden_scale": None,
    "eps_tensor": None,
    "overlap_sms": 0,
    "results_in_slot": False,
}


def begin(
    tokens: int = T,
    *,
    product: bool = True,
    residual: Any = "new",
    bias: bool = False,
    weight: bool = True,
    **changed: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What one call returns at once; tensors are new ones."""
    named = NAMED | changed
    if isinstance(residual, str):
        residual = torch.randn(-(-tokens // RANKS) if named["residual_sharded"] else tokens, H).to(BF16)
    vectors = [torch.randn(H).to(BF16) if there else None for there in (bias, weight)]
    rest = (residual, *vectors, *named.values())
    a, b = torch.randn(tokens, 16).to(BF16), torch.randn(16, H).to(BF16)
    return ops.mm_start(a, b, *rest) if product else ops.start(a @ b, *rest)


def call(tokens: int = T, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of one call, waited for."""
    outputs = begin(tokens, **named)
    ops.wait_(*outputs, [], "0", named.get("slot", 0))
    return outputs


TENSORS = ("x", "residual", "bias", "weight", "hidden_scale", "hidden", "residual_out")


@pytest.mark.parametrize("overlap_sms", [0, 4])
@pytest.mark.parametrize("product", [False, True])
def test_a_form_that_was_served_is_launched_again_with_other_tensors(
    device: Device, group: Group, product: bool, overlap_sms: int
) -> None:
    first = call(product=product, overlap_sms=overlap_sms)
    chosen, log = device.choices, list(device.log)
    residual = torch.randn(T, H).to(BF16)
    second = call(product=product, overlap_sms=overlap_sms, residual=residual)
    assert device.choices == chosen, "it was settled again"
    before, after = device.launches
    assert device.log == 2 * log
    assert {name: value for name, value in before.items() if name not in TENSORS} == {
        name: value for name, value in after.items() if name not in TENSORS
    }
    assert after["residual"] == residual.data_ptr()
    assert (after["hidden"], after["residual_out"]) == tuple(one.data_ptr() for one in second)
    assert before["hidden"] == first[0].data_ptr() != after["hidden"]
    assert [one.shape for one in first] == [one.shape for one in second]
    assert [one.dtype for one in first] == [one.dtype for one in second]
    if product and isinstance(group.transport.algorithm, BarrierKernel):
        assert after["x"] == group.state.slots[0].buffers["x"].tensor.data_ptr()


@pytest.mark.parametrize("product", [False, True])
def test_the_slots_earlier_call_is_complete_before_a_known_one_touches_the_slot(
    device: Device, group: Group, monkeypatch: pytest.MonkeyPatch, product: bool
) -> None:
    def multiply(*given: Any) -> torch.Tensor:
        device.log.append("matmul")
        return mm(*given)

    monkeypatch.setattr(ops, "mm", multiply)
    call(product=product, overlap_sms=4)
    earlier = begin(product=product, overlap_sms=4)
    device.log.clear()
    chosen = device.choices
    begin(product=product, overlap_sms=4)
    assert device.choices == chosen, "it was settled again"
    assert device.log[: 1 + product] == ["1 waits for 2", *["matmul"] * product]
    assert device.log.count("1 waits for 2") == 2, "for the earlier call, and that the side stream has begun this one"
    ops.wait_(*earlier, [], "0", 0)  # has nothing to do


def test_there_must_be_room_for_a_known_call_too(device: Device, group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    call(overlap_sms=4)
    asked: list[Any] = []
    monkeypatch.setattr(ops, "check_room", lambda *given: asked.append(given))
    chosen = device.choices
    call(overlap_sms=4)
    assert device.choices == chosen and asked == [(DEVICE, 4)]


@pytest.mark.full
def test_operands_of_a_known_call_live_until_the_join(
    device: Device, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else has a product that was not written to the slot."""
    made: list[weakref.ref[torch.Tensor]] = []

    def multiply(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> torch.Tensor:
        product = a @ b
        made.append(weakref.ref(product))
        return product

    monkeypatch.setattr(ops, "mm", multiply)
    call(overlap_sms=4)
    chosen = device.choices
    outputs = begin(overlap_sms=4)
    gc.collect()
    assert device.choices == chosen and made[-1]() is not None
    ops.wait_(*outputs, [], "0", 0)
    gc.collect()
    assert made[-1]() is None


def test_a_known_call_is_made_on_its_own_device(device: Device, group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    call()
    current: list[int | None] = [7]
    launched_on: list[int | None] = []

    @contextmanager
    def on(wanted: torch.device) -> Iterator[None]:
        current.append(wanted.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(device, "launch", lambda params, **options: launched_on.append(current[-1]))
    chosen = device.choices
    call()
    assert device.choices == chosen and launched_on == [DEVICE.index] and current == [7]


CHANGES: list[dict[str, Any]] = [
    {"tokens": T + 1},
    {"product": False},
    {"residual": None},
    {"residual": torch.zeros(T, H)},
    {"residual_sharded": True},
    {"residual_out": "replicated"},
    {"bias": True},
    {"weight": False},
    {"eps": 1e-6},
    {"weight_offset": 1.0},
    {"cast_before_weight": BF16},
    {"hidden_dtype": torch.float32},
    {"residual_dtype": torch.float32},
    {"scale": 0.5},
    {"slot": 1},
    {"overlap_sms": 4},
    {"overlap_sms": 8},
    {"results_in_slot": True},
    {"hidden_dtype": torch.float8_e4m3fn, "hidden_scale": torch.ones(1)},
]


@pytest.mark.parametrize("changed", CHANGES, ids=" ".join)
def test_whatever_else_differs_is_settled_anew(device: Device, group: Group, changed: dict[str, Any]) -> None:
    call()
    chosen = device.choices
    call(**changed)
    assert device.choices > chosen
    chosen = device.choices
    call()
    call(**changed)
    assert device.choices == chosen, "both forms are known"


def test_tensors_that_would_have_to_be_copied_are_settled_each_time(device: Device, group: Group) -> None:
    shifted = torch.zeros(T * H + 1, dtype=BF16)[1:].view(T, H)
    turned = torch.zeros(H, T, dtype=BF16).t()
    for residual in (shifted, turned):
        for _ in range(2):
            chosen = device.choices
            call(residual=residual)
            assert device.choices > chosen
            assert device.launches[-1]["residual"] % 16 == 0
            assert device.launches[-1]["residual"] != residual.data_ptr()
    assert group.state.known == {}


def test_eps_of_a_tensor_is_read_at_each_call(device: Device, group: Group) -> None:
    for eps in (0.25, 0.5):
        call(eps_tensor=torch.tensor(eps))
        assert device.launches[-1]["eps"] == eps


def test_nothing_outlives_the_memory_that_it_names(
    device: Device, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    call()
    assert len(group.state.known) == 1
    monkeypatch.setattr("tw_compile.kernels.collective.slot.common_obstacle", lambda *_: "no memory")
    monkeypatch.setattr(slot_transport.compat, "symm_mem_empty", lambda size, device: torch.empty(1))
    assert grow(group.state, 0, {"x": 2**20}) is None
    assert group.state.known == {} and group.state.obstacle


def test_nothing_outlives_memory_that_is_replaced(
    device: Device, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    call()
    monkeypatch.setattr("tw_compile.kernels.collective.slot.common_obstacle", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(
        slot_transport.compat, "symm_mem_empty", lambda size, device: torch.empty(size, dtype=torch.uint8)
    )
    monkeypatch.setattr(slot_transport.compat, "symm_mem_rendezvous", lambda tensor, name: (None, [0] * RANKS, 0, 0))
    assert grow(group.state, 0, {"x": 2**20}) is group.state.slots[0]
    assert group.state.known == {} and not group.state.obstacle


def test_another_group_of_the_same_name_knows_nothing(device: Device, group: Group) -> None:
    call()
    (form,) = group.state.known
    assert group.transport.known("0", DEVICE, form) is not None
    group.state.group = object()  # type: ignore[assignment]
    assert group.transport.known("0", DEVICE, form) is None


def test_in_debug_mode_slots_are_looked_at_before_each_call(
    device: Device, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    monkeypatch.setattr(group.transport, "spin_limit", 7)
    monkeypatch.setattr(slot_transport, "raise_if_peer_missing", lambda *_: looked.append("looked"))
    call()
    before = len(looked)
    call()
    assert len(looked) == 2 * before > 0


def test_forms_are_forgotten_before_they_fill_the_memory(
    device: Device, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MOST_FORMS >= 1024
    monkeypatch.setattr(slot_transport, "MOST_FORMS", 3)
    for tokens in range(1, 9):
        call(tokens)
        assert 1 <= len(group.state.known) <= 3


def test_shards_of_whole_residuals_are_a_form_of_their_own(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """One-shot reads all rows of the residual: it serves a shard that is part of all of them, and no other."""
    with fake_process_group(RANKS):
        group = Group(device, Push(True), monkeypatch)
        monkeypatch.setattr(group.state.selector, "_candidates", (Push(True), Push(False)))
        whole = torch.randn(RANKS * T // RANKS, H).to(BF16)
        shard = slice_of_whole_residual(whole, RANKS, 0)
        for _ in range(2):
            call(residual=shard, residual_sharded=True)
            assert device.launches[-1]["residual"] == whole.data_ptr()
            assert device.launches[-1]["end"] == T, "all rows on every rank"
            call(residual=shard.clone(), residual_sharded=True)
            assert device.launches[-1]["end"] == T // RANKS
        assert len(group.state.known) == 2
        made = call(residual=shard, residual_sharded=True)[1]
        assert made.untyped_storage().nbytes() == whole.nbytes, "handed on as a part of all rows again"
