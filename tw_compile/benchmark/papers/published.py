"""Numbers that a paper has published: ``configs/papers/NAME.toml``. Each has the place that it is from. Imports no torch."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from tw_compile.benchmark.papers.exhibit import Point, Series

_ROW = {"exhibit", "series", "place", "x", "values"}


@dataclass(frozen=True)
class PublishedRow:
    """One line of an exhibit.

    Attributes:
        series: What it shows, and its unit behind the last comma.
        place: Figure, table or section.
        read_from_plot: The numbers are not printed; they were read off the picture.
    """

    exhibit: str
    series: str
    place: str
    x: tuple[float, ...]
    values: tuple[float, ...]
    read_from_plot: bool = False


@dataclass(frozen=True)
class Published:
    """A paper's numbers. ``absent``: why an exhibit has none, by its id."""

    title: str
    source: str
    hardware: str
    rows: tuple[PublishedRow, ...]
    absent: Mapping[str, str]

    def points(self, exhibit: str, series: str) -> dict[float, float]:
        """Values by x. KeyError where the paper has no such series."""
        for row in self.rows:
            if (row.exhibit, row.series) == (exhibit, series):
                return dict(zip(row.x, row.values, strict=True))
        raise KeyError(f"{self.source}: no series {series!r} of exhibit {exhibit}")

    def series(self, exhibit: str, series: str, name: str, values: Mapping[float, float] | None = None) -> Series:
        """A line of the paper, cited. ``values`` are shown instead, where they follow from its numbers by arithmetic."""
        row = next(row for row in self.rows if (row.exhibit, row.series) == (exhibit, series))
        how = "read from the plot" if row.read_from_plot else "cited"
        shown = self.points(exhibit, series) if values is None else values
        return Series(name, False, tuple(Point(x, value, how, row.place) for x, value in sorted(shown.items())))


def read_published(name: str) -> Published:
    """The numbers of the paper ``name``.

    Raises:
        ValueError: The file lacks something, or has something that is not known.
    """
    file = resources.files("tw_compile.configs") / "papers" / f"{name}.toml"
    return parse(file.read_text(), f"configs/papers/{name}.toml")


def parse(text: str, file: str) -> Published:
    """See :func:`read_published`."""
    values = tomllib.loads(text)
    for key in ("title", "source", "hardware"):
        if not values.get(key):
            raise ValueError(f"{file}: {key}: expected a text, got {values.get(key)!r}")
    rows = tuple(_row(row, f"{file}, row {number}") for number, row in enumerate(values["rows"], 1))
    return Published(values["title"], values["source"], values["hardware"], rows, values.get("absent", {}))


def _row(row: Mapping[str, Any], where: str) -> PublishedRow:
    if not _ROW <= row.keys() <= _ROW | {"read_from_plot"}:
        raise ValueError(f"{where}: expected {', '.join(sorted(_ROW))}, got {', '.join(sorted(row))}")
    if len(row["x"]) != len(row["values"]) or not row["x"]:
        raise ValueError(f"{where}: values: expected one for each of {len(row['x'])} x, got {len(row['values'])}")
    if not row["place"]:
        raise ValueError(f"{where}: place: expected a figure, table or section, got nothing")
    lists = {"x": tuple(map(float, row["x"])), "values": tuple(map(float, row["values"]))}
    return PublishedRow(**{**row, **lists})
