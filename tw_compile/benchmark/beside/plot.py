"""The report of ``bench beside`` as a picture: bars of the five times of each row. Needs matplotlib."""

from __future__ import annotations

from typing import Any

from tw_compile.benchmark.beside.results import BesideRow, rows_of
from tw_compile.harness.plot import new_figure, save
from tw_compile.harness.requests import UsageError

_IN_A_LINE = 3
# Okabe and Ito's colours. What is beside the other side is darker than what is alone.
_BARS = (
    ("gemm", "GEMM,\nall SMs", "#56B4E9"),
    ("gemm_leaving", "GEMM,\nfewer SMs", "#56B4E9"),
    ("gemm_beside", "GEMM\nbeside calls", "#0072B2"),
    ("call", "call", "#E69F00"),
    ("call_beside", "call beside\nGEMMs", "#D55E00"),
)


def plot(report: dict[str, Any], path: str) -> None:
    """A panel for each row that has times; written to ``path`` (png or svg)."""
    rows = [row for row in rows_of(report) if row.gemm_p50_us is not None]
    if not rows:
        raise UsageError(f"--plot: expected a report with times, got one without any; {path!r} is not written")
    columns = min(len(rows), _IN_A_LINE)
    lines = -(-len(rows) // columns)
    figure, axes = new_figure(4.6 * columns, 4.2 * lines + 0.6, lines, columns)
    panels = list(axes.flat)
    for panel, row in zip(panels, rows, strict=False):
        _draw(panel, row)
    for unused in panels[len(rows) :]:
        unused.set_visible(False)
    save(figure, path, f"calls and GEMMs at once, {report['world_size']} x {report['device_name']}, {report['dtype']}")


def _draw(panel: Any, row: BesideRow) -> None:
    factors = {"gemm_beside": row.gemm_factor, "call_beside": row.call_factor}
    for place, (timed, _, colour) in enumerate(_BARS):
        p20, p50, p80 = row.span(timed)
        assert p20 is not None and p50 is not None and p80 is not None, "all five times come together"
        panel.bar(place, p50, color=colour, yerr=[[p50 - p20], [p80 - p50]], ecolor="#555555", capsize=2)
        factor = factors.get(timed)
        text = f"{p50:.0f}" if factor is None else f"{p50:.0f}\n{factor:.2f}x"
        panel.annotate(text, (place, p80), (0, 3), textcoords="offset points", ha="center", fontsize=8)
    panel.set_xticks(range(len(_BARS)), [label for _, label, _ in _BARS], fontsize=7)
    panel.set_ylabel("µs (median, slowest rank; p20 to p80)", fontsize=8)
    panel.margins(y=0.15)
    panel.spines[["top", "right"]].set_visible(False)
    way = f"over {row.transport} on {row.sms} SMs" if row.kind == "ours" else "by bare copies"
    title = f"{row.size} {way}\nGEMM {row.gemm_shape}"
    panel.set_title(title, loc="left", fontsize=9)
