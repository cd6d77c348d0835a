"""Makes a table of ``configs/kernels`` from measured rows: which kernel of tw_compile serves which message."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import isqrt
from typing import Any

from tw_compile.benchmark.results import Row, rows_of
from tw_compile.kernels.transports.selection import Step, step_for, steps_over, table_text, transport_of

SLACK = 1.02
"""A kernel that is this close to the best counts as equal. So the table does not change kernels or spend SMs for noise."""

KernelAndSms = tuple[str, int]


def table_of(report: dict[str, Any]) -> str:
    """The TOML for the device and the world size of a report of ``bench kernel``.

    Raises:
        ValueError: The report has no time of a kernel that a table can name.
    """
    steps = steps_by_transport(rows_of(report), report["world_size"])
    if not steps:
        raise ValueError("no kernel that a table can name was timed")
    versions = report["versions"]
    comment = (
        f"Measured by tw-compile bench kernel: {report['world_size']}x {report['device_name']}, {report['dtype']}, hidden "
        f"{', '.join(map(str, report['hidden']))}, torch {versions['torch']}, commit {versions['commit']}"
    )
    return table_text(report["device_name"], steps, comment)


def steps_by_transport(rows: Iterable[Row], world_size: int, shipped: Sequence[Step] = ()) -> list[Step]:
    """The table of a world size; empty where no kernel that a table can name was timed.

    Kernels are compared with those of the same transport. Thresholds decide which transport serves a message.
    """
    of: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.algorithm is not None:
            of[transport_of(row.algorithm)].append(row)
    return [
        step for transport, own in of.items() for step in steps_from(own, world_size, steps_over(shipped, transport))
    ]


def steps_from(rows: Iterable[Row], world_size: int, shipped: Sequence[Step] = ()) -> list[Step]:
    """One step for each run of sizes with the same best kernel; steps meet half way, in the logarithm, between two sizes.

    A choice of ``shipped`` that is as good as the best stays, and so does the size at which it ends.
    """
    slowdown: dict[int, dict[KernelAndSms, list[float]]] = defaultdict(lambda: defaultdict(list))
    by_size: dict[tuple[int, int], list[Row]] = defaultdict(list)
    for row in rows:
        if row.algorithm is not None and row.max_sms is not None and row.numerics == "ok" and row.p50_us is not None:
            by_size[row.nbytes, row.hidden].append(row)
    for (nbytes, _), timed in by_size.items():
        fastest = min(row.p50_us or 0.0 for row in timed)
        for row in timed:
            slowdown[nbytes][row.algorithm or "", row.max_sms or 0].append((row.p50_us or 0.0) / fastest)
    steps: list[Step] = []
    sizes = sorted(slowdown)
    before: KernelAndSms | None = None
    for index, nbytes in enumerate(sizes):
        mean = {choice: sum(ratios) / len(ratios) for choice, ratios in slowdown[nbytes].items()}
        good = {choice for choice, ratio in mean.items() if ratio <= SLACK * min(mean.values())}
        usual = step_for(shipped, nbytes)
        preferred = [choice for choice in ((usual.algorithm, usual.sms) if usual else None, before) if choice in good]
        best = preferred[0] if preferred else min(good, key=lambda choice: (choice[1], mean[choice]))
        assert best is not None
        up_to = nbytes if index + 1 == len(sizes) else isqrt(nbytes * sizes[index + 1])
        # The last step of a table has no end: it serves all larger messages too.
        if usual and usual is not shipped[-1] and best == (usual.algorithm, usual.sms) and index + 1 < len(sizes):
            up_to = usual.up_to_bytes if nbytes <= usual.up_to_bytes < sizes[index + 1] else up_to
        if best == before:
            steps.pop()
        steps.append(Step(world_size, up_to, *best))
        before = best
    return steps
