"""The report as a picture: time and speed-up against tokens. Needs matplotlib."""

from __future__ import annotations

from typing import Any

from tw_compile.benchmark.layer.results import rows_of
from tw_compile.harness.plot import Panel, draw, times_panel

PARTS = {"bench layer": "a layer", "bench gemm-site": "a GEMM site"}


def plot(report: dict[str, Any], path: str) -> None:
    """Two panels, written to ``path`` (png or svg)."""
    rows = [row for row in rows_of(report) if not row.is_swept]
    part = PARTS.get(report["command"])
    speedups = Panel(rows, "speedup", {"ylabel": "speed-up over the best unfused variant"}, line=1.0)
    what = (
        f"{report['model']}, layers: {report['layers']}"
        if part is None
        else f"{part[0].upper()}{part[1:]} of {report['model']}"
    )
    title = f"{what}, {report['dtype']}, {report['world_size']} x {report['device_name']}"
    draw([[times_panel(rows, part or "a run"), speedups]], title, path)
