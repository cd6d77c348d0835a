"""Multimem as the registry knows it."""

from __future__ import annotations

from tw_compile.kernels.algorithms.entry import AlgorithmEntry, Checked
from tw_compile.kernels.registry import Benchmarked

MULTIMEM = AlgorithmEntry(
    "multimem",
    "tw_compile.kernels.algorithms.multimem.multimem:Multimem",
    transport="multimem",  # whose slots alone are asked for multicast addresses
    sms=16,
    most_sms=32,
    needs_multicast=True,
    benchmarked=(Benchmarked("tw-multimem", sharded=True),),
    # Loads and stores of peers are in the place of the switch's instructions, so any node can run it.
    checked=(
        Checked("emulated_multimem", (("emulated", True),)),
        Checked("emulated_multimem_in_slot", (("emulated", True),), beside=False, in_slot=True),
    ),
)
