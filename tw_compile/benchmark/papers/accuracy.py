"""What wires cost: reports of ``tw-compile run --wire`` that are committed. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tw_compile.benchmark.papers.timed import RESULTS

COMMITTED = (
    "2026-11-24-cpu-smollm2-int8-2-ranks.json",
    "2026-11-24-cpu-smollm2-int8-4-ranks.json",
    "2026-11-24-cpu-smollm2-int6-2-ranks.json",
    "2026-11-24-cpu-run-tiny-llama-wire-int8-tp2.json",
)
"""The reports that exhibits are drawn from."""


@dataclass(frozen=True)
class Cost:
    """What a wire costs a model on simulated ranks: nats for each token of a text, with it and with exact rows."""

    wire: str
    world_size: int
    checkpoint: str
    nats: float
    exact_nats: float
    file: str

    @property
    def source(self) -> str:
        """The file, and on what it was measured."""
        return f"{self.file}, {self.checkpoint}, simulated ranks"

    @property
    def added(self) -> float:
        return self.nats - self.exact_nats


@dataclass(frozen=True)
class CallError:
    """Errors of calls with a wire, relative to float64.

    Attributes:
        feeds: The GEMM whose sums they are, such as ``o_proj``; ``third``: of the layers, such as ``first``.
        sums: Of sums, whose parts came in codes.
        results: Of the normalised rows that are made of these sums and sent in codes.
    """

    wire: str
    model: str
    feeds: str
    third: str
    sums: float
    results: float
    file: str

    @property
    def source(self) -> str:
        """The file, and on what it was measured."""
        return f"{self.file}, {self.model} with random weights"


@dataclass(frozen=True)
class Accuracy:
    """Everything that is known of what wires cost."""

    costs: tuple[Cost, ...] = ()
    errors: tuple[CallError, ...] = ()


def parse(report: Mapping[str, Any], file: str) -> Accuracy:
    """What one report of ``tw-compile run --wire`` says; KeyError where it is another one."""
    if "costs" in report:
        costs = (
            Cost(report["wire"], cost["world_size"], report["checkpoint"], cost["nats"], cost["exact_nats"], file)
            for cost in report["costs"]
        )
        return Accuracy(costs=tuple(costs))
    wire = report["wire"]
    errors = (
        CallError(
            wire["wire"],
            report["model"],
            kind["feeds"],
            kind["third"],
            kind["sum"]["error"],
            kind["hidden"]["error"],
            file,
        )
        for kind in wire["classes"]
    )
    return Accuracy(errors=tuple(errors))


def committed_accuracy() -> Accuracy:
    """Of the reports that the checkout has; a wheel has none."""
    files = [RESULTS / name for name in COMMITTED if (RESULTS / name).exists()]
    found = [_read(file) for file in files]
    return Accuracy(
        tuple(cost for one in found for cost in one.costs), tuple(error for one in found for error in one.errors)
    )


def _read(file: Path) -> Accuracy:
    return parse(json.loads(file.read_text()), file.name)
