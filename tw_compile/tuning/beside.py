"""Our kernels beside a GEMM: what the pair costs, by the SMs that the kernel gets and by whether the GEMM leaves them to it."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal

import torch

from tw_compile.benchmark.contender import Contender, ContenderCall
from tw_compile.benchmark.ours import OURS, OURS_ON_CPU, Operator, Variant
from tw_compile.benchmark.results import Row
from tw_compile.benchmark.spec import BenchSpec
from tw_compile.benchmark.worker import run_rank
from tw_compile.harness.problems import Problem
from tw_compile.harness.ranks import Ranks, work_as_rank
from tw_compile.kernels.algorithms import beside_work
from tw_compile.kernels.gemm.mm_leaving_sms import mm_leaving_sms
from tw_compile.planning.device import MEASURED_RANKS

KERNELS = tuple(line.label for entry in beside_work("p2p") for line in entry.benchmarked if line.plain)
LEFT_BEYOND = (0, 12)
"""SMs that a GEMM leaves beyond those of the kernel: its clusters need SMs of one group."""
_TOLERANCE = 2**-6
"""Of a product's root mean square: cuBLAS may add up in another order when it plans for fewer SMs."""


@dataclass(frozen=True)
class LayerMatmul:
    """A matmul of a rank of a Llama-3.3-70B layer, in multiples of hidden: ``[tokens, inner] @ [inner, columns]``."""

    name: str
    inner: float
    columns: float

    def operands(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For messages like ``x [tokens, hidden]``; the same tensors for all contenders."""
        tokens, hidden = x.shape
        return _operands(x.device, x.dtype, tokens, int(self.inner * hidden), int(self.columns * hidden))


@functools.lru_cache(maxsize=4)
def _operands(
    device: torch.device, dtype: torch.dtype, tokens: int, inner: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    a, b = (
        torch.randn(shape, generator=generator, device=device, dtype=dtype)
        for shape in ((tokens, inner), (inner, columns))
    )
    return a, b


def gemms(world_size: int) -> tuple[LayerMatmul, ...]:
    """The shortest and the longest of a layer."""
    return LayerMatmul("o_proj", 1 / world_size, 1), LayerMatmul("gate_up", 1, 7 / world_size)


class GemmAlone(Contender):
    """The GEMM by itself, planned for all but ``reserved`` SMs."""

    kind = "bound"
    reduces = False

    def __init__(self, gemm: LayerMatmul, reserved: int) -> None:
        self.label = gemm.name + (f" leaving {reserved}" if reserved else "")
        self._gemm, self._reserved = gemm, reserved

    def prepare(self, ranks: Ranks, problem: Problem) -> ContenderCall:
        a, b = self._gemm.operands(problem.x)

        def call() -> tuple[torch.Tensor, torch.Tensor]:
            product = mm_leaving_sms(a, b, self._reserved)
            return product, product

        return call


class Beside(Operator):
    """A kernel on ``sms`` SMs on a stream of its own, while the current stream multiplies, leaving ``reserved`` SMs."""

    def __init__(self, variant: Variant, sms: int, gemm: LayerMatmul, reserved: int) -> None:
        super().__init__(variant, sms if variant.sms is not None else None)
        self.label = f"{variant.label} on {sms}, {gemm.name}" + (f" leaving {reserved}" if reserved else "")
        self.residual_narrow = True
        self.algorithm = None  # of no use to a table for messages that travel alone
        self._overlap_sms, self._gemm, self._reserved = sms, gemm, reserved
        self._product: torch.Tensor | None = None

    def meanwhile(self, problem: Problem) -> Callable[[], None]:
        a, b = self._gemm.operands(problem.x)

        def multiply() -> None:
            self._product = mm_leaving_sms(a, b, self._reserved)

        self._expected = functools.partial(torch.mm, a, b)
        return multiply

    def deviation(self, ranks: Ranks) -> str | None:
        assert self._product is not None
        want = self._expected().float()
        worst = float((self._product.float() - want).abs().max() / want.square().mean().sqrt())
        if not worst <= _TOLERANCE * max(1.0, float(want.abs().max() / want.square().mean().sqrt())):
            return f"the product beside it is off by {worst:.2g} of its root mean square"
        return super().deviation(ranks)


def beside_contenders(spec: BenchSpec) -> list[Contender]:
    """Each kernel and GEMM alone, and each pair, for all ``spec.sms``."""
    variants = [variant for variant in OURS if variant.label in KERNELS] if spec.device == "cuda" else list(OURS_ON_CPU)
    pairs: list[Contender] = []
    alone: list[Contender] = []
    for variant in variants:
        counts: Sequence[int | None] = spec.sms if variant.sms is not None else (None,)
        alone += [Operator(variant, sms) for sms in counts]
    reserves = {sms: (0, *(sms + more for more in LEFT_BEYOND)) for sms in spec.sms}
    for gemm in gemms(spec.world_size):
        alone += [GemmAlone(gemm, reserved) for reserved in sorted(set().union(*reserves.values()))]
        pairs += [
            Beside(variant, sms, gemm, reserved)
            for variant in variants
            for sms in spec.sms
            for reserved in reserves[sms]
        ]
    return alone + pairs


def rank_process(spec: BenchSpec, rank: int, scratch: str, messages: Connection) -> None:
    """Entry point of a spawned rank."""
    work_as_rank(spec, rank, scratch, messages, functools.partial(run_rank, spec, beside_contenders))


@dataclass(frozen=True)
class PairCost:
    """What a kernel beside a GEMM costs at one size; microseconds.

    Attributes:
        alone_us: One after the other.
        best_us: The longer of the two, the GEMM as fast as on all SMs.
        plain_us, leaving_us: Both at once, the GEMM planned for all SMs, and for fewer, as few as is best of those tried.
        left: SMs that it then leaves.
        longer: Which of the two takes longer alone, the GEMM planned as in the pair.
        contention: By what factor the longer one was slower while the shorter one ran.
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
    """Every pair of which all parts were timed."""
    times = {(row.label, row.tokens): row.p50_us for row in rows if row.p50_us is not None}
    pairs = []
    for tokens in spec.tokens:
        for variant in KERNELS if spec.device == "cuda" else [ours.label for ours in OURS_ON_CPU]:
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
    """A profile's factors on what computes and on what communicates: medians, at least 1, of the pairs that show them."""
    computes = [max(1.0, cost.contention) for cost in costs if cost.longer == "gemm"]
    # A profile has the factor of two ranks, see DeviceProfile.slower_beside.
    communicates = [
        1.0 + max(0.0, cost.contention - 1.0) / (min(cost.world_size, MEASURED_RANKS) - 1)
        for cost in costs
        if cost.longer == "kernel"
    ]
    factors_by_name = {"contention": computes, "communication_contention": communicates}
    return {name: statistics.median(factors) for name, factors in factors_by_name.items() if factors}
