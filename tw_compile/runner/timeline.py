"""Trace a forward, and measure which share of its communication is hidden by computation on other streams.

The trace is torch.profiler's, in the format of Chrome and Perfetto. Communication kernels are recognised by their names: our
kernels, NCCL's, those of torch's symmetric memory, and on a CPU gloo's work. A kernel that waits for another rank counts as
communication.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Interval = tuple[float, float]

_COMMUNICATION = re.compile(
    r"^(push|stream|multimem)$|^all_reduce_rms_norm_kernel|^nccl|^gloo:|c10d.*(one_shot|two_shot|multimem)_all_reduce"
)
_GPU, _CPU = "kernel", ("cpu_op", "user_annotation")
_FORWARD = "tw_compile: forward"


@dataclass(frozen=True)
class TracedKernel:
    """One kernel; microseconds. Kernels with equal ``stream``, which on a CPU is a thread, never run beside each other."""

    name: str
    stream: tuple[Any, Any]
    begin: float
    end: float

    @property
    def communicates(self) -> bool:
        return _COMMUNICATION.search(self.name) is not None


@dataclass(frozen=True)
class Hidden:
    """Microseconds of communication, added up over streams, and the part of it during which another stream computes."""

    communication_us: float
    hidden_us: float
    span_us: float

    @property
    def share(self) -> float | None:
        """From 0 to 1; None without communication."""
        return self.hidden_us / self.communication_us if self.communication_us else None

    def as_dict(self) -> dict[str, float | None]:
        return vars(self) | {"share": self.share}


def kernels(events: Iterable[dict[str, Any]], since: float = -math.inf) -> list[TracedKernel]:
    """The GPU kernels in a trace's ``traceEvents``; where there are none, gloo's work and ATen's operators.

    Gloo's work and ATen's operators count only if they begin at ``since`` or later, because the ranks meet by gloo before that.
    On GPUs this meeting adds no kernels.
    """
    timed = [event for event in events if event.get("ph") == "X" and event.get("dur", 0) > 0]
    chosen = [event for event in timed if event.get("cat") == _GPU]
    if not chosen:
        chosen = [
            event
            for event in timed
            if event.get("cat") in _CPU and event["name"].startswith(("gloo:", "aten::")) and event["ts"] >= since
        ]
    return [
        TracedKernel(event["name"], (event.get("pid"), event.get("tid")), event["ts"], event["ts"] + event["dur"])
        for event in chosen
    ]


def hidden_communication(ran: Sequence[TracedKernel]) -> Hidden:
    """How much of the time in which one stream communicates is covered by another stream's computation."""
    communication: defaultdict[Any, list[Interval]] = defaultdict(list)
    compute: defaultdict[Any, list[Interval]] = defaultdict(list)
    for kernel in ran:
        (communication if kernel.communicates else compute)[kernel.stream].append((kernel.begin, kernel.end))
    total = hidden = 0.0
    for stream, intervals in communication.items():
        busy = union(intervals)
        beside = union([interval for other, theirs in compute.items() if other != stream for interval in theirs])
        total += sum(end - begin for begin, end in busy)
        hidden += overlap(busy, beside)
    span = max((kernel.end for kernel in ran), default=0.0) - min((kernel.begin for kernel in ran), default=0.0)
    return Hidden(total, min(hidden, total), span)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge ``intervals`` into disjoint intervals in order, which cover the same points."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def overlap(busy: Sequence[Interval], beside: Sequence[Interval]) -> float:
    """The length that both ``busy`` and ``beside`` cover; the intervals of each must be disjoint and in order."""
    length, first, second = 0.0, 0, 0
    while first < len(busy) and second < len(beside):
        length += max(0.0, min(busy[first][1], beside[second][1]) - max(busy[first][0], beside[second][0]))
        if busy[first][1] < beside[second][1]:
            first += 1
        else:
            second += 1
    return length


def trace_of_rank(file: str, rank: int) -> Path:
    """``trace.json`` -> ``trace.rank0.json``."""
    path = Path(file)
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix or '.json'}")


def profile(step: Callable[[], Any], file: Path, meet: Callable[[], None]) -> Hidden:
    """Run ``step`` twice under torch.profiler, write the trace of the second run, and measure what that run hides.

    The first run pays for what profiling does once, such as allocating its buffers. ``meet`` returns when all ranks have called
    it, and puts nothing on a GPU. It is needed because starting to record takes some ms more on one rank than on another: the
    kernels of a rank that began early would wait for the other ranks that long.
    """
    on_gpu = torch.cuda.is_initialized()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    first_is_dropped = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    with torch.profiler.profile(activities=activities, schedule=first_is_dropped, acc_events=True) as profiler:
        step()
        if on_gpu:
            torch.cuda.synchronize()
        profiler.step()
        meet()
        with torch.profiler.record_function(_FORWARD):
            step()
            if on_gpu:
                torch.cuda.synchronize()
    profiler.export_chrome_trace(str(file))
    events = json.loads(file.read_text())["traceEvents"]
    begin = next(event["ts"] for event in events if event.get("name") == _FORWARD and event["cat"] == "user_annotation")
    return hidden_communication(kernels(events, begin))
