"""A device profile from measured times: the device's shipped profile, in which measured values replace the shipped ones."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tw_compile.benchmark.labels import NCCL, NO_COMMUNICATION, SYMM_TWO_SHOT
from tw_compile.benchmark.results import Row
from tw_compile.kernels.algorithms import ALGORITHMS
from tw_compile.planning.communication import sm_us, traffic_bytes
from tw_compile.planning.device import AllReduceTimes, DeviceProfile, FusedKernel
from tw_compile.planning.links import Link
from tw_compile.planning.tables import toml_of
from tw_compile.tuning.measured import KernelRun

ALL_REDUCES = {"nccl": NCCL, "torch_two_shot": SYMM_TWO_SHOT}
"""Keys of a profile's ``all_reduce``, and the label of the row that times this all_reduce together with a norm."""
KERNELS = {entry.profile: entry.name for entry in ALGORITHMS if entry.profile is not None}
"""Keys of a profile's ``fused``, and the names of these kernels in kernel tables."""
NORM_ALONE = NO_COMMUNICATION
_MIN_POINTS = 3


def fitted(
    base: DeviceProfile,
    kernel_runs: Sequence[KernelRun],
    beside_runs: Sequence[KernelRun],
    contentions: Mapping[str, float],
) -> tuple[DeviceProfile, frozenset[str]]:
    """The fitted profile, and the dotted names of its measured values. All other values are those of ``base``.

    The time of an all_reduce is the time of its row minus that of the norm alone. Latency and rate are the least squares of
    relative errors. A fit without a positive latency and rate is discarded, and the value stays. ``contentions``: values of the
    profile by name.
    """
    measured: set[str] = set()
    all_reduce, fused = dict(base.all_reduce), dict(base.fused)
    for name, label in ALL_REDUCES.items():
        if name in all_reduce and (fit := latency_and_rate(_without_norm(kernel_runs, label, all_reduce[name]))):
            all_reduce[name] = replace(all_reduce[name], latency_us=fit[0], link_gb_per_s=fit[1])
            measured |= {f"all_reduce.{name}.latency_us", f"all_reduce.{name}.link_gb_per_s"}
    for name, algorithm in KERNELS.items():
        if name in fused:
            fused[name], names = _fitted_kernel(fused[name], algorithm, kernel_runs, beside_runs)
            measured |= {f"fused.{name}.{key}" for key in names}
    factors: dict[str, Any] = {name: round(factor, 3) for name, factor in contentions.items()}
    profile = replace(base, name=f"{base.name}, tuned", all_reduce=all_reduce, fused=fused, **factors)
    return profile, frozenset(measured | factors.keys())


def _fitted_kernel(
    kernel: FusedKernel, algorithm: str, kernel_runs: Sequence[KernelRun], beside_runs: Sequence[KernelRun]
) -> tuple[FusedKernel, set[str]]:
    """The kernel with fitted values, and the names of these values.

    The latency comes from the times of the grid. The rates of the links and of a CTA come from how the times fall with the
    number of SMs, where several numbers were tried. ``row_us`` keeps its share of a CTA's time.
    """
    rows = list(_rows((*kernel_runs, *beside_runs), algorithm))
    points = [
        (
            traffic_bytes(kernel.traffic, row.nbytes, ranks),
            # The measured calls begin with ordinary tensors, so they are staged.
            sm_us(kernel, row.tokens, row.hidden, ranks, staged=True, narrow="float32" not in row.residual_form) / sms,
            us,
            sms,
        )
        for ranks, row, us, sms in rows
    ]
    if not points:
        return kernel, set()
    usual = statistics.mode(sms for *_, sms in points)  # the number in the grid, which has more sizes than the pairs
    fit = latency_and_rate([(traffic, us) for traffic, _, us, sms in points if sms == usual])
    if fit is None:
        return kernel, set()
    latency, _ = fit
    kernel, names = replace(kernel, latency_us=latency), {"latency_us"}
    # (us - latency)^p = (traffic / link)^p + (slower * sm_us)^p is linear in link^-p and slower^p. Only large messages are
    # used, because their latency is small.
    power = kernel.sharpness
    large = [(traffic / 1e3, alone, us - latency, sms) for traffic, alone, us, sms in points if us > 5 * latency]
    if len({sms for *_, sms in large}) >= 2:
        left = np.array([[(traffic / us) ** power, (alone / us) ** power] for traffic, alone, us, _ in large])
        scale = np.linalg.norm(left, axis=0)
        powers = np.linalg.lstsq(left / scale, np.ones(len(large)), rcond=None)[0] / scale
        if (powers > 0).all():
            link, slower = float(powers[0]) ** (-1 / power), float(powers[1]) ** (1 / power)
            cta, row = round(kernel.cta_gb_per_s / slower, 1), round(kernel.row_us * slower, 3)
            kernel = replace(kernel, link_gb_per_s=round(link, 1), cta_gb_per_s=cta, row_us=row)
            return kernel, names | {"link_gb_per_s", "cta_gb_per_s", "row_us"}
    rest = [
        links / traffic
        for traffic, alone, us, _ in large
        if (links := max(us**power - alone**power, 0.0) ** (1 / power)) > 0
    ]
    if rest:
        return replace(kernel, link_gb_per_s=round(1 / statistics.median(rest), 1)), names | {"link_gb_per_s"}
    return kernel, names


def _rows(runs: Iterable[KernelRun], algorithm: str) -> Iterator[tuple[int, Row, float, int]]:
    for run in runs:
        for row in run.rows:
            if row.algorithm == algorithm and row.numerics == "ok" and row.p50_us and row.max_sms:
                yield run.world_size, row, row.p50_us, row.max_sms


def _without_norm(runs: Sequence[KernelRun], label: str, kind: AllReduceTimes) -> list[tuple[float, float]]:
    """Traffic and microseconds of an all_reduce alone."""
    return [
        (traffic_bytes(kind.traffic, nbytes, ranks), us)
        for run in runs
        for ranks, nbytes, us in alone_us(run, label, subtract_norm=True)
    ]


def alone_us(run: KernelRun, label: str, subtract_norm: bool) -> Iterator[tuple[int, int, float]]:
    """Ranks, bytes and microseconds of a contender; with ``subtract_norm``, minus the time of the norm behind it."""
    norm = {(row.tokens, row.hidden): row.p50_us for row in run.rows if row.label == NORM_ALONE}
    for row in run.rows:
        behind = norm.get((row.tokens, row.hidden)) if subtract_norm else 0.0
        if row.label == label and row.numerics == "ok" and row.p50_us and behind is not None and row.p50_us > behind:
            yield run.world_size, row.nbytes, row.p50_us - behind


def latency_and_rate(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Microseconds and 10^9 bytes a second of ``us = latency + traffic / rate``; None where no such line fits."""
    if len({traffic for traffic, _ in points}) < _MIN_POINTS:
        return None
    traffic, us = (np.array(column) for column in zip(*points, strict=True))
    left = np.stack([1 / us, traffic / us], axis=1)
    scale = np.linalg.norm(left, axis=0)
    latency, per_byte = np.linalg.lstsq(left / scale, np.ones(len(points)), rcond=None)[0] / scale
    if latency <= 0 or per_byte <= 0:
        return None
    fit = round(float(latency), 2), round(float(1 / per_byte) / 1e3, 1)
    return fit if min(fit) > 0 else None  # a file with a zero could not be read back


def profile_text(
    profile: DeviceProfile | Link, measured: frozenset[str], comment: str, kept: str = "as shipped"
) -> str:
    """The TOML of a profile or a link, as its module in ``planning`` reads it. Each value has its origin beside it.

    ``kept``: the origin of the values that were not measured.
    """
    text = toml_of(profile, lambda name: "measured" if name in measured else kept)
    return "\n".join(f"# {line}".rstrip() for line in comment.splitlines()) + "\n" + text
