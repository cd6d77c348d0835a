"""Our kernels beside a GEMM: which pairs are timed, and what they cost. Imports no torch.

The cost of a pair depends on how many SMs the kernel gets, and on whether the GEMM leaves these SMs to the kernel.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tw_compile.benchmark.results import Row
from tw_compile.benchmark.spec import BenchSpec
from tw_compile.benchmark.variants import OURS, OURS_ON_CPU, Variant
from tw_compile.kernels.algorithms import beside_work
from tw_compile.planning.device import MEASURED_RANKS

KERNELS = tuple(line.label for entry in beside_work("p2p") for line in entry.benchmarked if line.plain)
LEFT_BEYOND = (0, 12)
"""SMs that a GEMM leaves free beyond those of the kernel. The GEMM's clusters need SMs of one group."""


@dataclass(frozen=True)
class LayerMatmul:
    """A matmul of a rank of a Llama-3.3-70B layer, in multiples of hidden: ``[tokens, inner] @ [inner, columns]``."""

    name: str
    inner: float
    columns: float


@dataclass(frozen=True)
class Trial:
    """What is timed at once: a kernel alone, a GEMM alone, or both.

    Attributes:
        sms: The SMs that the kernel gets. None: it chooses by itself.
        reserved: The SMs that the GEMM leaves to others.
    """

    kernel: Variant | None = None
    sms: int | None = None
    gemm: LayerMatmul | None = None
    reserved: int = 0


def gemms(world_size: int) -> tuple[LayerMatmul, ...]:
    """The shortest and the longest GEMM of a layer."""
    return LayerMatmul("o_proj", 1 / world_size, 1), LayerMatmul("gate_up", 1, 7 / world_size)


def kernels(device: str) -> list[Variant]:
    """The kernels that are timed beside GEMMs on devices of this type."""
    return [variant for variant in OURS if variant.label in KERNELS] if device == "cuda" else list(OURS_ON_CPU)


def trials(spec: BenchSpec) -> list[Trial]:
    """Each kernel and GEMM alone, and each pair, for all ``spec.sms``."""
    variants = kernels(spec.device)
    pairs: list[Trial] = []
    alone: list[Trial] = []
    for variant in variants:
        counts: Sequence[int | None] = spec.sms if variant.sms is not None else (None,)
        alone += [Trial(variant, sms) for sms in counts]
    reserves = {sms: (0, *(sms + more for more in LEFT_BEYOND)) for sms in spec.sms}
    for gemm in gemms(spec.world_size):
        alone += [Trial(gemm=gemm, reserved=reserved) for reserved in sorted(set().union(*reserves.values()))]
        pairs += [
            Trial(variant, sms, gemm, reserved)
            for variant in variants
            for sms in spec.sms
            for reserved in reserves[sms]
        ]
    return alone + pairs


@dataclass(frozen=True)
class PairCost:
    """What a kernel beside a GEMM costs at one size; microseconds.

    Attributes:
        alone_us: The time of both, one after the other.
        best_us: The time of the longer one, with the GEMM as fast as on all SMs. No pair can be faster.
        plain_us, leaving_us: The time of both at once: with the GEMM planned for all SMs, and for the best number of fewer SMs.
        left: The SMs that the GEMM leaves free in ``leaving_us``.
        longer: The one that takes longer alone, with the GEMM planned as in the pair.
        contention: The factor by which the longer one was slowed down while the shorter one ran.
    """

    world_size: int
    tokens: int
    kernel: str
    sms: int
    gemm: str
    alone_us: float
    best_us: float
    plain_us: float
    leaving_us: float
    left: int
    longer: Literal["kernel", "gemm"]
    contention: float


def pair_costs(rows: Sequence[Row], spec: BenchSpec) -> list[PairCost]:
    """The costs of every pair whose parts were all timed."""
    times = {(row.label, row.tokens): row.p50_us for row in rows if row.p50_us is not None}
    pairs = []
    for tokens in spec.tokens:
        for variant in [variant.label for variant in kernels(spec.device)]:
            for sms in spec.sms:
                for gemm in gemms(spec.world_size):
                    kernel = times.get((f"{variant}-{sms}sm" if spec.device == "cuda" else variant, tokens))
                    pair = f"{variant} on {sms}, {gemm.name}"
                    plain, whole = (times.get((label, tokens)) for label in (pair, gemm.name))
                    leaving = [
                        (us, sms + more, alone)
                        for more in LEFT_BEYOND
                        if (us := times.get((f"{pair} leaving {sms + more}", tokens)))
                        and (alone := times.get((f"{gemm.name} leaving {sms + more}", tokens)))
                    ]
                    if kernel is None or plain is None or whole is None or not leaving:
                        continue
                    both, left, fewer = min(leaving)
                    longer: Literal["kernel", "gemm"] = "kernel" if kernel > fewer else "gemm"
                    factor = 1.0 + (both - max(kernel, fewer)) / min(kernel, fewer)
                    costs = (kernel + whole, max(kernel, whole), plain, both, left, longer, factor)
                    pairs.append(PairCost(spec.world_size, tokens, variant, sms, gemm.name, *costs))
    return pairs


def contentions(costs: Sequence[PairCost]) -> dict[str, float]:
    """A profile's contention factors, for compute and for communication: medians over the pairs that show them, at least 1."""
    computes = [max(1.0, cost.contention) for cost in costs if cost.longer == "gemm"]
    # A profile has the factor of two ranks, see DeviceProfile.slower_beside.
    communicates = [
        1.0 + max(0.0, cost.contention - 1.0) / (min(cost.world_size, MEASURED_RANKS) - 1)
        for cost in costs
        if cost.longer == "kernel"
    ]
    factors_by_name = {"contention": computes, "communication_contention": communicates}
    return {name: statistics.median(factors) for name, factors in factors_by_name.items() if factors}
