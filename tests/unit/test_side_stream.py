"""Calls beside other work: what is enqueued on which stream, in which order, and what is kept how long; no GPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tw_compile import compat
from tw_compile.kernels.algorithms.two_shot.two_shot import TwoShot
from tw_compile.kernels.collective import ops
from tw_compile.kernels.collective.side_stream import cluster_size, events_of, side_stream, start_beside
from tw_compile.kernels.collective.slot import GroupState, Slot, SymmetricBuffer
from tw_compile.kernels.collective.spec import NormSpec, Request
from tw_compile.kernels.collective.transport import Started, instances
from tw_compile.kernels.transports import p2p, slot_transport
from tw_compile.kernels.transports.selection import Insist
from tw_compile.testing import fake_process_group

DEVICE = torch.device("cpu")
T, H, RANKS = 4, 8, 2


@dataclass(eq=False)
class FakeStream:
    """Notes what is enqueued on it."""

    name: str
    log: list[str]
    events: int = 0

    def wait_event(self, event: FakeEvent) -> None:
        self.log.append(f"{self.name}: wait {event.recorded}")


class FakeEvent:
    """``recorded``: the stream of its last record, and how many there were on that stream."""

    recorded = "nothing"

    def record(self, stream: FakeStream) -> None:
        stream.events += 1
        self.recorded = f"{stream.name}{stream.events}"
        stream.log.append(f"{stream.name}: record {self.recorded}")


@dataclass
class Machine:
    """A device as far as calls look. ``log``: what is enqueued and allocated, each with the stream that is current then."""

    log: list[str] = field(default_factory=list)
    capturing: bool = False
    current: FakeStream = None  # type: ignore[assignment]
    made: list[tuple[torch.device, int]] = field(default_factory=list)

    def note(self, what: str) -> None:
        self.log.append(f"{self.current.name}: {what}")

    def make(self, device: torch.device, priority: int) -> FakeStream:
        self.made.append((device, priority))
        return FakeStream(f"side{len(self.made)}.", self.log)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine()
    made.current = FakeStream("main", made.log)
    side_stream.cache_clear()
    events_of.cache_clear()
    monkeypatch.setattr(torch.cuda, "Stream", made.make)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", made.stream)
    monkeypatch.setattr(compat, "current_stream", lambda device: made.current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    allocate = Request.allocate

    def noted(request: Request, world_size: int) -> Any:
        if request.outputs is None:
            made.note("allocate")
        return allocate(request, world_size)

    monkeypatch.setattr(Request, "allocate", noted)
    yield made
    side_stream.cache_clear()
    events_of.cache_clear()


def message(slot: int = 0, overlap_sms: int = 4) -> Request:
    norm = NormSpec(1e-6, 0.0, None, torch.float32, torch.float32)
    return Request(torch.ones(T, H), None, None, None, norm, False, "none", "0", slot, overlap_sms=overlap_sms)


def ready(slot: int = 0) -> Request:
    """A message whose outputs are allocated."""
    asked = message(slot)
    return replace(asked, outputs=asked.allocate(RANKS))


def launching(machine: Machine) -> Callable[[Request], Started]:
    def launch(request: Request) -> Started:
        machine.note("kernel")
        return Started(*request.allocate(RANKS))

    return launch


def join(started: Started) -> None:
    assert started.finish is not None
    started.finish()


FORK = ["main: record main1", "side1.: wait main1", "side1.: record side1.1", "main: wait side1.1"]
"""The other work comes when the side stream has passed the fork, so that the kernel finds its SMs first."""


# --- one call --------------------------------------------------------------------------------------------------------


def test_a_call_forks_after_its_outputs_are_allocated_and_joins_when_it_is_finished(machine: Machine) -> None:
    started = start_beside(ready(), launching(machine))
    begun = ["main: allocate", *FORK, "side1.: kernel", "side1.: record side1.2"]
    assert machine.log == begun and started.overlap_sms == 4
    machine.note("other work")
    join(started)
    assert machine.log == [*begun, "main: other work", "main: wait side1.2"]


def test_the_stream_that_finishes_is_the_one_that_waits(machine: Machine) -> None:
    started = start_beside(ready(), launching(machine))
    with machine.stream(FakeStream("other", machine.log)):
        join(started)
    assert machine.log[-1] == "other: wait side1.2"


@pytest.mark.full
def test_inputs_and_outputs_are_kept_until_the_join(machine: Machine) -> None:
    asked = ready()
    started = start_beside(asked, launching(machine))
    kept = [weakref.ref(asked.x), weakref.ref(started.hidden), weakref.ref(started.residual)]
    finish = started.finish
    assert finish is not None
    del asked, started
    gc.collect()
    assert all(tensor() is not None for tensor in kept), "given back while the kernel may use it"
    finish()
    del finish
    gc.collect()
    assert all(tensor() is None for tensor in kept)


def test_a_launch_that_fails_is_joined(machine: Machine) -> None:
    def launch(request: Request) -> Started:
        machine.current = FakeStream("main", machine.log)  # what the context manager of torch does
        raise RuntimeError("no such kernel")

    with pytest.raises(RuntimeError, match="no such kernel"):
        start_beside(ready(), launch)
    assert machine.log[-2:] == ["side1.: record side1.2", "main: wait side1.2"]


def test_streams_are_made_once_for_a_device_and_slot_and_have_priority(machine: Machine) -> None:
    devices = [torch.device("cuda", index) for index in range(2)]
    streams = [side_stream(device, slot) for device in devices for slot in range(2) for _ in range(3)]
    assert len(set(map(id, streams))) == 4
    assert machine.made == [(device, -1) for device in devices for _ in range(2)]


def test_calls_in_turn_are_on_one_stream_and_nothing_but_the_next_call_waits_for_them(machine: Machine) -> None:
    started = [start_beside(ready(slot), launching(machine), in_turn=True) for slot in range(2)]
    kernels = [line.partition(":")[0] for line in machine.log if line.endswith("kernel")]
    assert kernels == ["side1."] * 2, "both on the stream that was asked for first"
    # Had the current stream gone on behind side1, it would have waited for the first call when it started the second.
    went_on = [line for line in machine.log if line.startswith("main: wait")]
    assert went_on == ["main: wait side2.1", "main: wait side3.1"]
    for call in started:
        join(call)
    assert machine.log[-2:] == ["main: wait side1.1", "main: wait side1.2"]


def test_in_capture_calls_in_turn_leave_no_stream_without_a_join(machine: Machine) -> None:
    machine.capturing = True
    for slot in range(2):
        join(start_beside(ready(slot), launching(machine), in_turn=True))
    assert {line.partition(":")[0] for line in machine.log if "wait" in line or "record" in line} == {"main", "side1."}


@pytest.mark.parametrize("capturing", [False, True])
def test_a_slots_calls_share_events_that_no_graph_has(machine: Machine, capturing: bool) -> None:
    events: list[object] = []
    record = FakeEvent.record
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeEvent, "record", lambda event, stream: (events.append(event), record(event, stream)))
        for slot, captured in ((0, False), (0, capturing), (1, False), (0, False)):
            machine.capturing = captured
            join(start_beside(ready(slot), launching(machine)))
    assert len(set(events)) == (8 if capturing else 6) and events[:3] == events[-3:]
    assert (events[3] is events[0]) is not capturing


# --- capture ---------------------------------------------------------------------------------------------------------


def test_in_capture_all_is_as_without_but_that_nothing_waits_for_a_begin(machine: Machine) -> None:
    join(start_beside(ready(), launching(machine)))
    eager, machine.log[:] = list(machine.log), []
    eager = [line.replace("side1.2", "side1.1") for line in eager if "side1.1" not in line]
    machine.capturing, machine.current.events = True, 0
    side_stream(DEVICE, 0).events = 0  # type: ignore[attr-defined]
    join(start_beside(ready(), launching(machine)))
    assert machine.log == eager


def test_a_graph_does_not_wait_for_what_is_not_in_it(machine: Machine) -> None:
    started = start_beside(ready(slot=3), launching(machine))
    machine.capturing = True
    with pytest.raises(RuntimeError, match=r"group '0', slot 3 was started before CUDA-graph capture and not waited"):
        join(started)
    assert "wait side" not in machine.log[-1]


def test_a_call_of_a_capture_that_failed_is_not_waited_for(machine: Machine) -> None:
    machine.capturing = True
    started = start_beside(ready(), launching(machine))
    machine.capturing = False
    before = list(machine.log)
    join(started)
    assert machine.log == before


# --- calls that follow each other ------------------------------------------------------------------------------------


class Fake(TwoShot):
    """Results are the message; where it lies and which stream is current are noted."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine
        self.prepared: list[int] = []

    def prepare(self, request: Request, state: GroupState, spin_limit: int) -> None:
        self.prepared.append(request.overlap_sms)

    def launch(self, request: Request, state: GroupState, slot: Slot, spin_limit: int) -> Started:
        in_slot = request.x.data_ptr() == slot.buffers["x"].tensor.data_ptr()
        self._machine.note(f"kernel of slot {request.slot}" + (", message in the slot" if in_slot else ""))
        hidden, residual = request.allocate(state.world_size)
        return Started(hidden.copy_(request.x), residual)


SMALL = T * H * 4
"""Bytes of a message here."""


@pytest.fixture
def algorithm(machine: Machine, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Fake]:
    """What serves calls of the operators, on two slots, under the name "p2p"."""
    algorithm = Fake(machine)
    transport = p2p.P2PTransport("p2p", algorithm)
    transport.in_turn_from = getattr(request, "param", None)

    def slot() -> Slot:
        buffers = {
            key: SymmetricBuffer(torch.zeros(1024, dtype=torch.uint8), None, torch.zeros(3), 1024)
            for key in ("x", "hidden", "residual")
        }
        return Slot(buffers["x"], torch.zeros(1), torch.zeros(1), buffers)

    with fake_process_group(RANKS):
        state = GroupState("0", None, DEVICE, 0, RANKS, Insist(algorithm))  # type: ignore[arg-type]
        state.slots = {index: slot() for index in range(2)}
        monkeypatch.setattr(transport, "group_state", lambda name, device: state)
        monkeypatch.setattr(slot_transport, "variant_of", lambda request: "variant")
        monkeypatch.setitem(instances, "p2p", transport)
        mm = torch.mm

        def noted(*args: Any, **named: Any) -> torch.Tensor:
            machine.note("GEMM")
            return mm(*args, **named)

        monkeypatch.setattr(torch, "mm", noted)
        ops.in_flight.clear()
        ops.completed_early.clear()
        yield algorithm
        ops.in_flight.clear()


Outputs = tuple[torch.Tensor, torch.Tensor]


def begin(slot: int = 0, overlap_sms: int = 0, product: bool = False) -> Outputs:
    message = (torch.ones(T, 3), torch.ones(3, H)) if product else (torch.ones(T, H),)
    rest = (None, None, None, 1e-5, 0.0, None, torch.float32, torch.float32, False, "none", "0", "p2p", slot)
    return (ops.mm_start if product else ops.start)(*message, *rest, overlap_sms=overlap_sms)


def wait(outputs: Outputs, slot: int = 0) -> None:
    ops.wait_(*outputs, [], "0", slot)


def enqueued(machine: Machine) -> list[str]:
    return [line for line in machine.log if "allocate" not in line]


def test_without_overlap_no_stream_is_made_and_no_event_recorded(machine: Machine, algorithm: Fake) -> None:
    wait(begin())
    assert machine.log == ["main: kernel of slot 0", "main: allocate"]
    assert machine.made == [] and algorithm.prepared == []


@pytest.mark.parametrize("algorithm", [SMALL], indirect=True)
def test_calls_with_rows_in_codes_never_go_in_turn(algorithm: Fake) -> None:
    transport = instances["p2p"]
    assert isinstance(transport, p2p.P2PTransport)
    norm = NormSpec(1e-5, 0.0, None, torch.float32, torch.float32)
    exact = Request(torch.ones(T, H), None, None, None, norm, False, "none", "0", 0)
    assert transport._in_turn(exact) and not transport._in_turn(replace(exact, wire="int8"))


@pytest.mark.parametrize(("algorithm", "streams"), [(None, 2), (SMALL, 1), (SMALL + 1, 2)], indirect=["algorithm"])
def test_calls_of_two_slots_go_in_turn_from_so_many_bytes_on(machine: Machine, algorithm: Fake, streams: int) -> None:
    """Also those of a form that is known."""
    for _ in range(2):
        outputs = [begin(slot, overlap_sms=4) for slot in range(2)]
        for slot in range(2):
            wait(outputs[slot], slot)
    kernels = [line.partition(":")[0] for line in machine.log if "kernel of slot" in line]
    assert len(kernels) == 4 and len(set(kernels)) == streams


def test_kernels_are_loaded_ahead_at_the_first_call_beside_other_work(machine: Machine, algorithm: Fake) -> None:
    machine.capturing = True
    wait(begin(overlap_sms=4))
    assert algorithm.prepared == []
    machine.capturing = False
    for overlap_sms in (0, 4, 8):
        wait(begin(overlap_sms=overlap_sms))
    assert algorithm.prepared == [4]


def test_the_gemm_is_on_the_current_stream_before_the_fork(machine: Machine, algorithm: Fake) -> None:
    outputs = begin(overlap_sms=4, product=True)
    assert enqueued(machine) == [
        "main: GEMM",
        *FORK,
        "side1.: kernel of slot 0, message in the slot",
        "side1.: record side1.2",
    ]
    wait(outputs)
    assert enqueued(machine)[-1] == "main: wait side1.2"
    assert torch.equal(outputs[0], torch.full((T, H), 3.0))


@pytest.mark.parametrize("product", [False, True])
@pytest.mark.parametrize(("first", "second"), [(4, 4), (4, 0), (0, 4)])
def test_a_call_joins_the_slots_earlier_one_before_it_touches_the_slot(
    machine: Machine, algorithm: Fake, first: int, second: int, product: bool
) -> None:
    """Whether each is beside other work or not, and though the earlier one has not been waited for."""
    earlier = begin(overlap_sms=first, product=product)
    machine.log.clear()
    later = begin(overlap_sms=second, product=product)
    lines = enqueued(machine)
    if first:
        assert lines.pop(0) == "main: wait side1.2"
    passed = [line for line in lines if "wait side" in line]
    assert passed == ([f"main: wait side1.{3 if first else 1}"] if second else [])
    assert any("kernel" in line for line in lines)
    machine.log.clear()
    wait(earlier)
    assert machine.log == [], "it was completed early"
    wait(later)
    assert machine.log == ([f"main: wait side1.{4 if first else 2}"] if second else [])


def test_two_slots_are_in_flight_at_once_on_streams_of_their_own(machine: Machine, algorithm: Fake) -> None:
    first, second = begin(0, 4), begin(1, 4)
    assert [line for line in machine.log if "kernel" in line] == [
        "side1.: kernel of slot 0",
        "side2.: kernel of slot 1",
    ]
    passed = [line for line in machine.log if line.startswith("main: wait")]
    assert passed == ["main: wait side1.1", "main: wait side2.1"]
    machine.log.clear()
    wait(second, 1)
    wait(first, 0)
    assert machine.log == ["main: wait side2.2", "main: wait side1.2"]


@pytest.mark.full
def test_a_copy_that_start_makes_of_an_input_lives_until_the_join(machine: Machine, algorithm: Fake) -> None:
    made: list[Any] = []
    launch = algorithm.launch

    def noting(request: Request, **rest: Any) -> Started:
        made.append(weakref.ref(request.x))
        return launch(request, **rest)

    algorithm.launch = noting  # type: ignore[assignment]
    x = torch.ones(H, T).t()
    rest = (None, None, None, 1e-5, 0.0, None, torch.float32, torch.float32, False, "none", "0", "p2p", 0)
    outputs = ops.start(x, *rest, overlap_sms=4)
    gc.collect()
    assert made[0]() is not None and made[0]().is_contiguous()
    wait(outputs)
    gc.collect()
    assert made[0]() is None


def test_empty_messages_and_those_without_room_are_not_beside_other_work(
    machine: Machine, algorithm: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = instances["p2p"]
    asked = message()
    assert transport.start(replace(asked, x=torch.ones(0, H))).finish is None
    taken: list[Request] = []
    nccl = SimpleNamespace(start=lambda request: taken.append(request) or Started(*request.allocate(RANKS)))
    monkeypatch.setattr(slot_transport, "get_transport", lambda name: nccl)
    monkeypatch.setattr(transport, "slot_for", lambda *_: None)
    transport.start(asked)
    assert taken == [asked] and machine.made == []


@pytest.mark.parametrize(
    ("ctas", "size", "of_eight"), [(1, 1, 1), (2, 2, 2), (6, 2, 2), (8, 2, 8), (16, 2, 8), (25, 1, 1)]
)
def test_ctas_come_in_pairs_unless_a_kernel_asks_for_more(
    monkeypatch: pytest.MonkeyPatch, ctas: int, size: int, of_eight: int
) -> None:
    sms = 132
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=sms))
    assert (cluster_size(ctas, DEVICE), cluster_size(ctas, DEVICE, 8)) == (size, of_eight)
    sms = 96
    assert (cluster_size(ctas, DEVICE), cluster_size(ctas, DEVICE, 8)) == (1, 1)
