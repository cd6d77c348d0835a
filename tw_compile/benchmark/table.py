"""The report as text: one table a size."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from tw_compile.benchmark.gated import LABEL, regret_line
from tw_compile.benchmark.results import Row, bound_of, rows_of
from tw_compile.harness.table import ReportTable, mebibytes, number, times


class KernelTable(ReportTable[Row]):
    own_columns = ("GB/s", "of bound", "SMs", "speed-up", "residual")
    baseline = "the best peer"

    def subject(self) -> str:
        return "all_reduce + residual + RMSNorm"

    def method(self) -> str:
        at_once = self.rows[0].at_once if self.rows else 1
        several = "" if at_once == 1 else f", {at_once} on their way at a time"
        return (
            f"{self.report['repeats']} replays of CUDA graphs of {self.report['calls']} calls{several}; GB/s is bus bandwidth; "
            f"the bound is {bound_of(self.report)}"
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
