"""What a matmul leaves to a kernel beside it: the choice, and the stand-in's machine code; timing needs a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tw_compile.autotune import measured_reserve as module
from tw_compile.autotune.hold_sms import hold_program
from tw_compile.autotune.measured_reserve import Operand, Reserve, choose, measured_reserve
from tw_compile.kernels.gemm.mm_leaving_sms import mm_leaving_sms

OPERANDS = (Operand((64, 32), (32, 1), torch.bfloat16), Operand((32, 16), (1, 32), torch.bfloat16))


@pytest.mark.parametrize(
    ("planned", "endless", "best"),
    [
        ({0: 120.0, 16: 90.0, 28: 80.0}, {}, Reserve(28, 80.0)),
        ({0: 80.5, 16: 80.0, 28: 90.0}, {0: 120.0, 16: 90.0}, Reserve(16, 80.0)),
        ({0: 80.0, 16: 80.5, 28: 90.0}, {0: 85.0, 16: 85.5}, Reserve(0, 80.0)),
        ({0: 100.0, 16: 80.0, 28: 79.9}, {16: 99.0, 28: 98.5}, Reserve(16, 80.0)),
    ],
)
def test_among_equals_it_is_the_best_beside_a_call_that_does_not_end_then_the_fewest(
    planned: dict[int, float], endless: dict[int, float], best: Reserve
) -> None:
    longest = max(planned.values())
    assert choose(tuple(planned), lambda sms, us: (endless if us > longest else planned)[sms], 50.0) == best


def test_where_only_the_endless_call_can_not_be_measured_the_fewest_equals_are_left() -> None:
    times = iter(range(1000, 10_000_000, 1000))
    assert choose((0, 4), lambda sms, us: 80.0 if us == 0.0 else float(next(times)), 0.0) == Reserve(0, 80.0)


@given(undisturbed=st.sets(st.integers(0, 7), min_size=2))
def test_what_makes_some_trials_longer_does_not_change_the_choice(undisturbed: set[int]) -> None:
    """``undisturbed``: of the trials of two rounds."""
    trials: dict[int, int] = {}

    def trial(sms: int, busy_us: float) -> float:
        number = trials[sms] = trials.get(sms, -1) + 1
        true = {0: 700.0, 4: 600.0, 8: 640.0}[sms]
        return true if number in undisturbed else true + 100.0 * 2**number

    assert choose((0, 4, 8), trial, 50.0) == Reserve(4, 600.0)


def test_a_number_whose_trials_differ_is_left_out() -> None:
    """It is not the fastest: each of its trials is longer than those of a number that can be repeated."""
    slow = iter(range(1000, 10_000_000, 1000))
    assert choose((0, 4, 8), lambda sms, us: {4: 80.0, 8: 90.0}.get(sms) or float(next(slow)), 50.0) == Reserve(4, 80.0)


def test_nothing_is_measured_where_a_number_that_is_left_out_may_be_the_fastest() -> None:
    once = iter([70.0])
    slow = iter(range(1000, 10_000_000, 1000))
    assert choose((0, 4), lambda sms, us: 80.0 if sms else next(once, 0.0) or float(next(slow)), 50.0) is None


def test_nothing_is_measured_where_no_trial_can_be_repeated() -> None:
    times = iter(range(1000, 10_000_000, 1000))
    assert choose((0, 4), lambda sms, us: float(next(times)), 50.0) is None
    assert next(times) < 100_000  # and it ends


def test_nothing_is_measured_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured_reserve(mm_leaving_sms, OPERANDS, torch.device("cpu"), 16, 100.0) is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert measured_reserve(mm_leaving_sms, OPERANDS, torch.device("cuda", 0), 16, 100.0) is None


def test_nothing_is_measured_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(module, "measured_once", lambda *key: pytest.fail("measured"))
    assert measured_reserve(mm_leaving_sms, OPERANDS, torch.device("cuda", 1), 16, 100.0) is None


def test_similar_times_beside_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    capability = (8, 0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(module, "measured_once", lambda *key: asked.append(key))
    found = measured_reserve(mm_leaving_sms, OPERANDS, torch.device("cuda", 1), 16, 100.0)
    assert found is None and not asked  # no room for the stand-in
    capability = (9, 0)
    for busy_us in (0.0, 1.0, 96.0, 104.0):
        measured_reserve(mm_leaving_sms, OPERANDS, torch.device("cuda", 1), 16, busy_us)
    assert asked == [(mm_leaving_sms, OPERANDS, torch.device("cuda", 1), 16, us) for us in (0, 10, 100, 100)]


def test_what_stands_in_for_the_call_has_its_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a GEMM is timed beside the SMs that the call takes, which are pairs of any group."""
    held: list[tuple[int, int]] = []
    event = SimpleNamespace(record=lambda stream: None, synchronize=lambda: None, elapsed_time=lambda end: 1.0)
    stream = SimpleNamespace(wait_event=lambda event: None, wait_stream=lambda other: None)
    for name, value in {
        "current_stream": lambda device: stream,
        "Event": lambda enable_timing: event,
        "get_device_properties": lambda device: SimpleNamespace(multi_processor_count=132),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(module, "side_stream", lambda device, slot: stream)
    monkeypatch.setattr(module, "hold_sms", lambda on, ctas, us, cluster=1: held.append((ctas, cluster)))
    module.time_beside(lambda: None, torch.device("cuda", 0), 16, 50.0)
    assert [(ctas, cluster) for ctas, cluster in held if ctas > 1] == [(16, 2)]


def test_what_a_trial_without_a_matmul_takes_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do its longer ones count; and the call beside it is there for so long after the matmul has begun."""
    for busy_us, with_nothing in ((0, 0.0), (50, 57.0)):
        ran, beside = measure_with(monkeypatch, (9.0, 7.0, 8.0, 7.0), 107.0, busy_us)
        assert ran == Reserve(0, 100.0)
        assert beside == {with_nothing, 1.5 * 100.0 + 7.0}


@pytest.mark.parametrize(
    ("nothing", "us"), [((7.0, 9.0) * 10, 7.0), ((7.0, 7.0, 7.0, 7.0), 6.5), (range(7, 200, 3), 207.0)]
)
def test_nothing_is_measured_where_a_trial_of_nothing_takes_as_long_or_can_not_be_repeated(
    monkeypatch: pytest.MonkeyPatch, nothing: Iterable[float], us: float
) -> None:
    assert measure_with(monkeypatch, nothing, us, 50)[0] is None


def measure_with(
    monkeypatch: pytest.MonkeyPatch, nothing: Iterable[float], us: float, busy_us: int
) -> tuple[Reserve | None, set[float]]:
    """What is found where trials of nothing take ``nothing`` in turn and others ``us``; how long calls were beside these."""
    of_nothing, ran, beside = iter(nothing), [], set()

    def time_beside(matmul: Callable[[], object], device: torch.device, ctas: int, busy_us: float) -> float:
        before = len(ran)
        matmul()
        if len(ran) == before:
            assert not busy_us
            return next(of_nothing)
        beside.add(busy_us)
        return us

    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(module, "time_beside", time_beside)
    operand = Operand((2, 2), (2, 1), torch.bfloat16)
    found = module.measured_once.__wrapped__(
        lambda a, sms: ran.append(sms), (operand,), torch.device("cpu"), 8, busy_us
    )
    assert {*ran} <= {0, 8, 12, 16, 20}
    return found, beside


def test_operands_are_laid_out_as_in_the_graph() -> None:
    made = OPERANDS[1].make(torch.device("cpu"), 64)
    assert (made.shape, made.stride(), made.dtype) == ((32, 16), (1, 32), torch.bfloat16)
    assert made.float().std() > 0.5


def test_rows_are_distributed_over_groups_at_random_but_always_alike() -> None:
    ends = Operand((8,), (1,), torch.int32)
    made = [ends.make(torch.device("cpu"), 4000) for _ in range(2)]
    assert torch.equal(*made) and made[0].dtype == torch.int32 and made[0][-1] == 4000
    counts = made[0].diff(prepend=torch.zeros(1, dtype=torch.int32))
    assert len(set(counts.tolist())) > 1 and counts.min() > 400 and counts.max() < 600
    assert ends.make(torch.device("cpu"), 1).tolist()[-1] == 1, "and there may be fewer rows than groups"


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_stand_in_waits_by_the_clock_of_the_gpu(capability: tuple[int, int]) -> None:
    ptx = hold_program(capability).ptx()
    assert "%globaltimer" in ptx and "nanosleep" in ptx
