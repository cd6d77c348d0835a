"""Reports as pictures: numbers against tokens. Needs matplotlib."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tw_compile.harness.requests import UsageError
from tw_compile.harness.spec import ONE_SHOT_BOUND, TWO_SHOT_BOUND

SUFFIXES = (".png", ".svg")

# Okabe and Ito's colours, which people with any colour vision can tell apart. Wine replaces yellow, too faint for lines.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#882255")
_MARKERS = "osD^vP*X"
_BOUND_LINES = {TWO_SHOT_BOUND: "--", ONE_SHOT_BOUND: ":"}
_LABEL_GAP = 0.046  # of the panel's height


class Point(Protocol):
    """What a row of any benchmark has, besides the number that is drawn."""

    @property
    def label(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def tokens(self) -> int: ...


def require(path: str) -> None:
    """UsageError when ``path`` cannot be plotted to."""
    if Path(path).suffix not in SUFFIXES:
        raise UsageError(f"--plot: expected a file that ends in {' or '.join(SUFFIXES)}, got {path!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            f"--plot: expected matplotlib, of the extra plot (pip install 'tw-compile[plot]', or pip install matplotlib), "
            f"got {path!r} without it"
        )


@dataclass(frozen=True)
class Panel:
    """One plot: the number ``field`` of ``rows`` against tokens. ``settings`` go to matplotlib's ``Axes.set``.

    ``title`` stands above the plot. ``line`` is a height at which a horizontal line is drawn.
    """

    rows: Sequence[Point]
    field: str
    settings: dict[str, Any]
    title: str = ""
    line: float | None = None


def times_panel(rows: Sequence[Point], unit: str, title: str = "") -> Panel:
    label = f"µs {unit} (median, slowest rank; band: p20 to p80)"
    return Panel(rows, "p50_us", {"yscale": "log", "ylabel": label}, title)


def draw(lines: Sequence[Sequence[Panel]], title: str, path: str) -> None:
    """Draw ``lines``, each of equally many panels, and write the picture to ``path``. Shares are in percent.

    Columns of panels without any number are left out.
    """
    drawn = [
        any(getattr(row, line[index].field) is not None for line in lines for row in line[index].rows)
        for index in range(len(lines[0]))
    ]
    lines = [[panel for panel, has_numbers in zip(line, drawn, strict=True) if has_numbers] for line in lines]
    if not lines[0]:
        raise UsageError(f"--plot: expected a report with times, got one without any; {path!r} is not written")
    figure, axes = new_figure(6.5 * len(lines[0]), 5.2 * len(lines) + 0.6, len(lines), len(lines[0]))
    placed = [
        (axis, panel) for row, line in zip(axes, lines, strict=True) for axis, panel in zip(row, line, strict=True)
    ]
    for axis, panel in placed:
        draw_lines(axis, panel.rows, panel.field)
        axis.set(**panel.settings)
        axis.set_title(panel.title, loc="left", fontsize=10)
        if panel.field.startswith("share"):
            axis.yaxis.set_major_formatter(lambda value, position: f"{value:.0%}")
        tokens_axis(axis, sorted({row.tokens for row in panel.rows}))
        if panel.settings.get("yscale") == "log":
            label_log_axis(axis.yaxis)
    figure.canvas.draw()  # fixes the axis limits that the labels' places depend on
    for axis, panel in placed:
        label_ends(axis)
        if panel.line is not None:
            axis.axhline(panel.line, color="#777777", linewidth=1.0)  # after label_ends(), which labels every line
    save(figure, path, title)


def new_figure(width: float, height: float, lines: int, columns: int) -> tuple[Any, Any]:
    """A figure of ``width`` x ``height`` inches, and its axes as an array ``[lines, columns]``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(lines, columns, squeeze=False)


def save(figure: Any, path: str, title: str | None = None) -> None:
    """Write a figure; UsageError when the file can't be written."""
    if title is not None:
        figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    try:
        figure.savefig(path, dpi=150, bbox_inches="tight")
    except OSError as error:
        raise UsageError(f"--plot: expected a file that can be written, got {path!r} ({error.strerror})") from error


def draw_lines(panel: Any, rows: Sequence[Point], field: str) -> None:
    """Draw a line for every contender that has the number ``field``; lines of bounds are thin and grey."""
    styles = _styles(rows)
    for label, style in styles.items():
        points = sorted((row for row in rows if row.label == label), key=lambda row: row.tokens)
        # Sizes without a number at the end are dropped; a size without a number between two others breaks the line.
        while points and getattr(points[-1], field) is None:
            points.pop()
        if not points:
            continue
        tokens = [row.tokens for row in points]
        panel.plot(tokens, _numbers(points, field), label=label, **style)
        if field == "p50_us":
            band = (_numbers(points, "p20_us"), _numbers(points, "p80_us"))
            panel.fill_between(tokens, *band, color=style["color"], alpha=0.15, linewidth=0)
    panel.grid(True, which="major", color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def _numbers(rows: Sequence[Point], field: str) -> list[float]:
    return [math.nan if getattr(row, field) is None else getattr(row, field) for row in rows]


def _styles(rows: Sequence[Point]) -> dict[str, dict[str, Any]]:
    """The style of each label's line: ours thick and solid, peers thinner and dashed, bounds grey."""
    styles: dict[str, dict[str, Any]] = {}
    number = 0
    for row in rows:
        if row.label in styles:
            continue
        if row.kind == "bound":
            line = _BOUND_LINES.get(row.label, "-.")
            styles[row.label] = {"color": "#777777", "linestyle": line, "linewidth": 1.2}
            continue
        styles[row.label] = {
            "color": _COLOURS[number % len(_COLOURS)],
            "marker": _MARKERS[number % len(_MARKERS)],
            "markersize": 5,
            "linestyle": "-" if row.kind == "ours" else (0, (5, 1.5)),
            "linewidth": 2.2 if row.kind == "ours" else 1.5,
        }
        number += 1
    return styles


def tokens_axis(panel: Any, tokens: Sequence[int]) -> None:
    panel.set_xscale("log", base=2)
    panel.set_xticks(tokens, [str(count) for count in tokens])
    panel.minorticks_off()
    panel.set_xlabel("tokens")


def label_log_axis(axis: Any) -> None:
    """Put numbers at 1, 2 and 5 times each power of ten, as a range of less than a decade has at most one power of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(lambda value, position: f"{value:g}")
    axis.set_minor_formatter(NullFormatter())


def label_ends(panel: Any) -> None:
    """Every line's name right of the panel, at the height of its last point or as near as the others leave room."""
    lines = [line for line in panel.get_lines() if len(line.get_xdata())]
    to_axes = panel.transData + panel.transAxes.inverted()
    ends = [to_axes.transform((line.get_xdata()[-1], line.get_ydata()[-1])) for line in lines]
    for line, end, height in zip(lines, ends, spread([float(end[1]) for end in ends], _LABEL_GAP), strict=True):
        panel.annotate(
            line.get_label(),
            xy=tuple(end),
            xytext=(1.06, height),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=line.get_color(),
            fontsize=9,
            va="center",
            arrowprops={
                "arrowstyle": "-",
                "color": line.get_color(),
                "linewidth": 0.6,
                "shrinkA": 0,
                "relpos": (0, 0.5),
            },
        )


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Move ``heights`` at least ``gap`` apart, from 0 to 1, in the same order and near to where they were.

    If there are more heights than fit, all are spread evenly.
    """
    gap = min(gap, 1 / max(len(heights) - 1, 1))
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    groups: list[list[int]] = []
    for index in order:
        groups.append([index])
        while len(groups) > 1 and _lowest(groups[-1], heights, gap) < _lowest(groups[-2], heights, gap) + gap * len(
            groups[-2]
        ):
            last = groups.pop()
            groups[-1] += last
    placed = [0.0] * len(heights)
    for group in groups:
        for position, index in enumerate(group):
            placed[index] = _lowest(group, heights, gap) + gap * position
    return placed


def _lowest(group: Sequence[int], heights: Sequence[float], gap: float) -> float:
    """The lowest place of a group of labels that are ``gap`` apart.

    The middle of the group is at the mean of the labels' heights, or as near as all labels stay inside of the panel.
    """
    extent = gap * (len(group) - 1)
    middle = sum(heights[index] for index in group) / len(group)
    return min(max(middle - extent / 2, 0.0), 1.0 - extent)
