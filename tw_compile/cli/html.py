"""The inspection as one self-contained HTML page: no scripts, nothing loaded from elsewhere."""

from __future__ import annotations

import html
from importlib import resources
from string import Template
from typing import Any

import torch.fx as fx

from tw_compile.cli.drawing import draw
from tw_compile.cli.render import absorbed, carrier, device, duration, group_sites, layers_of, ranges, size, traced_line
from tw_compile.cli.render_split import WINDOW_COLUMNS, split_lines, window_rows
from tw_compile.graph import text


def page(report: dict[str, Any], before: fx.Graph, after: fx.Graph, layer: int | None) -> str:
    """The whole page. ``layer`` is the layer to draw, or None when no all_reduce belongs to a layer."""
    drawn = ""
    if layer is not None:
        lines = text.layer_lines(before, layer), text.layer_lines(after, layer)
        drawn = (
            f"<h2>Layer {layer}, before and after</h2>{_LEGEND}{_HALVES if _is_split(lines[1]) else ''}"
            f'<figure class="drawing">{draw(*lines)}</figure>'
            f"<details><summary>the same as text</summary>{_diff_text(lines)}</details>"
        )
    files = resources.files("tw_compile.cli")
    template = Template((files / "page.html").read_text())
    versions = report["versions"]
    return template.substitute(
        style=(files / "page.css").read_text(),
        title=html.escape(f"{report['model']} on {report['world_size']} ranks"),
        facts=html.escape(
            f"{report['layers']} layers, {report['dtype']}, {report['tokens'][0]} tokens, "
            f"{report['world_size']} ranks of {device(report)}"
        )
        + (f"<br>{html.escape(line)}" if (line := traced_line(report)) else ""),
        counts=_counts(report),
        drawing=drawn,
        groups=_groups(report),
        refused=_not_fused(report) + _splits(report),
        sites=_sites(report),
        footer=html.escape(
            f"tw_compile {versions['tw_compile']}, torch {versions['torch']}, transformers {versions['transformers']}; "
            f"the passes took {duration(report['seconds']['passes'])}"
        ),
    )


_LEGEND = (
    '<p class="legend"><span class="key removed">removed</span> <span class="key added">added</span> '
    '<span class="key same">unchanged</span> Read downwards in the order of execution. The line on the right of each side '
    "is the residual stream; a dot is a node that reads and writes it. Views are left out, runs of pointwise nodes are one "
    "box; hover over a box for its nodes.</p>"
)


_HALVES = (
    '<p class="legend">The tokens are split: a stripe says whose half a box computes, <span class="key half1">half 1</span> '
    '<span class="key half2">half 2</span>; boxes without one are for all tokens.</p>'
)


def _is_split(lines: list[text.Line]) -> bool:
    return any(line.half is not None for line in lines)


def _counts(report: dict[str, Any]) -> str:
    counts = report["counts"]
    fused = f"fused, {absorbed(report['sites'])} with their GEMM"
    names = {"all_reduce": "all_reduces", "fused": fused, "refused": "refused", "gated": "gated"}
    return "".join(f'<div class="tile {key}"><b>{counts[key]}</b>{name}</div>' for key, name in names.items())


def _row(cells: list[Any], tag: str = "td") -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"


def _table(header: list[str], rows: list[list[Any]]) -> str:
    body = "".join(_row(row) for row in rows)
    return f'<div class="wide"><table><thead>{_row(header, "th")}</thead><tbody>{body}</tbody></table></div>'


def _decision(site: dict[str, Any]) -> str:
    return f"{site['decision']}: {site['reason']}" if site["reason"] else site["decision"]


def _gemm(site: dict[str, Any]) -> str:
    return "absorbed" if site["producer"] == "mm" else "-"


def _groups(report: dict[str, Any]) -> str:
    rows = [
        [
            group["count"],
            group["layers"],
            group["form"],
            size(group["bytes"]),
            carrier(group),
            _gemm(group),
            _decision(group),
        ]
        for group in group_sites(report["sites"])
    ]
    return _table(["sites", "layers", "form", "message", "transport", "gemm", "decision"], rows)


def _not_fused(report: dict[str, Any]) -> str:
    sites = [site for site in report["sites"] if site["decision"] != "fused"]
    if not sites:
        return ""
    lines = "".join(
        f"<li>site {site['index']}, layer {ranges(layers_of(site)) or '-'}: "
        f"<b>{html.escape(site['reason'])}</b>, {html.escape(site['detail'])}</li>"
        for site in sites
    )
    return f"<h3>Why not</h3><ul>{lines}</ul>"


def _splits(report: dict[str, Any]) -> str:
    text, traced = "", report.get("layers_traced")
    for split in report["splits"]:
        text += f"<p>{'<br>'.join(map(html.escape, split_lines(split, traced)))}</p>"
        rows = [list(row) for row in window_rows(split)]
        text += _table(list(WINDOW_COLUMNS), rows) if rows else ""
    return f"<h3>Token split</h3>{text}" if text else ""


def _sites(report: dict[str, Any]) -> str:
    rows = [
        [
            site["index"],
            ranges(layers_of(site)) or "-",
            site["node"],
            site["form"],
            size(site["bytes"]),
            carrier(site),
            _gemm(site),
            _decision(site),
            site["detail"],
        ]
        for site in report["sites"]
    ]
    return _table(["site", "layer", "node", "form", "message", "transport", "gemm", "decision", "why"], rows)


def _diff_text(lines: tuple[list[text.Line], list[text.Line]]) -> str:
    rows = text.aligned(text.diff(*lines))
    marked = "\n".join(f'<span class="{change}">{html.escape(row)}</span>' for change, row in rows)
    return f"<pre>{marked}</pre>"
