"""The registry entries of push."""

from __future__ import annotations

from tw_compile.kernels.algorithms.entry import AlgorithmEntry, Checked
from tw_compile.kernels.registry import Benchmarked

_PUSH = "tw_compile.kernels.algorithms.push.push:Push"

ONE_SHOT = AlgorithmEntry(
    "push_one_shot",
    _PUSH,
    (("one_shot", True),),
    sms=128,
    most_sms=128,
    needs_whole_residual=True,
    scales=True,
    prefetches=True,
    instead="push_two_shot",  # a message that it can't serve without the whole residual is still small
    benchmarked=(Benchmarked("tw-push-one-shot", sharded=False),),
    checked=(Checked("push_one_shot", beside=False),),
)
CLUSTERS = AlgorithmEntry(
    "push_one_shot_clusters",
    _PUSH,
    (("one_shot", True), ("cluster", 4)),
    sms=128,
    most_sms=128,
    needs_whole_residual=True,
    instead="push_two_shot",
    tuned=False,
    benchmarked=(Benchmarked("tw-push-one-shot-clusters", sharded=False),),
    checked=(Checked("push_one_shot_clusters", beside=False),),
)
FED = AlgorithmEntry(
    "push_fed", "tw_compile.kernels.algorithms.push.fed_push:FedPush", sms=128, most_sms=128, feeds=True
)
TWO_SHOT = AlgorithmEntry(
    "push_two_shot",
    _PUSH,
    (("one_shot", False),),
    sms=128,
    most_sms=128,
    beside=1,
    two_whole="push_one_shot",
    wires=True,
    scales=True,
    prefetches=True,
    profile="push",
    benchmarked=(
        Benchmarked("tw-push-two-shot", sharded=True),
        Benchmarked("tw-push-two-shot-fp8", sharded=True, quantises=True),
        Benchmarked("tw-push-two-shot-fp8-token", sharded=True, quantises=True, scales="token"),
        Benchmarked("tw-push-two-shot-fp8-group", sharded=True, quantises=True, scales="group"),
    ),
    checked=(Checked("push_two_shot"),),
)
