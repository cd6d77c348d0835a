"""Reports as text: one table a size, who failed, and what is missing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from typing import Any, Generic

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tw_compile.harness.rows import AnyRow, Measured, failures

WIDTH = 100
SMOKE_TEST = "gloo ranks on a CPU, a smoke test: these times say nothing about speed"
STYLES = {"ours": "bold", "bound": "dim"}
PROMISE = "ours: error budget and equal bits on all ranks, at every size"
_LEFT = ("", "residual", "numerics")


def plain_table(
    columns: Sequence[str],
    left: Collection[str] = ("",),
    title: str | None = None,
    title_style: str = "",
    **column: Any,
) -> Table:
    """A table without lines; columns are right-justified but for those of ``left``. ``column``: settings of rich's columns."""
    table = Table(
        title=title, title_justify="left", title_style=title_style, box=None, pad_edge=False, header_style="dim"
    )
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", **column)
    return table


def print_header(console: Console, report: dict[str, Any], subject: str, versions: str) -> None:
    """Print what was measured, on which ranks and by which versions, and make the console as wide as tables need."""
    widen(console)
    ranks = f"{report['world_size']} x {report['device_name']}"
    console.print(f"{subject}, {ranks}, {report['dtype']}, {versions}", style="bold", markup=False)


def widen(console: Console, width: int = WIDTH) -> None:
    """Make a console that is no terminal at least ``width`` characters wide: there rich takes 80 and cuts columns."""
    if not console.is_terminal:
        console.width = max(console.width, width)


def switches(report: dict[str, Any]) -> str:
    """The variables that the ranks were started with."""
    return ", ".join(f"{name}={value}" for name, value in report["environment"].items())


class ReportTable(ABC, Generic[AnyRow]):
    """The report of one benchmark as text. :meth:`print` is the same for all benchmarks.

    Attributes:
        own_columns: The benchmark's own columns, between times and verdict; :meth:`own_cells` fills them.
        baseline: What speed-ups are relative to, in words.
        promise: The sentence about our kernels that is printed where nothing failed.
    """

    own_columns: tuple[str, ...]
    baseline: str
    promise = PROMISE

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
        """The unit of the times."""

    @abstractmethod
    def size(self, row: AnyRow) -> str:
        """The size that a row belongs to; rows of the same size make a table."""

    @abstractmethod
    def asked(self) -> list[str]:
        """All sizes that were to be measured."""

    @abstractmethod
    def title(self, rows: list[AnyRow]) -> str:
        """The title of a table of these rows."""

    @abstractmethod
    def own_cells(self, row: AnyRow) -> tuple[str, ...]:
        """The cells of a row, one for each of ``own_columns``."""

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
        print_header(console, report, self.subject(), f"torch {versions['torch']}")
        if report["device"] != "cuda":
            console.print(SMOKE_TEST, style="yellow")
        else:
            made_with = f"{switches(report)}; NCCL {versions['nccl']}, FlashInfer {versions['flashinfer'] or '-'}"
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
        print_verdict(console, failed_lines(self.rows, self.size), self.promise, incomplete)

    def _incomplete(self) -> str | None:
        """What is missing, and why; None where nothing is."""
        reason = self.report["incomplete"]
        measured = {self.size(row) for row in self.rows}
        missing = ", ".join(size for size in self.asked() if size not in measured)
        return None if reason is None else f"missing {missing or 'no size'}: {reason}"

    def _print_size(self, console: Console, rows: list[AnyRow]) -> None:
        columns = ("", self.unit(), "p20 - p80", *self.own_columns, "numerics")
        table = plain_table(columns, _LEFT, self.title(rows), no_wrap=True)
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


def failed_lines(rows: Sequence[AnyRow], where: Callable[[AnyRow], str]) -> list[str]:
    """A line for each row of ours that failed; ``where`` says at which size."""
    return [f"{row.label} at {where(row)}: {row.outcome}: {row.reason}" for row in failures(rows)]


def print_verdict(
    console: Console, failed: Sequence[str], promise: str = PROMISE, incomplete: str | None = None
) -> None:
    """Print a line for each failure; if there is none, print ``promise``, the sentence that then holds.

    ``incomplete`` says what is missing and why. If anything is missing, ``promise`` is not printed.
    """
    console.print()
    for line in failed:
        console.print(f"FAILED  {line}", style="red", markup=False, soft_wrap=True)
    if incomplete is not None:
        console.print(f"INCOMPLETE  {incomplete}", style="red", markup=False, soft_wrap=True)
    elif not failed:
        console.print(f"PASSED  {promise}", style="green", soft_wrap=True)


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
