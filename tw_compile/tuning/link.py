"""A link from measured times: the shipped link, but with the measured latency and rate of a transport that was timed alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tw_compile.benchmark.labels import NCCL
from tw_compile.files import write_whole
from tw_compile.harness.requests import UsageError
from tw_compile.kernels.collective.transports import TRANSPORTS
from tw_compile.planning.communication import link_us, traffic_bytes
from tw_compile.planning.links import UNFUSED, USER_FILE, Link, parse_link
from tw_compile.tuning.measured import KernelRun
from tw_compile.tuning.profile import NORM_ALONE, alone_us, latency_and_rate, profile_text

UNFUSED_LABEL = NCCL


@dataclass(frozen=True)
class MeasuredLink:
    """A link, and the dotted names of its measured values. All other values are those of the link that it is based on."""

    link: Link
    measured: frozenset[str]


def labels_of(link: Link, transport: str) -> tuple[str, ...]:
    """The labels of the benchmark's contenders that time ``transport`` over ``link``.

    Raises:
        UsageError: The link has no rates of the transport, or the transport takes no part in the benchmark.
    """
    known = [entry for entry in TRANSPORTS if entry.name in link.transports and entry.benchmarked]
    entry = next((entry for entry in known if entry.name == transport), None)
    if entry is None:
        names = ", ".join(entry.name for entry in known)
        raise UsageError(f"--transport: expected one of {names}, got {transport!r}")
    label = UNFUSED_LABEL if transport == UNFUSED else entry.benchmarked[0].label
    return (label, NORM_ALONE) if link.transport(transport).norm_apart else (label,)


def check_link_is_used(link: Link, transport: str, peer_access: bool) -> None:
    """UsageError where the GPUs have peer access and ``transport`` would use peer access instead of the link."""
    unused = os.environ.get("NCCL_P2P_DISABLE") == "1"
    if peer_access and not unused and not link.serves(transport, peer_access):
        raise UsageError(
            f"--transport: expected GPUs without peer access, which {transport} uses where it is (NCCL_P2P_DISABLE=1 "
            f"leaves it unused), got {transport!r}"
        )


def fitted_link(base: Link, transport: str, runs: Sequence[KernelRun]) -> MeasuredLink:
    """``base`` with the rates of ``transport`` fitted to ``runs``.

    Each way of the transport is fitted to the times at which ``base`` predicts that way to be the fastest.
    Latency and rate are the least squares of relative errors. A way that was timed at fewer than three sizes keeps its values.
    """
    rates = base.transport(transport)
    label = labels_of(base, transport)[0]
    return fitted_ways(
        base, transport, [time for run in runs for time in alone_us(run, label, subtract_norm=rates.norm_apart)]
    )


def fitted_ways(base: Link, transport: str, times: Sequence[tuple[int, int, float]]) -> MeasuredLink:
    """As :func:`fitted_link`, from ``times``: ranks, bytes and microseconds of calls, without the norm where it is separate."""
    rates = base.transport(transport)
    ways, measured = dict(rates.ways), set[str]()
    for name, way in rates.ways.items():
        alone = replace(rates, ways={name: way})
        points = [
            (traffic_bytes(way.traffic, nbytes, ranks), us)
            for ranks, nbytes, us in times
            if link_us(alone, nbytes, ranks) <= link_us(rates, nbytes, ranks)
        ]
        fit = latency_and_rate(points)
        if fit is not None:
            ways[name] = replace(way, latency_us=fit[0], gb_per_s=fit[1])
            measured |= {f"transports.{transport}.ways.{name}.{key}" for key in ("latency_us", "gb_per_s")}
    link = replace(base, transports={**base.transports, transport: replace(rates, ways=ways)})
    return MeasuredLink(link, frozenset(measured))


def write_link(folder: Path, found: MeasuredLink, comment: str) -> Path:
    """Write the user's link file into ``folder``, after checking that its text can be read back."""
    text = profile_text(found.link, found.measured, comment, kept="as before")
    parse_link(text, USER_FILE)  # a wrong file would stop every compile
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / USER_FILE, text)
    return folder / USER_FILE


def link_lines(found: MeasuredLink, transport: str, rows: Sequence[Any]) -> list[str]:
    """The measured times, and the rates that the link now has, for the terminal."""
    lines = [
        f"{row.tokens} tokens x {row.hidden}: {row.label} {row.p50_us:.0f} us" for row in rows if row.p50_us is not None
    ]
    return [*lines, found.link.rates(transport)]
