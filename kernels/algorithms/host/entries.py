"""The registry entries of the kernels over host memory."""

from __future__ import annotations

from tw_compile.kernels.algorithms.entry import AlgorithmEntry, Checked
from tw_compile.kernels.registry import Benchmarked

_ROWS = "tw_compile.kernels.algorithms.host.host_rows:HostRows"

WORDS = AlgorithmEntry(
    "host_words",
    "tw_compile.kernels.algorithms.host.host_words:HostWords",
    transport="host",
    sms=32,  # so a CTA reads one row while it sends the next one
    most_sms=128,
    needs_whole_residual=True,
    scales=True,
    prefetches=True,
    instead="host_two_shot",
    benchmarked=(Benchmarked("tw-host-words", sharded=False),),
    checked=(Checked("host_words", beside=False),),
)
ONE_SHOT = AlgorithmEntry(
    "host_one_shot",
    _ROWS,
    (("one_shot", True),),
    transport="host",
    sms=8,  # with more it is slower
    most_sms=24,
    two_beside_bytes=2**23,
    needs_whole_residual=True,
    scales=True,
    instead="host_two_shot",
    benchmarked=(Benchmarked("tw-host-one-shot", sharded=False),),
    checked=(Checked("host_one_shot"),),
)
TWO_SHOT = AlgorithmEntry(
    "host_two_shot",
    _ROWS,
    (("one_shot", False),),
    transport="host",
    sms=8,
    most_sms=24,
    wire_sms=16,  # codes are work for SMs
    two_wire_sms=24,  # measured: 1% to 5% faster than 16. But four ranks' int8 takes 2% to 14% longer on 24.
    beside=0,
    two_whole="host_one_shot",
    serves_all=True,
    wires=True,
    scales=True,
    benchmarked=(Benchmarked("tw-host-two-shot", sharded=True),),
    checked=(Checked("host_two_shot"),),
)
