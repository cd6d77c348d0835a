"""What an exhibit is drawn from. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tw_compile.benchmark.papers.exhibit import Point, Series
from tw_compile.benchmark.papers.published import Published
from tw_compile.benchmark.papers.timed import OURS, PEER, Timed

Times = dict[float, Timed]
"""By tokens or SMs."""


@dataclass(frozen=True)
class Context:
    """For one exhibit.

    Attributes:
        rows: What was measured here comes first, then files that were given, then committed ones.
        missing: Why nothing was measured here; None where it was, or where nobody asked.
        tp: Ranks that exhibits are measured with.
    """

    published: Published
    rows: Sequence[Timed]
    missing: str | None
    tp: int

    def times(self, bench: str, world_size: int, choose: Callable[[Timed], bool]) -> Times:
        """By tokens, the fastest of the chosen rows of the first source that has one."""
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
            best = found.setdefault(at, row)
            if best.file == row.file and row.value < best.value:
                found[at] = row
        return found

    def kernel(self, world_size: int, hidden: int, *labels: str, kind: str | None = None) -> Times:
        """Microseconds of ``bench kernel``: of ``labels``, or the fastest of a ``kind`` that gives what peers give."""

        def choose(row: Timed) -> bool:
            if row.hidden != hidden or row.sms is not None:
                return False
            return row.label in labels if labels else row.kind == kind and not row.quantises and row.label != "gated"

        return self.times("bench kernel", world_size, choose)

    def layer(self, world_size: int, model: str, *labels: str) -> Times:
        """Microseconds of ``bench layer``: of ``labels``, or of the fastest peer."""
        return self.times(
            "bench layer",
            world_size,
            lambda row: row.model == model and (row.label in labels if labels else row.kind == PEER),
        )

    def fastest_fused(self, world_size: int, hidden: int) -> Times:
        return self.kernel(world_size, hidden, kind=OURS)

    def unfused(self, world_size: int, hidden: int) -> Times:
        """The fastest peer that does not fuse."""
        return self.kernel(world_size, hidden, "nccl+norm", "symm-one-shot+norm", "symm-two-shot+norm")

    def measured(
        self, name: str, values: Mapping[float, tuple[float, Timed]], beside: str | None, asked: Iterable[float] = ()
    ) -> Series:
        """Our line of measured values; of ``asked`` x the line says why it has none."""
        points = [Point(x, value, row.how, row.source) for x, (value, row) in values.items()]
        why = self.missing or "no result that was given or committed has it"
        points += [Point(x, None, "cannot", why) for x in asked if x not in values]
        return Series(name, True, tuple(sorted(points, key=lambda point: point.x)), beside)


def predicted(name: str, values: Mapping[float, float], beside: str | None, by: str) -> Series:
    """Our line of predicted values; ``by``: the profile."""
    return Series(name, True, tuple(Point(x, value, "predicted", by) for x, value in sorted(values.items())), beside)


def cannot(name: str, xs: Iterable[float], why: str, beside: str | None = None) -> Series:
    """A line that there is none of, and why."""
    return Series(name, True, tuple(Point(x, None, "cannot", why) for x in xs), beside)


def quotient(above: Times, below: Times) -> dict[float, tuple[float, Timed]]:
    """``above / below`` where both are of one file, so of one run; with the row that says how."""
    return {
        x: (row.value / below[x].value, row) for x, row in above.items() if x in below and below[x].file == row.file
    }


def divided(above: Mapping[float, float], below: Mapping[float, float]) -> dict[float, float]:
    return {x: value / below[x] for x, value in above.items() if x in below}
