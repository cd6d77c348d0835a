"""How calls are timed, and how times become numbers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from tw_compile import compat
from tw_compile.harness.ranks import Ranks

WARM_UP_ROUNDS = 3
# About 0.25 ms on an H200: longer than the host needs to enqueue one replay.
HEAD_START_CYCLES = 500_000


def gpu_us(work: Callable[[], object]) -> float:
    """Microseconds between events before and behind ``work`` on the current stream. On return the GPU has done the work."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def peak_bytes(work: Callable[[], object]) -> int:
    """The most bytes that ``work`` has allocated at once, beyond what was allocated before."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


class Timer(Protocol):
    """Runs a contender's calls and says how long one took."""

    def run(self) -> float:
        """Microseconds per call on this rank; all ranks must run it at the same time."""


class GraphTimer:
    """Times ``count`` calls, taken in turn from ``calls``, as one CUDA graph between two events on the GPU.

    ``at_once``: see :func:`capture`.
    """

    def __init__(self, calls: Sequence[Callable[[], object]], count: int, at_once: int = 1) -> None:
        self._calls = calls  # a graph holds only addresses: the calls keep their inputs alive
        self._graph = capture(calls, count, at_once)
        self._count = count
        self._one = torch.ones(1, device="cuda")

    def run(self) -> float:
        # Everything is in the queue when the GPUs meet in the all_reduce, so no rank's clock runs while another still launches.
        compat.delay_stream(HEAD_START_CYCLES)
        dist.all_reduce(self._one, op=dist.ReduceOp.MAX)
        return gpu_us(self._graph.replay) / self._count


def capture(calls: Sequence[Callable[[], object]], count: int, at_once: int = 1) -> torch.cuda.CUDAGraph:
    """Capture ``count`` calls, taken in turn from ``calls``, as a CUDA graph.

    All calls must have run before: during capture nothing can be compiled, and ranks can't agree on anything. ``at_once``: on
    so many streams, in turn. Calls of different streams may be on their way at the same time.
    """
    graph = torch.cuda.CUDAGraph()
    causes: list[Exception] = []
    torch.cuda.synchronize()
    try:
        # Other threads (NCCL's watchdog) may query events meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            try:
                with _streams(at_once) as streams:
                    for index in range(count):
                        with streams[index % at_once]():
                            calls[index % len(calls)]()
            except Exception as error:
                causes.append(error)
                raise
    except Exception as error:
        # Ending a broken capture fails in its own way, which says nothing about the cause.
        raise causes[0] if causes else error from None
    return graph


@contextmanager
def _streams(count: int) -> Iterator[list[Callable[[], AbstractContextManager[object]]]]:
    """What enters each of ``count`` streams: the current one, or others that begin after it and end before it goes on."""
    if count == 1:
        yield [nullcontext]
        return
    current, others = torch.cuda.current_stream(), [torch.cuda.Stream() for _ in range(count)]
    for other in others:
        other.wait_stream(current)
    yield [partial(torch.cuda.stream, other) for other in others]
    for other in others:
        current.wait_stream(other)


class LoopTimer:
    """Times ``count`` calls, taken in turn from ``calls``, by the host's clock."""

    def __init__(self, calls: Sequence[Callable[[], object]], count: int) -> None:
        self._calls = calls
        self._count = count

    def run(self) -> float:
        begin = time.perf_counter()
        for index in range(self._count):
            self._calls[index % len(self._calls)]()
        return (time.perf_counter() - begin) * 1e6 / self._count


def interleaved(ranks: Ranks, timers: Mapping[str, Timer], repeats: int) -> dict[str, list[float]]:
    """By label, the microseconds of one call in each repeat, on the slowest rank."""
    own: dict[str, list[float]] = {label: [] for label in timers}
    for number, label in round_robin(list(timers), WARM_UP_ROUNDS + repeats):
        ranks.barrier()
        microseconds = timers[label].run()
        if number >= WARM_UP_ROUNDS:
            own[label].append(microseconds)
    by_rank = ranks.gather(own)
    return {label: slowest([times[label] for times in by_rank]) for label in timers}


def round_robin(labels: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yield ``(round, label)``, each label once a round, beginning with another one each time.

    So a drift of the clocks hits all labels alike.
    """
    for number in range(rounds):
        begin = number % len(labels) if labels else 0
        for label in (*labels[begin:], *labels[:begin]):
            yield number, label


def slowest(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """The time of the slowest rank in every repeat: a call is done when the last rank has its rows."""
    return [max(repeat) for repeat in zip(*by_rank, strict=True)]


def percentiles(times: Sequence[float]) -> tuple[float, float, float]:
    """The 20th, 50th and 80th percentile of at least two times."""
    tenths = statistics.quantiles(times, n=10, method="inclusive")
    return tenths[1], tenths[4], tenths[7]
