"""The report as a picture: time and speed-up against tokens. Needs matplotlib."""

from __future__ import annotations

from typing import Any

from tw_compile.benchmark.layer.results import rows_of
from tw_compile.benchmark.plot import draw_lines, label_ends, save, tokens_axis


def plot(report: dict[str, Any], path: str) -> None:
    """Two panels, written to ``path`` (png or svg)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in rows_of(report) if not row.is_swept]
    figure = Figure(figsize=(13, 5.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    draw_lines(left, rows, "p50_us")
    left.set(yscale="log", ylabel="µs a layer (median, slowest rank; band: p20 to p80)")
    draw_lines(right, rows, "speedup")
    right.set(ylabel="speed-up over the best unfused variant")
    for panel in (left, right):
        tokens_axis(panel, sorted({row.tokens for row in rows}))
    figure.canvas.draw()  # settles the limits that the labels are placed by
    for panel in (left, right):
        label_ends(panel)
    right.axhline(1.0, color="#777777", linewidth=1.0)  # after the labels, which every line gets
    figure.suptitle(
        f"A layer of {report['model']}, {report['dtype']}, {report['world_size']} x {report['device_name']}",
        x=0.01,
        ha="left",
        fontsize=12,
    )
    save(figure, path)
