"""Stream as the registry knows it."""

from __future__ import annotations

from tw_compile.kernels.algorithms.entry import AlgorithmEntry, Checked
from tw_compile.kernels.registry import Benchmarked

STREAM = AlgorithmEntry(
    "stream",
    "tw_compile.kernels.algorithms.stream.stream:Stream",
    sms=16,
    most_sms=32,
    beside=0,  # on few SMs it makes the most of them
    profile="stream",
    benchmarked=(
        Benchmarked("tw-stream", sharded=True, narrow=True),
        Benchmarked("tw-stream-in-slot", sharded=True, narrow=True, in_slot=True),
    ),
    checked=(Checked("stream"), Checked("stream_in_slot", beside=False, in_slot=True)),
)
