"""Start the ranks of a benchmark of the operator and put what they found into a report."""

from __future__ import annotations

from typing import Any

from tw_compile.benchmark.contenders import contenders
from tw_compile.benchmark.spec import LINK_GB_PER_S, BenchSpec
from tw_compile.benchmark.variants import check
from tw_compile.benchmark.worker import rank_process
from tw_compile.harness.launch import Progress
from tw_compile.harness.start import launch


def steps(spec: BenchSpec) -> int:
    """How often :func:`run` calls ``progress``."""
    return 2 + len(list(spec.sizes())) * (2 + len(contenders(spec)))


def run(spec: BenchSpec, progress: Progress) -> dict[str, Any]:
    """Run the whole benchmark, and return the report as plain values.

    Raises:
        UsageError: ``spec`` names contenders that are not there.
        RankError: A rank failed, died or did not finish in time, before any size was done.
    """
    check(spec)
    return launch(spec, "bench kernel", rank_process, progress) | {"link_gb_per_s": LINK_GB_PER_S}
