"""The registry entries of push."""

from __future__ import annotations

from tw_compile.kernels.algorithms.entry import AlgorithmEntry, Checked
from tw_compile.kernels.registry import Benchmarked

_PUSH = "tw_compile.kernels.algorithms.push.push:Push"
_SHARING = "tw_compile.kernels.algorithms.push.sharing_push:SharingPush"
CLUSTERS = {4: "clusters", 2: "pairs"}
"""Numbers of CTAs that may share a row, the most first, and what a call's name says of them."""

ONE_SHOT = AlgorithmEntry(
    "push_one_shot",
    _SHARING,
    (("one_shot", True),),
    sms=128,
    most_sms=128,
    needs_whole_residual=True,
    scales=True,
    prefetches=True,
    plain_link="push",
    instead="push_two_shot",  # a message that it can't serve without the whole residual is still small
    benchmarked=(
        Benchmarked("tw-push-one-shot", sharded=False),
        Benchmarked("tw-push-one-shot-fp8-token", sharded=False, quantises=True, scales="token"),
        Benchmarked("tw-push-one-shot-fp8-group", sharded=False, quantises=True, scales="group"),
    ),
    checked=(Checked("push_one_shot", beside=False),),
)
FED = AlgorithmEntry(
    "push_fed", "tw_compile.kernels.algorithms.push.fed_push:FedPush", sms=128, most_sms=128, feeds=True
)
TWO_SHOT = AlgorithmEntry(
    "push_two_shot",
    _SHARING,
    (("one_shot", False),),
    sms=128,
    most_sms=128,
    beside=1,
    two_whole="push_one_shot",
    wires=True,
    scales=True,
    prefetches=True,
    plain_link="push",
    profile="push",
    benchmarked=(
        Benchmarked("tw-push-two-shot", sharded=True),
        Benchmarked("tw-push-two-shot-fp8", sharded=True, quantises=True),
        Benchmarked("tw-push-two-shot-fp8-token", sharded=True, quantises=True, scales="token"),
        Benchmarked("tw-push-two-shot-fp8-group", sharded=True, quantises=True, scales="group"),
    ),
    checked=(Checked("push_two_shot"),),
)


def _forced(name: str, one_shot: bool, cluster: int) -> AlgorithmEntry:
    """One way of :class:`SharingPush` for all messages: what it chooses by their rows can be timed and checked against it."""
    label, sharded = "tw-" + name.replace("_", "-"), not one_shot
    return AlgorithmEntry(
        name,
        _PUSH,
        (("one_shot", one_shot), ("cluster", cluster)),
        sms=128,
        most_sms=128,
        needs_whole_residual=one_shot,
        prefetches=True,
        instead="push_two_shot" if one_shot else None,
        benchmarked=(
            Benchmarked(label, sharded, on_request=True),
            Benchmarked(f"{label}-fp8-token", sharded, quantises=True, scales="token", on_request=True),
        ),
        checked=(Checked(name, beside=False),) if cluster > 1 else (),
    )


FORCED = tuple(
    _forced(f"{name}_{way}", one_shot, cluster)
    for name, one_shot in (("push_one_shot", True), ("push_two_shot", False))
    for cluster, way in {1: "ctas", **CLUSTERS}.items()
)
