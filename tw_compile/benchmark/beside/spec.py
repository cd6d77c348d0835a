"""What ``bench beside`` is asked to do, and how many calls and GEMMs follow from it. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tw_compile.benchmark.spec import BenchSpec, MessageSize
from tw_compile.benchmark.variants import Variant, variants
from tw_compile.harness.requests import UsageError
from tw_compile.kernels.algorithms import beside_work
from tw_compile.kernels.collective.transports import AUTO, TRANSPORTS
from tw_compile.planning.device import MOST_SMS_BESIDE
from tw_compile.planning.links import link_of_node

GEMM_AT_MOST, CALL_AT_MOST = 1.05, 1.15
"""The factors that are asked for: a GEMM beside calls against the same GEMM alone, and a call beside GEMMs."""
CPU_SMS = 8
"""The SMs that GEMMs are told to leave on a CPU, where it changes nothing."""

FILL_US = 5000.0
"""What is timed at once takes about so long. Then the ends of a graph, a few microseconds, are no part of a result."""
FEWEST, MOST = 4, 40
"""Items, calls or GEMMs, that are timed at once."""
SPARE = 2.5
"""The covering side is given so many times the time that it has to cover. Both sides are slower than alone, and a call that
finds no free SMs may wait for the end of a GEMM."""


@dataclass(frozen=True)
class GemmShape:
    """A GEMM of a rank: ``[tokens, inner] @ [inner, columns]``, with as many tokens as the message beside it has.

    ``gated``: there are two such matrices, gate and up, and the result is ``silu(a @ gate) * (a @ up)``.
    """

    inner: int
    columns: int
    gated: bool = False

    def __str__(self) -> str:
        return f"{self.inner}x{self.columns}" + (f"+{self.columns}" if self.gated else "")


def of_mlp(hidden: int, world_size: int) -> tuple[GemmShape, ...]:
    """The GEMMs of an MLP of a rank of Llama-3.1-8B (hidden 4096) or Llama-3.3-70B (8192): gate and up, and down.

    The columns are a multiple of 8, as cuBLAS wants rows of whole vectors.
    """
    inner = max(7 * hidden // (2 * world_size) // 8 * 8, 8)
    return GemmShape(hidden, inner, gated=True), GemmShape(inner, hidden)


@dataclass(frozen=True)
class BesideSpec:
    """One benchmark; plain values, so that it can be handed to another process.

    Attributes:
        device: ``cuda`` (NCCL) or ``cpu`` (gloo, a rehearsal).
        transports: What carries the calls, names of :func:`transports` or ``auto``.
        gemms: The GEMMs beside the calls. Empty: :func:`of_mlp` of each hidden size.
        sms: SMs that a call gets, and that the GEMMs leave. Empty: :func:`usual_sms` of the transport.
        repeats: Timed runs of each of the five times of a row.
        timeout: Seconds after which the benchmark, or one collective of it, has failed.
    """

    world_size: int
    device: str
    dtype: str
    hidden: tuple[int, ...]
    tokens: tuple[int, ...]
    transports: tuple[str, ...] = (AUTO,)
    gemms: tuple[GemmShape, ...] = ()
    sms: tuple[int, ...] = ()
    repeats: int = 50
    seed: int = 0
    timeout: float = 1200.0

    def sizes(self) -> list[MessageSize]:
        return list(self.of_kernel().sizes())

    def of_kernel(self) -> BenchSpec:
        """The request to ``bench kernel`` for the same messages: its checks and inputs are used here, too."""
        return BenchSpec(
            self.world_size, self.device, self.dtype, self.hidden, self.tokens, seed=self.seed, timeout=self.timeout
        )

    def gemms_of(self, hidden: int) -> tuple[GemmShape, ...]:
        return self.gemms or of_mlp(hidden, self.world_size)

    def sms_of(self, transport: str) -> tuple[int, ...]:
        return self.sms or usual_sms(transport)


def transports(device: str) -> tuple[str, ...]:
    """The transports whose calls can run beside work: on GPUs those that have kernels for a given number of SMs."""
    return tuple(
        entry.name
        for entry in TRANSPORTS
        if device in entry.device_types and (device == "cpu" or beside_work(entry.name))
    )


def usual_sms(transport: str) -> tuple[int, ...]:
    """The SMs of the transport's calls beside work.

    Plans for a link choose from these numbers. For another transport it is one number, that of the kernel that is tried first.
    """
    planned = link_of_node().transports.get(transport)
    if planned is not None:
        return planned.ctas_beside
    kernels = beside_work(transport)
    return (CPU_SMS if not kernels or kernels[0].sms is None else kernels[0].sms,)


def call_variant(device: str, transport: str) -> Variant:
    """The transport's own line of ``bench kernel``, which chooses its kernel itself, as in a graph.

    In a split layer the GEMM before a call writes the message where peers read it, and the call's results stay there, if the
    transport has such memory.
    """
    own = next(each for each in variants(device) if each.over == transport and each.algorithm is None)
    return replace(own, in_slot=TRANSPORTS[transport].message_buffers)


def check(spec: BesideSpec) -> None:
    """Refuse what no call and no GEMM can have.

    Raises:
        UsageError: Its message names ``--transport`` or ``--sms``.
    """
    known = (AUTO, *transports(spec.device))
    if len(set(spec.transports)) < len(spec.transports) or not set(spec.transports) <= set(known):
        raise UsageError(
            f"--transport: expected different ones of {', '.join(known)} with --device {spec.device}, "
            f"got {','.join(spec.transports)!r}"
        )
    beyond = next((sms for sms in spec.sms if sms > MOST_SMS_BESIDE), None)
    if beyond is not None:
        raise UsageError(
            f"--sms: expected at most {MOST_SMS_BESIDE}, the most that a call beside work has, got {beyond}"
        )


def items_to_time(item_us: float) -> int:
    """How many items of ``item_us`` each are timed at once."""
    return min(max(math.ceil(FILL_US / item_us), FEWEST), MOST)


def items_to_cover(covered_us: float, item_us: float) -> int:
    """How many items of ``item_us`` run beside what takes ``covered_us`` alone, so that it surely ends first."""
    return math.ceil(SPARE * covered_us / item_us) + 2


def most_steps(spec: BesideSpec) -> int:
    """How often ``run`` calls its progress at most."""
    of_size = 0
    numbers = len(spec.sms) or max(len(usual_sms(transport)) for transport in transports(spec.device))
    for size in spec.sizes():
        ways = 2 * len(spec.transports) * numbers  # over host memory bare copies, too
        of_size += 1 + ways * (1 + len(spec.gemms_of(size.hidden)))
    return 2 + of_size
