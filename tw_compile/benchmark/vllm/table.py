"""The report as text: one table a trace."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from rich.console import Console
from rich.markup import escape

from tw_compile.benchmark.vllm.results import BUDGET, NOISE, WIRE_BUDGET, VllmRow, failures, rows_of
from tw_compile.benchmark.vllm.traces import ACCURACY, MIXED
from tw_compile.gating.table import size
from tw_compile.harness.table import mebibytes, number, plain_table, print_header, print_verdict, switches
from tw_compile.kernels.collective.wires import EXACT

COLUMNS = ("", "tokens/s", "slowest - fastest", "TTFT p50 / p99 ms", "TPOT p50 / p99 ms", "speed-up", "as off's")
_STYLES = {"ours": "bold", "control": "dim", "bound": "dim"}


def print_report(console: Console, report: dict[str, Any]) -> None:
    """Print a header, one table for each trace, one of accuracy, one of starts, and what failed."""
    versions = report["versions"]
    subject = f"{report['model']}, layers: {report['layers']}"
    print_header(console, report, subject, f"vLLM {versions['vllm']}, torch {versions['torch']}")
    meaning = (
        "says nothing of rounding with 2 ranks, where every all_reduce gives the same bits"
        if report["world_size"] == 2
        else f"may be {NOISE:.0f} standard errors below that of the controls"
    )
    console.print(
        f"median of {report['repeats']} rounds; random weights and tokens, greedy; TTFT from the start, when all requests are "
        f"there; as off's: share of the tokens after equal ones, which {meaning}; {switches(report)}; NCCL {versions['nccl']}",
        style="dim",
        soft_wrap=True,
    )
    rows = rows_of(report)
    timed = [row for row in rows if row.trace != ACCURACY]
    for (_, trace, tokens), group in groupby(sorted(timed, key=_order), key=_order):
        console.print()
        _print_trace(console, trace, tokens, list(group))
    console.print()
    if compared := [row for row in rows if row.logprob_error is not None]:
        _print_accuracy(console, compared)
        console.print()
    _print_starts(console, report)
    failed = [f"{row.label}, {row.trace} at {row.tokens}: {row.reason or row.refused}" for row in failures(rows)]
    print_verdict(
        console, failed, "all engines ran, and none of ours was found worse than vLLM alone", report["incomplete"]
    )


def _order(row: VllmRow) -> tuple[int, str, int]:
    return ("prefill", "mixed", "decode").index(row.trace), row.trace, row.tokens


def _print_trace(console: Console, trace: str, tokens: int, rows: list[VllmRow]) -> None:
    what = f"decode, {tokens} requests" if trace == "decode" else f"{trace}, {tokens} tokens a step"
    table = plain_table(COLUMNS, title=what, no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, _cells(row)), style=_STYLES.get(row.kind))
    console.print(table)
    if trace == "mixed":
        console.print(f"  {rows[0].requests} requests: {MIXED}", style="dim", markup=False, soft_wrap=True)
    for row in rows:
        if row.refused is not None:
            console.print(f"  {row.label}: no speed-up: {row.refused}", style="dim", markup=False, soft_wrap=True)


def _print_accuracy(console: Console, rows: list[VllmRow]) -> None:
    console.print(f"log-probabilities against the same weights in float32, one step of {rows[0].chunk} tokens")
    table = plain_table(("", "rms error", "of off's"), no_wrap=True)  # no title: a table this narrow would wrap it
    for row in rows:
        error, ratio = number(row.logprob_error, ".3g"), number(row.of_off, ".3f")
        table.add_row(escape(row.label), error, ratio, style=_STYLES.get(row.kind))
    console.print(table)
    with_wires = f", {WIRE_BUDGET}x with a wire" if any(row.wire != EXACT for row in rows) else ""
    console.print(f"  ours may be {BUDGET}x of off's at every chunk size{with_wires}", style="dim")


def _cells(row: VllmRow) -> tuple[str, ...]:
    return (
        row.label,
        number(row.tokens_per_s, ",.0f"),
        "-" if row.slowest is None else f"{row.slowest:,.0f} - {row.fastest:,.0f}",
        _pair(row.ttft_p50_ms, row.ttft_p99_ms),
        _pair(row.tpot_p50_ms, row.tpot_p99_ms),
        number(row.speedup, ".3f") + ("" if row.speedup is None else "x"),
        number(row.agreement, ".2%"),
    )


def _pair(p50: float | None, p99: float | None) -> str:
    return "-" if p50 is None else f"{p50:.2f} / {p99:.2f}"


def _flashinfer(engine: dict[str, Any]) -> str:
    """Up to which size vLLM's own fusion, by FlashInfer, served this engine. Reports from before 27 Nov 2026 don't say."""
    fused = engine.get("flashinfer_fusion_bytes")
    if fused is None:
        return "-"
    if not engine["flashinfer_importable"]:
        return "not installed"
    return f"up to {size(fused)}" if fused else "off"


def _print_starts(console: Console, report: dict[str, Any]) -> None:
    engines = report["engines"]
    columns = ("", "tokens a step", "start s", "torch.compile s", "peak memory", "FlashInfer's fusion")
    table = plain_table(columns, title="starts with empty caches", no_wrap=True)
    for engine in engines:
        peak = engine.get("peak_bytes")
        table.add_row(
            engine["variant"],
            str(engine["chunk"]),
            number(engine.get("startup_seconds"), ".1f"),
            number(engine.get("compile_seconds"), ".1f"),
            "-" if peak is None else mebibytes(peak),
            _flashinfer(engine),
        )
    console.print(table)
    if report["together"]:
        text = "  engines of a chunk size started at once: these seconds are of a machine that all of them load"
        console.print(text, style="dim", soft_wrap=True)
    for engine in engines:
        for line in engine["lines"]:
            text = f"  {engine['variant']}, {engine['chunk']}: {line}"
            console.print(text, style="dim", markup=False, soft_wrap=True)
