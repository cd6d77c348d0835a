"""Two-shot in Triton as the registry knows it."""

from __future__ import annotations

from tw_compile.kernels.algorithms.entry import AlgorithmEntry, Checked

SERVES_ALL = AlgorithmEntry(
    "two_shot",
    "tw_compile.kernels.algorithms.two_shot.two_shot:TwoShot",
    serves_all=True,
    # With multicast emulated there are loops in the place of the switch's instructions.
    checked=(Checked("p2p"), Checked("emulated_multicast", (("emulate_multimem", True),))),
)
