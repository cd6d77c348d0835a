"""A figure or table of a paper, and what is shown beside it. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tw_compile.benchmark.papers.context import Context
    from tw_compile.benchmark.papers.measure import Request

HOW = ("measured here", "measured earlier", "predicted", "cited", "read from the plot", "cannot")
"""How a value was obtained. ``predicted``: by the planner, or by the gate's tables."""


@dataclass(frozen=True)
class Point:
    """One value. ``detail`` names its source: a file, a profile, a figure. Where ``value`` is None, it says why."""

    x: float
    value: float | None
    how: str
    detail: str


@dataclass(frozen=True)
class Series:
    """A line of the plot. ``beside``: the name of the paper's line that a line of ours is compared with."""

    name: str
    ours: bool
    points: tuple[Point, ...]
    beside: str | None = None

    def values(self) -> dict[float, float]:
        """The values that are there, by x."""
        return {point.x: point.value for point in self.points if point.value is not None}


@dataclass(frozen=True)
class Claim:
    """A claim in words, with the numbers of both sides. None: there are no numbers to judge the claim by."""

    text: str
    holds_in_paper: bool | None
    holds_here: bool | None


@dataclass(frozen=True)
class Drawn:
    """What an exhibit shows: lines of both sides, and claims."""

    series: tuple[Series, ...]
    claims: tuple[Claim, ...] = ()


@dataclass(frozen=True)
class Needs:
    """What it takes to measure our side here: GPUs (0: nothing is measured), and about how many minutes."""

    gpus: int = 0
    minutes: float = 0.0
    multicast: bool = False


@dataclass(frozen=True)
class Exhibit:
    """One figure or table.

    Attributes:
        id: What ``--figures`` calls it: the number of a figure, or of a table with a ``t`` before it.
        title: Its name, and what it is about.
        says: What the paper shows by it.
        differs: In what the two sides differ.
        x: What the values of x are; ``y``: what the values are.
        draw: The lines and claims, from what was measured, predicted and published.
        requests: Returns the requests to the benchmarks for a number of ranks.
        ticks: Names of the values of x, where these are no numbers.
        y_log, x_log: Whether an axis is logarithmic, x to base 2.
    """

    id: str
    title: str
    says: str
    differs: str
    x: str
    y: str
    draw: Callable[[Context], Drawn]
    needs: Needs = Needs()
    requests: Callable[[int], tuple[Request, ...]] | None = None
    ticks: Mapping[float, str] | None = None
    x_log: bool = True
    y_log: bool = False
