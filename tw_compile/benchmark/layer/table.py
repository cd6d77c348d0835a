"""The report as text: one table a number of tokens."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from tw_compile.benchmark.layer.results import LayerRow, rows_of
from tw_compile.harness.table import ReportTable, mebibytes, number, times
from tw_compile.kernels.collective.wires import EXACT

UNITS = {"bench layer": "us a layer", "bench gemm-site": "us a site"}


class LayerTable(ReportTable[LayerRow]):
    own_columns = ("speed-up", "hidden", "peak memory", "fused")
    baseline = "the best unfused"
    promise = "ours: error budget, and equal bits on all ranks where every all_reduce is fused, at every size"

    def unit(self) -> str:
        return UNITS.get(self.report["command"], "us a run")

    def subject(self) -> str:
        return f"{self.report['model']}, layers: {self.report['layers']}"

    def method(self) -> str:
        first, last = self.report["short_kernel_us"]
        return (
            f"{self.report['repeats']} replays of a CUDA graph; hidden is the share of the communication's time; "
            f"a short kernel took {first:.2f} us at first and {last:.2f} us at the end"
        )

    def size(self, row: LayerRow) -> str:
        return f"{row.tokens} tokens"

    def asked(self) -> list[str]:
        return [f"{tokens} tokens" for tokens in self.report["tokens"]]

    def title(self, rows: list[LayerRow]) -> str:
        batch = self.report["batch"]
        sequences = f"{batch} sequence{'s' if batch > 1 else ''}"
        return f"{rows[0].tokens} tokens in {sequences}, messages of {mebibytes(rows[0].nbytes)}"

    def own_cells(self, row: LayerRow) -> tuple[str, ...]:
        return (
            times(row.speedup),
            number(row.communication_hidden, ".0%"),
            "-" if row.peak_bytes is None else mebibytes(row.peak_bytes),
            "-" if row.fused is None else f"{row.fused} of {row.all_reduces}",
        )

    def note(self, row: LayerRow) -> str | None:
        return row.split if row.gemms is None else f"{row.split}; SMs that GEMMs leave: {row.gemms}"

    def conclusions(self, rows: list[LayerRow]) -> list[str]:
        wires = [
            f"{row.label}: {row.of_exact:.3f}x of {row.label.removesuffix(f'-{row.wire}')}"
            for row in rows
            if row.of_exact is not None
        ]
        if any(row.wire != EXACT for row in rows):
            wires.append(
                "the error budget of rows in codes is the error of the same codes in torch, in an unfused graph"
            )
        return wires + [
            f"planned, {sweep['planned']}: {sweep['excess']:.1%} over the fastest of {sweep['compared']}, {sweep['best']}"
            for sweep in self.report["sweeps"]
            if sweep["tokens"] == rows[0].tokens
        ]


def print_report(console: Console, report: dict[str, Any]) -> None:
    LayerTable(report, rows_of(report)).print(console)
