"""The chart of an exhibit as SVG, drawn with the page's colours; no scripts."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

WIDTH, HEIGHT = 760, 330
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 14, 46
COLOURS = 12
"""How many colours the page has: its CSS classes c0, c1, ..."""
HALF_LETTER = 4.8
"""Half the width of a letter, at the size that letters have on narrow screens."""
_DECADE = (1.0, 2.0, 2.5, 5.0, 10.0)


def chart(exhibit: dict[str, Any]) -> str:
    """The paper's lines and ours in the same axes, with their names. Empty where no line has a value."""
    lines = [line for line in exhibit["series"] if any(point["value"] is not None for point in line["points"])]
    if not lines:
        return ""
    values = [point for line in lines for point in line["points"] if point["value"] is not None]
    named = {tick["x"]: tick["name"] for tick in exhibit["ticks"]}
    x_axis = _Axis([point["x"] for point in values], exhibit["x_log"], LEFT, WIDTH - RIGHT, list(named))
    y_axis = _Axis([point["value"] for point in values], exhibit["y_log"], HEIGHT - BOTTOM, TOP)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(exhibit["title"])}">']
    for tick in y_axis.ticks:
        y = y_axis.at(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"></line>')
        parts.append(f'<text x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in x_axis.ticks:
        x = x_axis.at(tick)
        parts.append(
            f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM + 5}"></line>'
        )
        name = named.get(tick, f"{tick:.2g}" if tick < 1.0 else f"{tick:g}")
        fits = x + HALF_LETTER * len(name) < WIDTH
        place = f'x="{x:.1f}" text-anchor="middle"' if fits else f'x="{WIDTH - 2}" text-anchor="end"'
        parts.append(f'<text {place} y="{HEIGHT - BOTTOM + 19}">{html.escape(name)}</text>')
    base = HEIGHT - BOTTOM
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"></line>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{html.escape(exhibit["x"])}</text>')
    for number, line in enumerate(lines):
        parts.append(_line(line, number, x_axis, y_axis))
    names = "".join(f"<li>{_key(line, number)}{html.escape(line['name'])}</li>" for number, line in enumerate(lines))
    return (
        f'<figure class="chart"><div class="legend">{html.escape(exhibit["y"])}</div>{"".join(parts)}</svg>'
        f'<ul class="names">{names}</ul></figure>'
    )


def _kind(line: dict[str, Any]) -> str:
    """The kind of a line: ``paper``, ``predicted``, or ``ours``, which is measured."""
    if line["side"] == "ours" and all(point["how"] == "predicted" for point in line["points"]):
        return "predicted"
    return str(line["side"])


def _line(line: dict[str, Any], number: int, x_axis: _Axis, y_axis: _Axis) -> str:
    places = [
        (x_axis.at(point["x"]), y_axis.at(point["value"]), point)
        for point in line["points"]
        if point["value"] is not None
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
    parts = [f'<g class="c{number % COLOURS}"><polyline class="line {_kind(line)}" points="{path}"></polyline>']
    for x, y, point in places:
        said = html.escape(f"{line['name']}, {point['x']:g}: {point['value']:.4g}, {point['how']} ({point['detail']})")
        parts.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4.5"><title>{said}</title></circle>')
    return "".join(parts) + "</g>"


def _key(line: dict[str, Any], number: int) -> str:
    stroke = f'<line class="line {_kind(line)}" x1="0" x2="34" y1="6" y2="6"></line>'
    dot = '<circle class="dot" cx="17" cy="6" r="4.5"></circle>'
    return f'<svg class="c{number % COLOURS}" viewBox="0 0 34 12">{stroke}{dot}</svg>'


class _Axis:
    """Maps values to places between ``begin`` and ``end``. ``ticks`` are the values that the axis marks."""

    def __init__(
        self, values: Sequence[float], log: bool, begin: float, end: float, ticks: Sequence[float] = ()
    ) -> None:
        self._log = log and min(values) > 0
        low, high = min([*values, *ticks]), max([*values, *ticks])
        if ticks:
            self.ticks = sorted(ticks)
        elif self._log:
            powers = range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)
            self.ticks = [2.0**power for power in powers][:: max(1, len(powers) // 9 + (len(powers) % 9 > 0))]
        else:
            self.ticks = _round_ticks(low, high)
        low, high = min(low, *self.ticks), max(high, *self.ticks)
        if low == high:
            low, high = low - 1.0, high + 1.0
        first, last = self._scale(low), self._scale(high)
        margin = 0.03 * (last - first)
        self._first, self._last = first - margin, last + margin
        self._begin, self._end = begin, end

    def _scale(self, value: float) -> float:
        return math.log2(value) if self._log else value

    def at(self, value: float) -> float:
        share = (self._scale(value) - self._first) / (self._last - self._first)
        return self._begin + share * (self._end - self._begin)


def _round_ticks(low: float, high: float) -> list[float]:
    """About five round numbers that span ``low`` to ``high``."""
    if low == high:
        return [low]
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in _DECADE if factor * power >= rough * 0.999)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(number * step, 10) for number in range(first, last + 1)]
