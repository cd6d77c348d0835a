"""Start the ranks of ``bench beside`` and put what they found into a report."""

from __future__ import annotations

from typing import Any

from tw_compile.benchmark.beside.rank import rank_process
from tw_compile.benchmark.beside.spec import CALL_AT_MOST, GEMM_AT_MOST, BesideSpec, check
from tw_compile.harness.launch import Progress
from tw_compile.harness.start import launch


def run(spec: BesideSpec, progress: Progress) -> dict[str, Any]:
    """Run the whole benchmark, and return the report as plain values.

    Raises:
        UsageError: See :func:`~tw_compile.benchmark.beside.spec.check`.
        RankError: A rank failed, died or did not finish in time, before any size was done.
    """
    check(spec)
    asked = {"gemm_at_most": GEMM_AT_MOST, "call_at_most": CALL_AT_MOST}
    return launch(spec, "bench beside", rank_process, progress) | asked
