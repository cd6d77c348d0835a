"""The report of ``bench beside`` as text: a table for each size, transport and GEMM."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape

from tw_compile.benchmark.beside.results import BesideRow, failures, rows_of
from tw_compile.harness.table import SMOKE_TEST, mebibytes, number, plain_table, print_header, print_verdict, switches

PROMISE = "results of calls and GEMMs are right, alone and at once"
METHOD = (
    "slowest rank, {repeats} replays of CUDA graphs; while one side is timed, the other one runs, from before its begin to "
    "behind its end"
)


def print_report(console: Console, report: dict[str, Any]) -> None:
    rows, versions = rows_of(report), report["versions"]
    print_header(console, report, "calls and GEMMs at once", f"torch {versions['torch']}")
    if report["device"] != "cuda":
        console.print(f"{SMOKE_TEST}, so there are no ratios", style="yellow")
    else:
        for line in (METHOD.format(repeats=report["repeats"]), f"{switches(report)}; NCCL {versions['nccl']}"):
            console.print(line, style="dim", markup=False, soft_wrap=True)
    for row in rows:
        console.print()
        _print_row(console, row, report)
    failed = [f"{_title(row)}: {row.reason}" for row in failures(rows, report["device"])]
    print_verdict(console, failed, PROMISE, _incomplete(rows, report))


def _print_row(console: Console, row: BesideRow, report: dict[str, Any]) -> None:
    of_leaving = f"GEMM that leaves {row.sms} SMs"
    table = plain_table(("", "us", "p20 - p80", "against alone"), ("", "against alone"), _title(row), no_wrap=True)
    for label, timed, against in (
        ("GEMM on all SMs", "gemm", ""),
        (of_leaving, "gemm_leaving", ""),
        (f"{of_leaving}, beside {_what(row)}s", "gemm_beside", _of_gemm(row)),
        (_what(row), "call", ""),
        (f"{_what(row)} beside GEMMs", "call_beside", _factor(row.call_factor)),
    ):
        p20, p50, p80 = row.span(timed)
        span = "-" if p20 is None else f"{p20:.1f} - {p80:.1f}"
        table.add_row(*map(escape, (label, number(p50, ".1f"), span, against)))
    console.print(table)
    if row.kernel is not None:
        console.print(f"  {row.kernel} on {number(row.call_sms, 'd')} SMs, residual {row.residual_form}", style="dim")
    if row.reason is not None:
        console.print(f"  {row.reason}", style="dim", markup=False, soft_wrap=True)
    if row.within is not None:
        style, word = ("green", "within") if row.within else ("yellow", "NOT within")
        asked = f"GEMM at most {report['gemm_at_most']:.2f}x, call at most {report['call_at_most']:.2f}x"
        console.print(f"  {word} what is asked: {asked}", style=style)


def _title(row: BesideRow) -> str:
    size = f"{row.tokens} tokens x {row.hidden}, {mebibytes(row.nbytes)}"
    way = f"over {row.transport} on {row.sms} SMs" if row.kind == "ours" else "bare copies by copy engines, a bound"
    return f"{size}, {way}; GEMM {row.gemm_shape}"


def _what(row: BesideRow) -> str:
    return "call" if row.kind == "ours" else "copy"


def _of_gemm(row: BesideRow) -> str:
    if row.gemm_factor is None:
        return "-"
    return f"{_factor(row.gemm_factor)}, {_factor(row.gemm_factor_of_all_sms)} of all SMs"


def _factor(factor: float | None) -> str:
    return "-" if factor is None else f"{factor:.3f}x"


def _incomplete(rows: list[BesideRow], report: dict[str, Any]) -> str | None:
    """What is missing, and why; None where nothing is."""
    if report["incomplete"] is None:
        return None
    measured = {row.size for row in rows}
    asked = [f"[{tokens}, {hidden}]" for hidden in report["hidden"] for tokens in report["tokens"]]
    missing = ", ".join(size for size in asked if size not in measured)
    return f"missing {missing or 'no size'}: {report['incomplete']}"
