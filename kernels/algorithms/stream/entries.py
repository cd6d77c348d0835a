"""The registry entry of stream."""

from __future__ import annotations

from tw_compile.kernels.algorithms.entry import AlgorithmEntry, Checked
from tw_compile.kernels.registry import Benchmarked

STREAM = AlgorithmEntry(
    "stream",
    "tw_compile.kernels.algorithms.stream.stream:Stream",
    sms=16,
    most_sms=32,
    beside=0,  # tried first, because it makes the most of few SMs
    scales=True,
    plain_link="pull",
    profile="stream",
    benchmarked=(
        Benchmarked("tw-stream", sharded=True, narrow=True),
        Benchmarked("tw-stream-in-slot", sharded=True, narrow=True, in_slot=True),
        Benchmarked("tw-stream-fp8-token", sharded=True, narrow=True, quantises=True, scales="token"),
        Benchmarked("tw-stream-fp8-group", sharded=True, narrow=True, quantises=True, scales="group"),
    ),
    checked=(Checked("stream"), Checked("stream_in_slot", beside=False, in_slot=True)),
)
