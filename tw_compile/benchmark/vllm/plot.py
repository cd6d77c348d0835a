"""The report as a picture: tokens/s and speed-ups of each kind of trace. Needs matplotlib."""

from __future__ import annotations

from typing import Any

from tw_compile.benchmark.vllm.results import rows_of
from tw_compile.benchmark.vllm.spec import KINDS
from tw_compile.harness.plot import draw_lines, label_ends, new_figure, save, tokens_axis


def plot(report: dict[str, Any], path: str) -> None:
    """Two panels for each kind of trace, written to ``path`` (png or svg)."""
    rows = rows_of(report)
    kinds = [kind for kind in KINDS if any(row.trace == kind for row in rows)]
    figure, axes = new_figure(6.5 * len(kinds), 8.5, 2, len(kinds))
    for kind, upper, lower in zip(kinds, *axes, strict=True):
        own = [row for row in rows if row.trace == kind]
        draw_lines(upper, own, "tokens_per_s")
        upper.set_ylabel("tokens/s")
        upper.set_title(kind, loc="left", fontsize=10)
        draw_lines(lower, own, "speedup")
        lower.set_ylabel("speed-up over off")
        lower.update_datalim([(own[0].tokens, 1.0)])  # the line at 1 is drawn after the labels, and must not move them
        lower.autoscale_view()
        for panel in (upper, lower):
            tokens_axis(panel, sorted({row.tokens for row in own}))
            panel.set_xlabel("requests" if kind == "decode" else "tokens a step")
        if kind == "decode":
            upper.set_yscale("log")
    figure.canvas.draw()  # settles the limits that the labels are placed by
    for panel in axes.flat:
        label_ends(panel)
    for panel in axes[1]:
        panel.axhline(1.0, color="#777777", linewidth=1.0)  # drawn after the labels, because every line gets a label
    title = (
        f"vLLM {report['versions']['vllm']}, {report['model']}, {report['layers']} layers, {report['dtype']}, "
        f"{report['world_size']} x {report['device_name']}"
    )
    save(figure, path, title)
