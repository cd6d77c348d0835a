"""The report as text: one table a number of tokens."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tw_compile.benchmark.layer.results import LayerRow, rows_of
from tw_compile.benchmark.results import failures
from tw_compile.benchmark.table import SMOKE_TEST, STYLES, WIDTH, mebibytes, number, print_verdict, verdict

COLUMNS = ("", "us a layer", "p20 - p80", "speed-up", "hidden", "peak memory", "fused", "numerics")
_NUMBERS = COLUMNS[1:7]


def print_report(console: Console, report: dict[str, Any]) -> None:
    """Header, one table a number of tokens, and who failed."""
    versions = report["versions"]
    if not console.is_terminal:  # where lines have no end, rich takes 80 characters and cuts columns
        console.width = max(console.width, WIDTH)
    console.print(
        f"{report['model']}, layers: {report['layers']}, {report['world_size']} x {report['device_name']}, "
        f"{report['dtype']}, torch {versions['torch']}",
        style="bold",
        markup=False,
    )
    if report["device"] != "cuda":
        console.print(SMOKE_TEST, style="yellow")
    else:
        switched = ", ".join(f"{name}={value}" for name, value in report["environment"].items())
        console.print(
            f"slowest rank, {report['repeats']} replays of a CUDA graph; hidden is the share of the communication's time; "
            f"{switched}; NCCL {versions['nccl']}",
            style="dim",
            soft_wrap=True,
        )
    rows = rows_of(report)
    for tokens, group in groupby(rows, key=lambda row: row.tokens):
        console.print()
        _print_tokens(console, tokens, report["batch"], list(group))
        for sweep in report["sweeps"]:
            if sweep["tokens"] == tokens:
                compared = f"{sweep['excess']:.1%} over the fastest of {sweep['compared']}, {sweep['best']}"
                console.print(f"  planned, {sweep['planned']}: {compared}", markup=False, soft_wrap=True)
    print_verdict(console, [(row, f"{row.tokens} tokens") for row in failures(rows)])


def _print_tokens(console: Console, tokens: int, batch: int, rows: list[LayerRow]) -> None:
    title = f"{tokens} tokens in {batch} sequence{'s' if batch > 1 else ''}, messages of {mebibytes(rows[0].nbytes)}"
    table = Table(title=title, title_justify="left", title_style="", box=None, pad_edge=False, header_style="dim")
    for name in COLUMNS:
        table.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, _cells(row)), style=STYLES.get(row.kind))
    console.print(table)
    peers = sorted({row.best_peer for row in rows if row.best_peer is not None})
    if peers:
        console.print(f"  speed-up: against {', '.join(peers)}, the best unfused here", style="dim", markup=False)
    for row in rows:
        if row.split is not None:
            console.print(f"  {row.label}: {row.split}", style="dim", markup=False, soft_wrap=True)
        if row.reason is not None:
            console.print(f"  {row.label}: {row.reason}", style="dim", markup=False, soft_wrap=True)


def _cells(row: LayerRow) -> tuple[str, ...]:
    return (
        row.label,
        number(row.p50_us, ".1f"),
        "-" if row.p20_us is None else f"{row.p20_us:.1f} - {row.p80_us:.1f}",
        number(row.speedup, ".2f") + ("" if row.speedup is None else "x"),
        number(row.communication_hidden, ".0%"),
        "-" if row.peak_bytes is None else mebibytes(row.peak_bytes),
        "-" if row.fused is None else f"{row.fused} of {row.all_reduces}",
        verdict(row),
    )
