"""What one tuning measures, in which order, and how long that takes. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tw_compile.benchmark import labels
from tw_compile.benchmark.spec import BenchSpec, bus_bytes
from tw_compile.benchmark.variants import alone_over
from tw_compile.kernels.collective.wires import EXACT
from tw_compile.tuning.pairs import trials

CUDA_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
CUDA_HIDDEN = (4096, 8192)
"""With ``CUDA_TOKENS`` these give message sizes that each are twice the one before."""
CUDA_OTHERS = (
    "tw-nccl",
    labels.NCCL,
    labels.SYMM_ONE_SHOT,
    labels.SYMM_TWO_SHOT,
    labels.FLASHINFER_ONE_SHOT,
    labels.FLASHINFER_TWO_SHOT,
    labels.NO_COMMUNICATION,
)
"""The contenders beside the kernels of the node's transports. A calibration times the kernels of the same transports."""
CPU_CONTENDERS = ("tw-gloo", labels.GLOO)
LINK_TOKENS = (16, 64, 256, 1024, 4096, 16384)
WIRE_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 16384)
BESIDE_TOKENS = (1024, 4096)
BESIDE_SMS = (8, 16, 32)
CPU_TOKENS, CPU_HIDDEN, CPU_BESIDE_SMS = (1, 16), (256,), (4,)
REPEATS = 20

# Estimates of what a stage takes beside its timed calls: to start processes, NCCL and first kernels; to check and capture each
# contender.
_START_SECONDS = 20.0
_CONTENDER_SECONDS = 0.25
_CALL_US = 15.0
_GB_PER_S = {"kernel": 300.0, "beside": 300.0, "link": 30.0, "wires": 30.0}
_GEMM_TFLOPS = 600.0
_WARM_UP_ROUNDS = 3


@dataclass(frozen=True)
class Stage:
    """What is measured in one start of the ranks.

    ``kernel``: every way to run the operator, at every size. ``beside``: our kernels beside a GEMM. ``link``: one transport
    alone. ``wires``: our kernels with rows in codes, compared with exact rows.
    """

    kind: Literal["kernel", "beside", "link", "wires"]
    bench: BenchSpec

    @property
    def name(self) -> str:
        return f"{self.kind} tp{self.bench.world_size}"

    @property
    def contenders(self) -> int:
        """How many contenders take part."""
        return len(trials(self.bench) if self.kind == "beside" else self.bench.only)


@dataclass(frozen=True)
class TuneSpec:
    """One tuning. ``device``: ``cuda``, or ``cpu`` for a smoke test on gloo ranks. ``timeout``: seconds of each stage.

    ``link_labels``: the contenders that time a transport over a link. ``wire_labels``: the contenders that time ``wires``. If
    there are any of either, nothing else is measured.
    ``transports``: those whose kernels are timed, as in a calibration.
    """

    world_sizes: tuple[int, ...]
    device: str = "cuda"
    timeout: float = 600.0
    link_labels: tuple[str, ...] = ()
    wires: tuple[str, ...] = ()
    wire_labels: tuple[str, ...] = ()
    transports: tuple[str, ...] = ("p2p",)

    def stages(self) -> Iterator[Stage]:
        for world_size in self.world_sizes:
            if self.link_labels:
                yield Stage("link", self._link(world_size))
                continue
            if self.wires:
                yield Stage("wires", self._wires(world_size))
                continue
            yield Stage("kernel", self._kernel(world_size))
            yield Stage("beside", self._beside(world_size))

    def options(self) -> dict[str, Any]:
        """The options on which the measurements depend, as plain values. They are part of the key of partial results."""
        stages = {stage.name: asdict(stage.bench) for stage in self.stages()}
        for bench in stages.values():
            del bench["timeout"]
        return stages

    def _kernel(self, world_size: int) -> BenchSpec:
        cuda = self.device == "cuda"
        tokens, hidden = (CUDA_TOKENS, CUDA_HIDDEN) if cuda else (CPU_TOKENS, CPU_HIDDEN)
        kernels = [variant.label for transport in self.transports for variant in alone_over(transport)]
        return BenchSpec(
            world_size,
            self.device,
            "bfloat16",
            hidden,
            tokens,
            calls=20 if cuda else 3,
            repeats=REPEATS,
            only=(*kernels, *CUDA_OTHERS) if cuda else CPU_CONTENDERS,
            timeout=self.timeout,
        )

    def _link(self, world_size: int) -> BenchSpec:
        return BenchSpec(
            world_size,
            self.device,
            "bfloat16",
            CUDA_HIDDEN[-1:],
            LINK_TOKENS,
            calls=5,
            repeats=REPEATS,
            only=self.link_labels,
            timeout=self.timeout,
        )

    def _wires(self, world_size: int) -> BenchSpec:
        return BenchSpec(
            world_size,
            self.device,
            "bfloat16",
            CUDA_HIDDEN,
            WIRE_TOKENS,
            calls=10,
            repeats=REPEATS,
            only=self.wire_labels,
            timeout=self.timeout,
            wires=(EXACT, *self.wires),
        )

    def _beside(self, world_size: int) -> BenchSpec:
        cuda = self.device == "cuda"
        return BenchSpec(
            world_size,
            self.device,
            "bfloat16",
            (CUDA_HIDDEN if cuda else CPU_HIDDEN)[-1:],
            BESIDE_TOKENS if cuda else CPU_TOKENS[-1:],
            calls=5 if cuda else 3,
            repeats=REPEATS,
            sms=BESIDE_SMS if cuda else CPU_BESIDE_SMS,
            timeout=self.timeout,
        )


def seconds(stage: Stage) -> float:
    """A rough estimate of the stage's seconds. The figures above are guesses for an H200."""
    bench = stage.bench
    timed = 0.0
    for size in bench.sizes():
        us = _CALL_US + bus_bytes(size.nbytes, bench.world_size) / (_GB_PER_S[stage.kind] * 1e3)
        if stage.kind == "beside":
            us += 2 * size.tokens * size.hidden * 7 * size.hidden / bench.world_size / (_GEMM_TFLOPS * 1e6)
        timed += us * 1e-6 * bench.calls * (_WARM_UP_ROUNDS + bench.repeats) * stage.contenders
    return _START_SECONDS + len(list(bench.sizes())) * stage.contenders * _CONTENDER_SECONDS + timed
