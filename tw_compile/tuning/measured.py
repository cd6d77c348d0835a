"""From rows of ``bench kernel`` to the times of the ways between which a table of thresholds chooses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tw_compile.benchmark import labels
from tw_compile.benchmark.results import Row, rows_of
from tw_compile.benchmark.tune import steps_by_transport
from tw_compile.gating.facts import Backend
from tw_compile.gating.table import Source
from tw_compile.kernels.transports.selection import P2P, Step, step_for, steps_over, transport_of

LEFT = "left"
UNFUSED: dict[Backend, tuple[str, ...]] = {
    Backend.NCCL: (labels.NCCL,),
    Backend.SYMM_MEM_ONE_SHOT: (labels.SYMM_ONE_SHOT,),
    Backend.SYMM_MEM_TWO_SHOT: (labels.SYMM_TWO_SHOT,),
    Backend.FLASHINFER: (labels.FLASHINFER_ONE_SHOT, labels.FLASHINFER_TWO_SHOT),
}
"""For each backend, the rows that time its unfused all_reduce with the norm behind it.

The other backends, ``custom``, ``multimem`` and ``nccl_symmetric``, have none: ``bench kernel`` does not run them. So a tuning
leaves their entries as they are.
"""
AT_LEAST = frozenset({Backend.FLASHINFER})
"""Backends whose rows are lower bounds. FlashInfer's rows time its fused kernels; its all_reduce and a separate norm take at
least as long. So these rows can show that fusing pays, but not that it does not."""


@dataclass(frozen=True)
class KernelRun:
    """The rows of one run of ``bench kernel``. Times are compared only within a run."""

    world_size: int
    device_name: str
    source: Source
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Timing:
    """One way at one size: ``way`` is ``LEFT`` or a transport; microseconds at the 20th, 50th and 80th percentile."""

    run: int
    nbytes: int
    hidden: int
    way: str
    p20_us: float
    p50_us: float
    p80_us: float


def run_of_report(report: dict[str, Any], command: str | None = None) -> KernelRun:
    """The run of a JSON report of ``bench kernel``."""
    made_with = {"world_size": report["world_size"], "device_name": report["device_name"], **report["versions"]}
    return run_made_with(made_with, rows_of(report), command)


def timings(runs: Sequence[KernelRun], backend: Backend, steps: Sequence[Step]) -> list[Timing]:
    """Times of ``backend`` without fusing, and of each transport that was run, at all sizes of ``runs`` of one world size.

    A transport over memory of slots has the time of the kernel that ``steps`` names for the size. If ``steps`` has none for
    ``p2p``, the time is that of the transport's own choice.
    """
    times = []
    for number, run in enumerate(runs):
        by_size: dict[tuple[int, int], dict[str, Row]] = {}
        for row in run.rows:
            way = _way(row, backend, steps)
            if way is None or row.numerics != "ok" or row.p50_us is None:
                continue
            ways = by_size.setdefault((row.nbytes, row.hidden), {})
            if way not in ways or row.p50_us < (ways[way].p50_us or 0.0):
                ways[way] = row
        for (nbytes, hidden), ways in by_size.items():
            for way, row in ways.items():
                assert row.p20_us is not None and row.p50_us is not None and row.p80_us is not None
                times.append(Timing(number, nbytes, hidden, way, row.p20_us, row.p50_us, row.p80_us))
    return times


def measured_steps(runs: Sequence[KernelRun], usual: Sequence[Step]) -> list[Step]:
    """The kernel table of ``runs`` of one world size. A choice of ``usual`` that is as good as the best one stays."""
    return steps_by_transport((row for run in runs for row in run.rows), runs[0].world_size, usual)


def _way(row: Row, backend: Backend, steps: Sequence[Step]) -> str | None:
    if row.label in UNFUSED[backend]:
        return LEFT
    if row.label == "tw-nccl":
        return "nccl"
    if row.quantises:
        return None
    if row.algorithm is None:
        return P2P if row.label == "tw-p2p" and not steps_over(steps, P2P) else None
    transport = transport_of(row.algorithm)
    step = step_for(steps_over(steps, transport), row.nbytes)
    return transport if step and (row.algorithm, row.max_sms) == (step.algorithm, step.sms) else None


def run_made_with(made_with: Mapping[str, Any], rows: Iterable[Row], command: str | None = None) -> KernelRun:
    """A :class:`KernelRun` from ``rows``.

    ``made_with``: number of ranks, device, versions and date, by the names in a report or in a line of its CSV.
    """
    world_size, device_name = int(made_with["world_size"]), made_with["device_name"]
    names = {"torch": "torch", "nccl": "NCCL", "flashinfer": "FlashInfer", "commit": "tw_compile"}
    versions = ", ".join(f"{shown} {made_with[name]}" for name, shown in names.items() if made_with.get(name))
    asked = command or f"tw-compile bench kernel --tp {world_size}"
    source = Source(
        f"measured_tp{world_size}", "measured", (f"{world_size}x {device_name}", versions, made_with["date"], asked)
    )
    return KernelRun(world_size, device_name, source, tuple(rows))
