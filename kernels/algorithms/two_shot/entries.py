"""The registry entry of two-shot in Triton."""

from __future__ import annotations

from tw_compile.kernels.algorithms.entry import AlgorithmEntry, Checked

SERVES_ALL = AlgorithmEntry(
    "two_shot",
    "tw_compile.kernels.algorithms.two_shot.two_shot:TwoShot",
    serves_all=True,
    checked=(Checked("p2p"),),
)
