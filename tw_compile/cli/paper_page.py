"""The report of a paper as one self-contained HTML page, and as text."""

from __future__ import annotations

import html
from importlib import resources
from itertools import groupby
from string import Template
from typing import Any

from rich.console import Console

from tw_compile.cli.paper_chart import chart
from tw_compile.harness.table import plain_table, widen

COLUMNS = ("series", "paper", "ours", "ratio", "how")
MOST_SHOWN = 12
"""Tables with more lines than this are closed at first."""
NOTHING = '<p class="empty">Neither side has a value, so nothing is drawn.</p>'
_WIDTH = 130
_CLASSES = {True: "holds", False: "fails", None: "open"}


def page(report: dict[str, Any]) -> str:
    """The HTML page. It loads nothing from elsewhere."""
    files = resources.files("tw_compile.cli")
    versions = report["versions"]
    facts = f"{report['source']}. The paper's hardware: {report['hardware']}"
    return Template((files / "paper_page.html").read_text()).substitute(
        style=(files / "page.css").read_text(),
        name=html.escape(report["paper"]),
        title=html.escape(report["title"]),
        facts=html.escape(facts + (". Drawn without measuring." if report["dry_run"] else ".")),
        missing="".join(f'<p class="empty">Not measured: {html.escape(why)}.</p>' for why in report["missing"]),
        exhibits="".join(map(_section, report["exhibits"])),
        footer=html.escape(f"tw_compile {versions['tw_compile']}, commit {versions['commit']}, {versions['date']}"),
    )


def _section(exhibit: dict[str, Any]) -> str:
    claims = "".join(
        f'<li class="{_CLASSES[claim["holds_here"]]}">{html.escape(claim["text"])}</li>' for claim in exhibit["claims"]
    )
    absent = (
        ""
        if exhibit["absent"] is None
        else f'<p class="empty">The paper\'s side: {html.escape(exhibit["absent"])}.</p>'
    )
    return (
        f'<section id="exhibit-{html.escape(exhibit["id"])}"><h2>{html.escape(exhibit["title"])}</h2>'
        f"<p>{html.escape(exhibit['says'])}</p>{chart(exhibit) or NOTHING}{absent}"
        f'<p class="differs"><b>What differs:</b> {html.escape(exhibit["differs"])}</p>'
        + (f'<ul class="claims">{claims}</ul>' if claims else "")
        + _table(exhibit)
        + _published(exhibit)
        + "</section>"
    )


def _table(exhibit: dict[str, Any]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in (exhibit["x"], *COLUMNS))
    lines = _lines(exhibit)
    rows = "".join(_row(cells, obtained) for cells, obtained in lines)
    return (
        f"<details{' open' if len(lines) <= MOST_SHOWN else ''}>"
        "<summary>paper, ours and ratio, value by value</summary>"
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></details>'
    )


def _lines(exhibit: dict[str, Any]) -> list[tuple[tuple[str, ...], str]]:
    """The lines of the comparison: the cells, and how the value was obtained.

    Values of a series that can't be had for the same reason share a line, unless the paper has a value.
    """

    def same(line: dict[str, Any]) -> tuple[Any, ...]:
        alone = line["how"] != "cannot" or line["paper"] is not None
        return (line["series"], line["how"], line["detail"], line["x"] if alone else None)

    groups = [list(group) for _, group in groupby(exhibit["comparison"], same)]
    return [(_cells(group, exhibit), group[0]["how"]) for group in groups]


def _row(cells: tuple[str, ...], obtained: str) -> str:
    numbers = "".join(f'<td class="number">{html.escape(cell)}</td>' for cell in cells[2:5])
    how = f'<td class="how-{obtained.replace(" ", "-")}">{html.escape(cells[5])}</td>'
    return f"<tr><td>{html.escape(cells[0])}</td><td>{html.escape(cells[1])}</td>{numbers}{how}</tr>"


def _published(exhibit: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(_x(point['x'], exhibit))}</td><td>{html.escape(line['name'])}</td>"
        f'<td class="number">{number(point["value"])}</td><td>{html.escape(how(point))}</td></tr>'
        for line in exhibit["series"]
        if line["side"] == "paper"
        for point in line["points"]
    )
    if not rows:
        return ""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in (exhibit["x"], "series", "paper", "how"))
    return (
        "<details><summary>the paper's values, and their source</summary>"
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></details>'
    )


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def how(point: dict[str, Any]) -> str:
    return f"{point['how']} ({point['detail']})"


def _x(x: float, exhibit: dict[str, Any]) -> str:
    return next((str(tick["name"]) for tick in exhibit["ticks"] if tick["x"] == x), f"{x:g}")


def _cells(group: list[dict[str, Any]], exhibit: dict[str, Any]) -> tuple[str, ...]:
    """The cells of one line for a ``group`` whose members differ only in their x."""
    line = group[0]
    ratio = "-" if line["ratio"] is None else f"{line['ratio']:.2f}"
    return (
        ", ".join(_x(each["x"], exhibit) for each in group),
        line["series"],
        number(line["paper"]),
        number(line["ours"]),
        ratio,
        how(line),
    )


def print_report(console: Console, report: dict[str, Any]) -> None:
    widen(console, _WIDTH)
    console.print(report["title"], style="bold", markup=False)
    console.print(f"{report['source']}; {report['hardware']}", style="dim", markup=False)
    for exhibit in report["exhibits"]:
        console.print()
        console.print(exhibit["title"], style="bold", markup=False)
        console.print(exhibit["says"], markup=False)
        if exhibit["absent"] is not None:
            console.print(f"the paper's side: {exhibit['absent']}", style="yellow", markup=False)
        table = plain_table((exhibit["x"], *COLUMNS), ("series", "how"), overflow="fold")
        for cells, _ in _lines(exhibit):
            table.add_row(*cells)
        console.print(f"values: {exhibit['y']}; ratio: ours by the paper's", style="dim", markup=False)
        console.print(table)
        console.print(f"what differs: {exhibit['differs']}", style="dim", markup=False)
        for claim in exhibit["claims"]:
            style = {True: "green", False: "red", None: "dim"}[claim["holds_here"]]
            console.print(f"claim: {claim['text']}", style=style, markup=False)
    for why in report["missing"]:
        console.print(f"not measured: {why}", style="yellow", markup=False)
