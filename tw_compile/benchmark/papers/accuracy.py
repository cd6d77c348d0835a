"""What wires cost: reads reports of ``tw-compile run --wire``, committed ones and those of ``--from``. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tw_compile.benchmark.papers.timed import RESULTS, text_of
from tw_compile.harness.requests import UsageError

COMMITTED = (
    "2026-11-24-cpu-smollm2-int8-2-ranks.json",
    "2026-11-24-cpu-smollm2-int8-4-ranks.json",
    "2026-11-24-cpu-smollm2-int6-2-ranks.json",
    "2026-11-24-cpu-run-tiny-llama-wire-int8-tp2.json",
)
"""The reports that exhibits are drawn from."""


@dataclass(frozen=True)
class Cost:
    """What a wire costs a model on simulated ranks: nats for each token of a text, with the wire and with exact rows."""

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
        feeds: The GEMM whose partial sums are added, such as ``o_proj``; ``third``: the third of the layers, such as ``first``.
        sums: The error of sums whose parts came in codes.
        results: The error of the normalised rows that are made of these sums and sent in codes.
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

    def __add__(self, other: Accuracy) -> Accuracy:
        return Accuracy(self.costs + other.costs, self.errors + other.errors)


def parse(text: str, file: str) -> Accuracy:
    """What one report of ``tw-compile run --wire`` says.

    Raises:
        UsageError: The text is not such a report. The message names ``--from`` and ``file``.
    """
    try:
        report = json.loads(text)
        name = Path(file).name
        return Accuracy(_costs(report, name)) if "costs" in report else Accuracy((), _errors(report, name))
    except (ValueError, KeyError, TypeError) as error:
        got = f"{type(error).__name__}: {error}"
        raise UsageError(f"--from: expected a report of tw-compile run --wire, got {file!r} ({got})") from error


def _costs(report: dict[str, Any], file: str) -> tuple[Cost, ...]:
    sites = "" if report["wire_sites"] == "all" else f", sums of {report['wire_sites']} alone"
    return tuple(
        Cost(
            str(report["wire"]),
            int(cost["world_size"]),
            f"{report['checkpoint']}{sites}",
            float(cost["nats"]),
            float(cost["exact_nats"]),
            file,
        )
        for cost in report["costs"]
    )


def _errors(report: dict[str, Any], file: str) -> tuple[CallError, ...]:
    wire = report["wire"]
    return tuple(
        CallError(
            str(wire["wire"]),
            str(report["model"]),
            str(kind["feeds"]),
            str(kind["third"]),
            float(kind["sum"]["error"]),
            float(kind["hidden"]["error"]),
            file,
        )
        for kind in wire["classes"]
    )


def given(files: Iterable[str]) -> Accuracy:
    """The accuracy by the reports of ``--from``.

    Raises:
        UsageError: A file can't be read, or is no report of ``tw-compile run --wire``.
    """
    return sum((parse(text_of(file), file) for file in files), Accuracy())


def committed_accuracy() -> Accuracy:
    """The accuracy by the reports that the checkout has; a wheel has none."""
    files = [RESULTS / name for name in COMMITTED if (RESULTS / name).exists()]
    return sum((parse(file.read_text(), str(file)) for file in files), Accuracy())
