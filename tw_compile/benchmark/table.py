"""The report as text: one table a size."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tw_compile.benchmark.gated import LABEL, regret_line
from tw_compile.benchmark.results import Measured, Row, failures, rows_of

COLUMNS = ("", "p50 us", "p20 - p80 us", "GB/s", "of bound", "SMs", "speed-up", "residual", "numerics")
_NUMBERS = COLUMNS[1:7]
WIDTH = 100
SMOKE_TEST = "gloo ranks on a CPU, a smoke test: these times say nothing about speed"
STYLES = {"ours": "bold", "bound": "dim"}


def print_report(console: Console, report: dict[str, Any]) -> None:
    """Header, one table a size, and who failed."""
    versions = report["versions"]
    if not console.is_terminal:  # where lines have no end, rich takes 80 characters and cuts columns
        console.width = max(console.width, WIDTH)
    console.print(
        f"all_reduce + residual + RMSNorm, {report['world_size']} x {report['device_name']}, {report['dtype']}, "
        f"torch {versions['torch']}",
        style="bold",
        markup=False,
    )
    if report["device"] != "cuda":
        console.print(SMOKE_TEST, style="yellow")
    else:
        console.print(
            f"slowest rank, {report['repeats']} replays of CUDA graphs of {report['calls']} calls; GB/s is bus bandwidth; the "
            f"bound is two-shot traffic at {report['link_gb_per_s']:.0f} GB/s a direction",
            style="dim",
        )
        switched = ", ".join(f"{name}={value}" for name, value in report["environment"].items())
        console.print(f"{switched}; NCCL {versions['nccl']}, FlashInfer {versions['flashinfer'] or '-'}", style="dim")
    rows = rows_of(report)
    for (hidden, tokens), group in groupby(rows, key=lambda row: (row.hidden, row.tokens)):
        console.print()
        _print_size(console, hidden, tokens, list(group))
    if any(row.label == LABEL for row in rows):
        console.print()
        console.print(regret_line(report), style="bold", markup=False, soft_wrap=True)
    print_verdict(console, [(row, f"[{row.tokens}, {row.hidden}]") for row in failures(rows)])


def print_verdict(console: Console, bad: Sequence[tuple[Any, str]]) -> None:
    """``bad``: rows of ours that failed, each with the size at which it did."""
    console.print()
    for row, where in bad:
        line = f"FAILED  {row.label} at {where}: {row.outcome}: {row.reason}"
        console.print(line, style="red", markup=False, soft_wrap=True)
    if not bad:
        console.print("PASSED  ours: error budget and equal bits on all ranks, at every size", style="green")


def _print_size(console: Console, hidden: int, tokens: int, rows: list[Row]) -> None:
    title = f"{tokens} tokens x {hidden}, {mebibytes(rows[0].nbytes)}, input sets: {max(row.sets for row in rows)}"
    table = Table(title=title, title_justify="left", title_style="", box=None, pad_edge=False, header_style="dim")
    for name in COLUMNS:
        table.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, _cells(row)), style=STYLES.get(row.kind))
    console.print(table)
    peers = sorted({row.best_peer for row in rows if row.best_peer is not None})
    if peers:
        console.print(f"  speed-up: against {', '.join(peers)}, the best peer here", style="dim", markup=False)
    for row in rows:
        if row.chosen is not None:
            regret = "" if row.regret is None else f"; regret {row.regret:.1%}, best {row.best}"
            console.print(f"  {row.label}: {row.chosen}{regret}", style="dim", markup=False, soft_wrap=True)
        if row.reason is not None:
            console.print(f"  {row.label}: {row.reason}", style="dim", markup=False, soft_wrap=True)


def _cells(row: Row) -> tuple[str, ...]:
    span = "-" if row.p20_us is None else f"{row.p20_us:.1f} - {row.p80_us:.1f}"
    return (
        row.label,
        number(row.p50_us, ".1f"),
        span,
        number(row.bus_gb_per_s, ".1f"),
        number(row.share_of_bound, ".1%"),
        number(row.num_sms, "d"),
        number(row.speedup, ".2f") + ("" if row.speedup is None else "x"),
        row.residual_form.partition(" ")[0] or "-",
        verdict(row),
    )


def verdict(row: Measured) -> str:
    if row.kind == "bound" and row.outcome in ("timed", "computed"):
        return row.outcome
    return row.numerics if row.outcome in ("timed", "numerics failed") else row.outcome


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"
