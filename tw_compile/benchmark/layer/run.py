"""Start the ranks of a benchmark of layers or of a model and put their rows into a report."""

from __future__ import annotations

from typing import Any

from tw_compile.benchmark.layer.results import rows_of, sweeps
from tw_compile.benchmark.layer.spec import LayerSpec
from tw_compile.benchmark.layer.variants import variants
from tw_compile.benchmark.layer.worker import rank_process
from tw_compile.harness.launch import Progress
from tw_compile.harness.start import launch


def steps(spec: LayerSpec) -> int:
    """How often :func:`run` calls ``progress``."""
    return 3 + sum(2 + len(variants(spec, tokens)) for tokens in spec.tokens)


def run(spec: LayerSpec, progress: Progress) -> dict[str, Any]:
    """Run the whole benchmark, and return the report as plain values.

    Raises:
        UsageError: ``spec`` names variants that are not there, or a model that can't be built as asked.
        RankError: A rank failed, died or did not finish in time, before any number of tokens was done.
    """
    variants(spec, max(spec.tokens))
    report = launch(spec, f"bench {spec.scope}", rank_process, progress)
    return report | {"sweeps": sweeps(rows_of(report)) if spec.device == "cuda" else []}
