"""The transports under check, with algorithms that need no GPU: who served a call is noticed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from gpu.checks import transports
from gpu.checks.transports import ALGORITHMS, IN_SLOT, TRANSPORT_OF, Factors, Subject

from tw_compile.harness.problems import Context
from tw_compile.kernels.algorithms.push.push import PushParams
from tw_compile.kernels.algorithms.two_shot.two_shot import TwoShot
from tw_compile.kernels.collective.call import Call
from tw_compile.kernels.collective.slot import GroupState, Slot, SymmetricBuffer
from tw_compile.kernels.collective.spec import NormSpec, Request, operands_of
from tw_compile.kernels.collective.transport import Started
from tw_compile.kernels.transports import p2p, slot_transport
from tw_compile.kernels.transports.selection import Insist

DEVICE = torch.device("cpu")


class Fake(TwoShot):
    """Results are three times ``x``; in the slot's memory if ``in_slot``."""

    def __init__(self, in_slot: bool = False, reason: str | None = None) -> None:
        super().__init__()
        self.in_slot, self.reason = in_slot, reason

    def obstacle(self, request: Request, state: GroupState) -> str | None:
        return self.reason

    def launch(self, request: Request, state: GroupState, slot: Slot, spin_limit: int) -> Started:
        hidden, residual = request.allocate(state.world_size)
        if self.in_slot:
            hidden = slot.buffers["hidden"].view(hidden.shape, hidden.dtype)
        return Started(hidden.copy_(3 * request.x), residual)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Subject]:
    """A subject with a fake algorithm and one slot, whose fallbacks compute something else."""
    group = SimpleNamespace(size=lambda: 2)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("torch.cuda.device", lambda device: nullcontext())
    monkeypatch.setattr(slot_transport.compat, "resolve_process_group", lambda name: group)
    monkeypatch.setattr(TwoShot, "launch", lambda self, request, *_: Started(*request.allocate(2)))
    nccl = SimpleNamespace(start=lambda request: Started(*request.allocate(2)))
    monkeypatch.setattr(slot_transport, "get_transport", lambda name: nccl)

    def make(name: str, algorithm: Fake, room: bool = True) -> Subject:
        monkeypatch.setitem(ALGORITHMS, name, lambda: algorithm)
        monkeypatch.setitem(TRANSPORT_OF, name, "p2p")
        subject = Subject(name)
        state = GroupState("g", group, DEVICE, 0, 2, Insist(subject.algorithm))  # type: ignore[arg-type]
        buffers = {
            key: SymmetricBuffer(torch.zeros(1024, dtype=torch.uint8), None, torch.zeros(3), 1024)
            for key in ("x", "hidden", "residual")
        }
        state.slots[0] = Slot(buffers["x"], torch.zeros(1), torch.zeros(1), buffers)
        if not room:
            state.give_up("no memory")
        assert isinstance(subject.transport, p2p.P2PTransport)
        subject.transport.states["g", DEVICE] = state
        return subject

    return make


def request() -> Request:
    norm = NormSpec(1e-6, 0.0, None, torch.float32, torch.float32)
    return Request(torch.ones(4, 8), None, None, None, norm, False, "none", "g", 0)


def context() -> Context:
    return Context(0, 2, DEVICE, "g")


def test_a_call_that_the_algorithm_serves_is_no_failure(make: Callable[..., Subject]) -> None:
    ctx, subject = context(), make("fake", Fake())
    hidden, residual = subject.call(ctx, request())
    assert torch.equal(hidden, torch.full((4, 8), 3.0)) and residual.shape == (0, 8)
    assert subject.algorithm.launches == 1
    assert ctx.failures == []


@pytest.mark.parametrize(
    ("algorithm", "room", "reason"), [(Fake(reason="too long"), True, "too long"), (Fake(), False, "no memory")]
)
def test_a_call_that_another_serves_is_a_failure(
    make: Callable[..., Subject], algorithm: Fake, room: bool, reason: str
) -> None:
    ctx, subject = context(), make("fake", algorithm, room)
    for _ in range(2):
        subject.call(ctx, request())
    assert ctx.failures == [f"fake did not serve [4, 8], another did: {reason}"]


def test_results_that_lie_in_the_slot_are_copied_and_then_overwritten_there(make: Callable[..., Subject]) -> None:
    ctx, subject = context(), make("stream_in_slot", Fake(in_slot=True))
    hidden, _ = subject.start(ctx, request())
    assert torch.equal(hidden, torch.full((4, 8), 3.0))
    buffers = subject.state(request()).slots[0].buffers
    assert torch.equal(buffers["x"].view((4, 8), torch.float32), request().x)
    assert buffers["hidden"].view((4, 8), torch.float32).isnan().all()
    assert ctx.failures == []


def test_results_outside_of_the_slot_are_a_failure_of_a_transport_in_the_slot(make: Callable[..., Subject]) -> None:
    ctx, subject = context(), make("stream_in_slot", Fake())
    subject.start(ctx, request())
    assert ctx.failures == ["hidden [4, 8] is not in the slot's memory"]


def test_calls_of_a_form_that_was_served_are_launches_too(
    make: Callable[..., Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    enqueued = []
    kernel = SimpleNamespace(launch=lambda params, **options: enqueued.append(options))

    def launch(self: Fake, request: Request, *rest: object) -> Started:
        results = request.allocate(2)
        call = Call(kernel, [(PushParams(), 4)], {}, lambda: results[0], lambda: results[1])
        return Started(*call.enqueue(operands_of(request), results, 0), call=call)

    monkeypatch.setattr(Fake, "launch", launch)
    subject, served = make("fake", Fake()), replace(request(), form="of its own")
    subject.transport.start(served)
    known = subject.transport.known("g", DEVICE, "of its own")
    assert known is not None
    known.call.enqueue(operands_of(served), None, 0)
    assert len(enqueued) == subject.algorithm.launches == 2
    known.call.enqueue(operands_of(served)._replace(x=subject.state(served).slots[0].buffers["x"].tensor), None, 0)
    assert subject.algorithm.launches_in_slot == 1


@pytest.fixture
def factors(monkeypatch: pytest.MonkeyPatch) -> Factors:
    """Of the message of :func:`request`, all of whose elements are 1."""
    monkeypatch.setattr(
        p2p.P2PTransport, "choose", lambda self, asked: (asked, self.states["g", DEVICE], self.algorithm)
    )
    return torch.full((4, 2), 0.5), torch.ones(2, 8)


def test_factors_are_multiplied_in_the_slot(make: Callable[..., Subject], factors: Factors) -> None:
    ctx, subject = context(), make("fake", Fake())
    hidden, residual = subject.call(ctx, replace(request(), x=torch.full((4, 8), 7.0)), factors)
    assert torch.equal(hidden, torch.full((4, 8), 3.0)) and residual.shape == (0, 8)
    assert torch.equal(subject.state(request()).slots[0].buffers["x"].view((4, 8), torch.float32), request().x)
    assert (subject.algorithm.launches, subject.algorithm.launches_in_slot) == (1, 1)
    assert ctx.failures == []


def test_results_of_factors_that_lie_in_the_slot_are_copied(make: Callable[..., Subject], factors: Factors) -> None:
    ctx, subject = context(), make("stream_in_slot", Fake(in_slot=True))
    hidden, _ = subject.start(ctx, request(), factors)
    assert torch.equal(hidden, torch.full((4, 8), 3.0))
    assert subject.state(request()).slots[0].buffers["hidden"].view((4, 8), torch.float32).isnan().all()
    assert ctx.failures == []


def test_a_product_elsewhere_is_a_failure_if_peers_could_read_it_in_the_slot(
    make: Callable[..., Subject], factors: Factors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(p2p.P2PTransport, "message_buffer", lambda self, request: None)
    ctx, subject = context(), make("fake", Fake())
    subject.start(ctx, request(), factors)
    assert ctx.failures == ["fake: the product [4, 8] was not made in the slot's memory"]
    ctx = context()
    monkeypatch.setattr(Fake, "needs", lambda self, request, world_size: {})
    subject.start(ctx, request(), factors)
    assert ctx.failures == []


def test_new_memory_is_nan_only_inside() -> None:
    with transports.new_memory_is_nan():
        assert torch.ones(3).new_empty((4, 5), dtype=torch.bfloat16).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_every_algorithm_of_the_registry_is_another_one() -> None:
    others = [name for name in ALGORITHMS if name not in IN_SLOT]  # those are others of them, asked otherwise
    made = [vars(ALGORITHMS[name]()) | {"class": type(ALGORITHMS[name]())} for name in others]
    assert len(made) == 12
    assert all(one != other for index, one in enumerate(made) for other in made[:index])
