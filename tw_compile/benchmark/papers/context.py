"""The data that an exhibit is drawn from. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import truediv
from typing import Literal

from tw_compile.benchmark.papers.accuracy import Accuracy
from tw_compile.benchmark.papers.exhibit import Point, Series
from tw_compile.benchmark.papers.published import Published
from tw_compile.benchmark.papers.timed import OURS, PEER, Timed
from tw_compile.kernels.collective.wires import EXACT

Times = dict[str, dict[float, Timed]]
"""Rows by run, which is a file; then by tokens or SMs."""

Values = dict[float, tuple[float, Timed]]
"""Values of one line by x, each with a row that says how it was obtained."""


Host = Literal["no", "too", "only"]
"""Whether rows that went through host memory are drawn."""


@dataclass(frozen=True)
class Context:
    """The data that one exhibit is drawn from.

    Attributes:
        rows: Rows that were measured here come first, then rows of given files, then rows of committed files.
        missing: Why nothing was measured here; None where it was, or where nobody asked.
        tp: Ranks that exhibits are measured with.
        accuracy: What wires cost.
        host: Which rows are drawn. ``no``: those over peer memory; ``only``: those through host memory; ``too``: both, because
            rows went through host memory on this machine or in a given file.
    """

    published: Published
    rows: Sequence[Timed]
    missing: str | None
    tp: int
    accuracy: Accuracy = field(default_factory=Accuracy)
    host: Host = "no"

    @property
    def over_host(self) -> Context:
        """The same with only the rows that went through host memory."""
        return replace(self, host="only")

    @property
    def over_all(self) -> Context:
        """The same with the rows over any link."""
        return replace(self, host="too")

    @property
    def over_peers(self) -> Context:
        """The same with only the rows that went over peer access."""
        return replace(self, host="no")

    def times(self, bench: str, world_size: int, choose: Callable[[Timed], bool]) -> Times:
        """The fastest of the chosen rows, by run and tokens."""
        return self.by(bench, world_size, choose, lambda row: row.tokens)

    def by(
        self, bench: str, world_size: int, choose: Callable[[Timed], bool], key: Callable[[Timed], float | None]
    ) -> Times:
        """As :meth:`times`, by ``key``."""
        found: Times = {}
        for row in self.rows:
            at = key(row)
            if (row.bench, row.world_size) != (bench, world_size) or at is None or not choose(row):
                continue
            if self.host == ("no" if row.through_host else "only"):
                continue
            times = found.setdefault(row.run, {})
            if at not in times or row.value < times[at].value:
                times[at] = row
        return found

    def kernel(self, world_size: int, hidden: int, *labels: str) -> Times:
        """Microseconds of ``bench kernel``: of ``labels``, without the rows of ``--sms``."""
        return self.times(
            "bench kernel",
            world_size,
            lambda row: row.hidden == hidden and row.sms is None and row.label in labels,
        )

    def layer(self, world_size: int, model: str, *labels: str) -> Times:
        """Microseconds of ``bench layer``: of ``labels``, or, without labels, of the fastest peer."""
        return self.times(
            "bench layer",
            world_size,
            lambda row: row.model == model and (row.label in labels if labels else row.kind == PEER),
        )

    def fastest_fused(self, world_size: int, hidden: int, wire: str = EXACT) -> Times:
        """Our fastest kernel that gives the peers' results and whose rows travel by ``wire``."""

        def choose(row: Timed) -> bool:
            same = row.kind == OURS and row.wire == wire and not row.quantises
            return same and row.hidden == hidden and row.sms is None and row.label != "gated"

        return self.times("bench kernel", world_size, choose)

    def unfused(self, world_size: int, hidden: int) -> Times:
        """The fastest peer that does not fuse."""
        return self.kernel(world_size, hidden, "nccl+norm", "symm-one-shot+norm", "symm-two-shot+norm")

    def lines(
        self, name: str, values: Mapping[str, Values], beside: str | None, asked: Iterable[float] = ()
    ) -> list[Series]:
        """Our lines of measured values, one for each device and link.

        Where nothing was measured, a line says for each x of ``asked`` why it has no value. Without ``asked`` there is no line.
        """
        if values:
            return [measured(", ".join(filter(None, (name, where))), found, beside) for where, found in values.items()]
        xs = tuple(asked)
        why = self.missing or "no result that was given or committed has it"
        return [cannot(name, xs, why, beside)] if xs else []


def measured(name: str, values: Values, beside: str | None) -> Series:
    """Our line of measured values."""
    points = (Point(x, value, row.how, row.source) for x, (value, row) in sorted(values.items()))
    return Series(name, True, tuple(points), beside)


def predicted(name: str, values: Mapping[float, float], beside: str | None, by: str) -> Series:
    """Our line of predicted values; ``by``: the profile."""
    return Series(name, True, tuple(Point(x, value, "predicted", by) for x, value in sorted(values.items())), beside)


def cannot(name: str, xs: Iterable[float], why: str, beside: str | None = None) -> Series:
    """A line without values, which says why there are none."""
    return Series(name, True, tuple(Point(x, None, "cannot", why) for x in xs), beside)


def combined(compute: Callable[..., float], leading: Times, *others: Times) -> dict[str, Values]:
    """``compute`` of values of the same run, by where they were measured and by x. Results that are nan are left out."""
    found: dict[str, Values] = {}
    for run, rows in leading.items():
        beside = [times.get(run, {}) for times in others]
        for x, row in rows.items():
            if all(x in times for times in beside):
                value = compute(row.value, *(times[x].value for times in beside))
                if not math.isnan(value):
                    found.setdefault(row.where, {}).setdefault(x, (value, row))
    return found


def as_measured(found: Times) -> dict[str, Values]:
    """The values themselves, by where they were measured."""
    return combined(float, found)


def quotients(above: Times, below: Times) -> dict[str, Values]:
    """``above / below`` where both are of one run, by where they were measured."""
    return combined(truediv, above, below)


def first(values: Mapping[str, Values]) -> Values:
    """The values of the first place; empty where there is none."""
    return next(iter(values.values()), {})


def quotient(above: Times, below: Times) -> Values:
    """As :func:`quotients`, for the first place only."""
    return first(quotients(above, below))


def plain(values: Values) -> dict[float, float]:
    """The values without the rows that say how they were obtained."""
    return {x: value for x, (value, _) in values.items()}


def divided(above: Mapping[float, float], below: Mapping[float, float]) -> dict[float, float]:
    return {x: value / below[x] for x, value in above.items() if x in below}
