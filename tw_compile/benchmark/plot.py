"""The report as a picture: time against tokens, and time as a share of the links' bound. Needs matplotlib."""

from __future__ import annotations

from typing import Any

from tw_compile.benchmark.results import bound_of, rows_of
from tw_compile.harness.plot import Panel, draw, times_panel


def plot(report: dict[str, Any], path: str) -> None:
    """One line of two panels for each hidden size; written to ``path`` (png or svg)."""
    rows = rows_of(report)
    lines = []
    for hidden in sorted({row.hidden for row in rows}):
        own = [row for row in rows if row.hidden == hidden]
        title = f"hidden {hidden}, {report['dtype']}"
        share = {
            "ylim": (0, None if report.get("through_host") else 1),
            "ylabel": f"share of {bound_of(report)}",
        }
        # A contender that moves fewer bytes has another bound.
        shared = [row for row in own if row.gives_what_peers_give]
        lines.append([times_panel(own, "a call", title), Panel(shared, "share_of_bound", share, title)])
    draw(lines, f"all_reduce + residual + RMSNorm, {report['world_size']} x {report['device_name']}", path)
