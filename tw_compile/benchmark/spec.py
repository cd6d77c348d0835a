"""What one benchmark is asked to do, and what follows from it by arithmetic alone. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tw_compile.harness.spec import ELEMENT_BYTES, ONE_SHOT_BOUND, TWO_SHOT_BOUND
from tw_compile.kernels.collective.wires import EXACT

LINK_GB_PER_S = 370.0
"""What one direction of an H200's NVLink is taken to carry; nominally it is 18 links of 25 GB/s."""
SYMM_MEM_ONE_SHOT_MAX_BYTES = 32 * 2**20
"""The largest message with which torch's one-shot kernels are tried: every rank reads all messages whole."""

ContenderKind = Literal["ours", "peer", "bound"]
"""What takes part in a benchmark. A bound is a limit on the time, not a way to do the work."""


@dataclass(frozen=True)
class MessageSize:
    """One message: the partial sums ``[tokens, hidden]`` of one rank."""

    tokens: int
    hidden: int
    dtype: str

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.tokens * self.hidden * self.element_bytes


@dataclass(frozen=True)
class BenchSpec:
    """One benchmark; plain values, so that it can be handed to another process.

    Attributes:
        device: ``cuda`` (NCCL) or ``cpu`` (gloo, a smoke test).
        calls: Fused calls in one CUDA graph, and so in one timed replay.
        repeats: Timed replays of each contender.
        rotate_from: Messages of at least so many bytes rotate over input sets, see :func:`input_sets`.
        only: Labels of the contenders that take part; empty means all. ``gated`` adds one more.
        sms: SM counts to try for contenders of ours that take one.
        gated: Whether the gate's choice takes part, see :mod:`tw_compile.benchmark.gated`.
        wires: How rows of ours travel, names of ``wires.WIRES``. Variants that can't have a wire run with exact rows only.
        norms: The norms behind ours, see :attr:`Contender.norm`. The peers' is RMSNorm.
        gemms: Columns of the weights of a matmul behind the call. Variants of ours that can prefetch also run with each of
            these, once for each of ``prefetch``, which are values of option ``prefetch``.
        at_once: How many calls are on their way at a time, each on a stream and a slot of its own. With more than one only
            contenders take part whose calls need not follow each other (:attr:`Contender.several`).
        timeout: Seconds after which the benchmark, or one collective of it, has failed.
    """

    world_size: int
    device: str
    dtype: str
    hidden: tuple[int, ...]
    tokens: tuple[int, ...]
    calls: int = 20
    repeats: int = 50
    rotate_from: int = 2**20
    only: tuple[str, ...] = ()
    sms: tuple[int, ...] = ()
    seed: int = 0
    timeout: float = 1200.0
    gated: bool = False
    wires: tuple[str, ...] = (EXACT,)
    norms: tuple[str, ...] = ("rms_norm",)
    gemms: tuple[int, ...] = ()
    prefetch: tuple[str, ...] = ()
    at_once: int = 1

    def sizes(self) -> Iterator[MessageSize]:
        for hidden in self.hidden:
            for tokens in self.tokens:
                yield MessageSize(tokens, hidden, self.dtype)


def input_sets(nbytes: int, cache_bytes: int, calls: int, rotate_from: int, at_once: int = 1) -> int:
    """Over how many sets of inputs the calls of one graph rotate, for messages of ``nbytes`` and an L2 of ``cache_bytes``.

    In a model the matmul right before has just written the partial sums, and at decode the residual of a few tokens is small
    too: both really are in L2, so small messages repeat one set. A prefill's activations pass through L2 between two uses
    of the residual. Then there are enough sets that the partial sums and residuals of all other sets displace those of one
    set from L2, but no more sets than calls. Calls that are on their way ``at_once`` have sets of their own.
    """
    sets = 1 if nbytes < rotate_from else min(calls, 1 + math.ceil(cache_bytes / (2 * nbytes)))
    return math.ceil(sets / at_once) * at_once


def bus_bytes(nbytes: int, world_size: int) -> float:
    """Bytes that each rank must send, and receive, when the sum is formed once and then shared (two-shot)."""
    return 2 * (world_size - 1) / world_size * nbytes


def bounds_us(nbytes: int, world_size: int) -> dict[str, float]:
    """Microseconds that the links alone need, without any latency: sum formed once, or by every rank for itself."""
    per_us = LINK_GB_PER_S * 1e3
    return {
        TWO_SHOT_BOUND: bus_bytes(nbytes, world_size) / per_us,
        ONE_SHOT_BOUND: (world_size - 1) * nbytes / per_us,
    }
