"""The registry entry of multimem."""

from __future__ import annotations

from tw_compile.kernels.algorithms.entry import AlgorithmEntry, Checked
from tw_compile.kernels.registry import Benchmarked

MULTIMEM = AlgorithmEntry(
    "multimem",
    "tw_compile.kernels.algorithms.multimem.multimem:Multimem",
    transport="multimem",  # only its slots are asked for multicast addresses
    sms=16,
    most_sms=32,
    needs_multicast=True,
    benchmarked=(Benchmarked("tw-multimem", sharded=True),),
    # With ``emulated``, loads from peers and stores to them replace the switch's instructions, so any node can run the checks.
    checked=(
        Checked("emulated_multimem", (("emulated", True),)),
        Checked("emulated_multimem_in_slot", (("emulated", True),), beside=False, in_slot=True),
    ),
)
