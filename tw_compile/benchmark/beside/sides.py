"""Runs two sides, calls and GEMMs, alone or at once, and says how long one of them took.

Of two sides that run at once, one *covers* the other: it begins earlier and ends later. Only the covered side's time counts, so
all of this time has the other side beside it. This is made sure in three steps:

1. All is in the GPU's queues before a gate opens, at which the ranks meet. The covering side begins with one item, a call or a
   GEMM, and goes on with many. The covered side begins when that one item has ended, with an item that is not timed. Its time
   begins behind that. So when the clock starts, the covering side has run one item alone and others beside the untimed one.
2. The covering side has so many items that by the times alone it needs ``spec.SPARE`` times as long, and more if trial runs
   say so (``rank.py``).
3. Both ends are measured in each run (:class:`Covered`). A row in which one run was not covered gets no ratio.

On GPUs each side is two CUDA graphs, on one of two streams, and events tell the times. A call of ``overlap_sms`` is captured as
in a split layer: its kernel is on a side stream of high priority, between a fork and a join. On a CPU the covering side runs in
a thread. That is a rehearsal of the same steps, and its times mean nothing.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from tw_compile import compat
from tw_compile.harness.measure import HEAD_START_CYCLES, capture

Item = Callable[[], object]
_HEAD_STARTS = 4
"""The host enqueues more than one replay before the gate opens."""
_SETTLED_US = 5.0
"""The least time of the covered side's untimed item on a GPU. Meanwhile the covering side's second graph begins: it is in the
queue already."""


@dataclass(frozen=True)
class Covered:
    """One run of both sides.

    Attributes:
        us: Microseconds of an item of the covered side.
        lead_us: How long the covering side had run on behind its first item when the covered side's clock started.
        tail_us: How long the covering side ran on when the covered side had ended. Below 0: it ended earlier.
        least_lead_us: ``lead_us`` must be longer, or the covering side may not have gone on yet.
    """

    us: float
    lead_us: float
    tail_us: float
    least_lead_us: float = 0.0

    @property
    def whole(self) -> bool:
        """Whether the other side ran all the time."""
        return self.lead_us > self.least_lead_us and self.tail_us > 0.0


@dataclass(frozen=True)
class Lane:
    """The items of one side: ``first`` runs one of them, ``rest`` runs ``count``. ``calls`` keep what graphs point to."""

    calls: Sequence[Item]
    count: int
    first: Item
    rest: Item


class Sides(ABC):
    """How lanes are made and run on a type of device. All ranks run the same lanes at the same time."""

    @abstractmethod
    def lane(self, calls: Sequence[Item], count: int) -> Lane:
        """A lane of ``count`` items, taken in turn from ``calls``. All calls must have run before."""

    @abstractmethod
    def alone(self, lane: Lane) -> float:
        """Microseconds of an item with nothing beside it."""

    @abstractmethod
    def both(self, covering: Lane, covered: Lane) -> Covered:
        """Run both lanes at once."""


class OnGpu(Sides):
    """Lanes are CUDA graphs."""

    def __init__(self) -> None:
        self._one = torch.ones(1, device="cuda")
        # Made one after the other: streams that share one of the GPU's queues would wait for each other.
        self._covering, self._own = torch.cuda.Stream(), torch.cuda.Stream()

    def lane(self, calls: Sequence[Item], count: int) -> Lane:
        """See :class:`Sides`."""
        return Lane(calls, count, capture(calls, 1).replay, capture(calls, count).replay)

    def alone(self, lane: Lane) -> float:
        """See :class:`Sides`."""
        begin, end = _timed(lane, self._own, self._gate())
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / lane.count

    def both(self, covering: Lane, covered: Lane) -> Covered:
        """See :class:`Sides`."""
        went_on, ended = _timed(covering, self._covering, self._gate())
        begin, end = _timed(covered, self._own, went_on)
        end.synchronize()
        ended.synchronize()
        return Covered(
            begin.elapsed_time(end) * 1e3 / covered.count,
            went_on.elapsed_time(begin) * 1e3,
            end.elapsed_time(ended) * 1e3,
            _SETTLED_US,
        )

    def _gate(self) -> torch.cuda.Event:
        """An event behind a meeting of all GPUs, before which the host has time to enqueue what waits for it."""
        for _ in range(_HEAD_STARTS):
            compat.delay_stream(HEAD_START_CYCLES)
        dist.all_reduce(self._one, op=dist.ReduceOp.MAX)
        gate = torch.cuda.Event()
        gate.record()
        return gate


def _timed(lane: Lane, stream: torch.cuda.Stream, gate: torch.cuda.Event) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Enqueue a lane behind ``gate``; the events are behind its first item and behind its last."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        gate.wait()
        lane.first()
        begin.record()
        lane.rest()
        end.record()
    return begin, end


class OnCpu(Sides):
    """Lanes are loops; the host's clock tells the times."""

    def lane(self, calls: Sequence[Item], count: int) -> Lane:
        """See :class:`Sides`."""

        def rest() -> None:
            for index in range(count):
                calls[index % len(calls)]()

        return Lane(calls, count, calls[0], rest)

    def alone(self, lane: Lane) -> float:
        """See :class:`Sides`."""
        begin, end = _clocked(lane)
        return (end - begin) * 1e6 / lane.count

    def both(self, covering: Lane, covered: Lane) -> Covered:
        """See :class:`Sides`."""
        went_on = threading.Event()
        times: list[tuple[float, float]] = []
        errors: list[BaseException] = []

        def cover() -> None:
            try:
                torch.set_num_threads(1)  # both are settings of a thread
                with torch.no_grad():
                    times.append(_clocked(covering, went_on.set))
            except BaseException as error:
                errors.append(error)
            finally:
                went_on.set()

        thread = threading.Thread(target=cover)
        thread.start()
        went_on.wait()
        begin, end = _clocked(covered)
        thread.join()
        if errors:
            raise errors[0]
        ((since, ended),) = times
        return Covered((end - begin) * 1e6 / covered.count, (begin - since) * 1e6, (ended - end) * 1e6)


def _clocked(lane: Lane, between: Callable[[], None] = lambda: None) -> tuple[float, float]:
    """Run a lane; the times behind its first item and behind its last. ``between`` is called in between."""
    lane.first()
    begin = time.perf_counter()
    between()
    lane.rest()
    return begin, time.perf_counter()


@dataclass(frozen=True)
class Alone:
    """A timer of a lane with nothing beside it."""

    sides: Sides
    lane: Lane

    def run(self) -> float:
        """See :class:`~tw_compile.harness.measure.Timer`."""
        return self.sides.alone(self.lane)


@dataclass
class AtOnce:
    """A timer of the covered lane while the covering one runs. ``runs`` has all its runs."""

    sides: Sides
    covering: Lane
    covered: Lane
    runs: list[Covered] = field(default_factory=list)

    def run(self) -> float:
        """See :class:`~tw_compile.harness.measure.Timer`."""
        self.runs.append(self.sides.both(self.covering, self.covered))
        return self.runs[-1].us


class Watched:
    """A call that keeps its last result. In a graph that is the memory into which a replay writes."""

    def __init__(self, call: Item) -> None:
        self._call = call
        self.result: object = None

    def __call__(self) -> object:
        self.result = self._call()
        return self.result
