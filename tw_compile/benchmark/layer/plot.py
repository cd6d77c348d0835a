"""The report as a picture: time and speed-up against tokens. Needs matplotlib."""

from __future__ import annotations

from typing import Any

from tw_compile.benchmark.layer.results import rows_of
from tw_compile.harness.plot import Panel, draw, times_panel


def plot(report: dict[str, Any], path: str) -> None:
    """Two panels, written to ``path`` (png or svg)."""
    rows = [row for row in rows_of(report) if not row.is_swept]
    one_layer = report["command"] == "bench layer"
    speedups = Panel(rows, "speedup", {"ylabel": "speed-up over the best unfused variant"}, line=1.0)
    what = f"A layer of {report['model']}" if one_layer else f"{report['model']}, layers: {report['layers']}"
    title = f"{what}, {report['dtype']}, {report['world_size']} x {report['device_name']}"
    draw([[times_panel(rows, "a layer" if one_layer else "a run"), speedups]], title, path)
