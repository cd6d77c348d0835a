"""Reports as text: one table a size."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Generic

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tw_compile.benchmark.gated import LABEL, regret_line
from tw_compile.benchmark.results import AnyRow, Measured, Row, failures, rows_of

WIDTH = 100
SMOKE_TEST = "gloo ranks on a CPU, a smoke test: these times say nothing about speed"
STYLES = {"ours": "bold", "bound": "dim"}
_LEFT = ("", "residual", "numerics")


class ReportTable(ABC, Generic[AnyRow]):
    """What one benchmark's report says as text; :meth:`print` is the same for all.

    Attributes:
        own_columns: Between times and verdict; :meth:`own_cells` fills them.
        baseline: What a speed-up is against.
        promise: What ours are held to.
    """

    own_columns: tuple[str, ...]
    baseline: str
    promise = "error budget and equal bits on all ranks"

    def __init__(self, report: dict[str, Any], rows: list[AnyRow]) -> None:
        self.report = report
        self.rows = rows

    @abstractmethod
    def subject(self) -> str:
        """What was measured."""

    @abstractmethod
    def method(self) -> str:
        """How it was measured."""

    @abstractmethod
    def unit(self) -> str:
        """Of the times."""

    @abstractmethod
    def size(self, row: AnyRow) -> str:
        """Rows of the same size make a table."""

    @abstractmethod
    def asked(self) -> list[str]:
        """All sizes that were to be measured."""

    @abstractmethod
    def title(self, rows: list[AnyRow]) -> str:
        """Of a table of these rows."""

    @abstractmethod
    def own_cells(self, row: AnyRow) -> tuple[str, ...]:
        """As many as there are ``own_columns``."""

    @abstractmethod
    def note(self, row: AnyRow) -> str | None:
        """A line below the table."""

    def conclusions(self, rows: list[AnyRow]) -> list[str]:
        """Lines about all rows of a table."""
        return []

    def summary(self) -> str | None:
        """A line about all tables, unless some are missing."""
        return None

    def print(self, console: Console) -> None:
        """Header, one table a size, who failed, and what is missing."""
        report, versions = self.report, self.report["versions"]
        if not console.is_terminal:  # where lines have no end, rich takes 80 characters and cuts columns
            console.width = max(console.width, WIDTH)
        console.print(
            f"{self.subject()}, {report['world_size']} x {report['device_name']}, {report['dtype']}, "
            f"torch {versions['torch']}",
            style="bold",
            markup=False,
        )
        if report["device"] != "cuda":
            console.print(SMOKE_TEST, style="yellow")
        else:
            switched = ", ".join(f"{name}={value}" for name, value in report["environment"].items())
            made_with = f"{switched}; NCCL {versions['nccl']}, FlashInfer {versions['flashinfer'] or '-'}"
            for line in (f"slowest rank, {self.method()}", made_with):
                console.print(line, style="dim", markup=False, soft_wrap=True)
        for _, group in groupby(self.rows, key=self.size):
            console.print()
            self._print_size(console, list(group))
        incomplete = self._incomplete()
        summary = None if incomplete else self.summary()
        if summary is not None:
            console.print()
            console.print(summary, style="bold", markup=False, soft_wrap=True)
        print_verdict(console, [(row, self.size(row)) for row in failures(self.rows)], self.promise, incomplete)

    def _incomplete(self) -> str | None:
        """What is missing, and why; None where nothing is."""
        reason = self.report["incomplete"]
        measured = {self.size(row) for row in self.rows}
        missing = ", ".join(size for size in self.asked() if size not in measured)
        return None if reason is None else f"missing {missing or 'no size'}: {reason}"

    def _print_size(self, console: Console, rows: list[AnyRow]) -> None:
        table = Table(
            title=self.title(rows), title_justify="left", title_style="", box=None, pad_edge=False, header_style="dim"
        )
        for name in ("", self.unit(), "p20 - p80", *self.own_columns, "numerics"):
            table.add_column(name, justify="left" if name in _LEFT else "right", no_wrap=True)
        for row in rows:
            span = "-" if row.p20_us is None else f"{row.p20_us:.1f} - {row.p80_us:.1f}"
            cells = (row.label, number(row.p50_us, ".1f"), span, *self.own_cells(row), verdict(row))
            table.add_row(*map(escape, cells), style=STYLES.get(row.kind))
        console.print(table)
        peers = sorted({row.best_peer for row in rows if row.best_peer is not None})
        notes = [f"speed-up: against {', '.join(peers)}, {self.baseline} here"] if peers else []
        for row in rows:
            notes += [f"{row.label}: {text}" for text in (self.note(row), row.reason) if text is not None]
        for note in notes:
            console.print(f"  {note}", style="dim", markup=False, soft_wrap=True)
        for line in self.conclusions(rows):
            console.print(f"  {line}", markup=False, soft_wrap=True)


class KernelTable(ReportTable[Row]):
    own_columns = ("GB/s", "of bound", "SMs", "speed-up", "residual")
    baseline = "the best peer"

    def subject(self) -> str:
        return "all_reduce + residual + RMSNorm"

    def method(self) -> str:
        return (
            f"{self.report['repeats']} replays of CUDA graphs of {self.report['calls']} calls; GB/s is bus bandwidth; the "
            f"bound is two-shot traffic at {self.report['link_gb_per_s']:.0f} GB/s a direction"
        )

    def unit(self) -> str:
        return "us a call"

    def size(self, row: Row) -> str:
        return f"[{row.tokens}, {row.hidden}]"

    def asked(self) -> list[str]:
        return [f"[{tokens}, {hidden}]" for hidden in self.report["hidden"] for tokens in self.report["tokens"]]

    def title(self, rows: list[Row]) -> str:
        sets = max(row.sets for row in rows)
        return f"{rows[0].tokens} tokens x {rows[0].hidden}, {mebibytes(rows[0].nbytes)}, input sets: {sets}"

    def own_cells(self, row: Row) -> tuple[str, ...]:
        return (
            number(row.bus_gb_per_s, ".1f"),
            number(row.share_of_bound, ".1%"),
            number(row.num_sms, "d"),
            times(row.speedup),
            row.residual_form.partition(" ")[0] or "-",
        )

    def note(self, row: Row) -> str | None:
        regret = "" if row.regret is None else f"; regret {row.regret:.1%}, best {row.best}"
        return None if row.chosen is None else f"{row.chosen}{regret}"

    def summary(self) -> str | None:
        return regret_line(self.report) if any(row.label == LABEL for row in self.rows) else None


def print_report(console: Console, report: dict[str, Any]) -> None:
    KernelTable(report, rows_of(report)).print(console)


def print_verdict(
    console: Console,
    bad: Sequence[tuple[Any, str]],
    promise: str = ReportTable.promise,
    incomplete: str | None = None,
) -> None:
    """``bad``: rows of ours that failed, each with the size at which it did; ``promise``: what the others have kept.

    ``incomplete``: What is missing and why, if anything is: then nobody has passed.
    """
    console.print()
    for row, where in bad:
        line = f"FAILED  {row.label} at {where}: {row.outcome}: {row.reason}"
        console.print(line, style="red", markup=False, soft_wrap=True)
    if incomplete is not None:
        console.print(f"INCOMPLETE  {incomplete}", style="red", markup=False, soft_wrap=True)
    elif not bad:
        console.print(f"PASSED  ours: {promise}, at every size", style="green", soft_wrap=True)


def verdict(row: Measured) -> str:
    if row.kind == "bound" and row.outcome in ("timed", "computed"):
        return row.outcome
    return row.numerics if row.outcome in ("timed", "numerics failed") else row.outcome


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"
