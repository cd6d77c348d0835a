"""From measured times to ranges of bytes. This is a pure function, so that a table can be checked without a GPU.

At each size, two ways are compared by a band around the logarithm of the ratio of their times. The medians give the middle of
the band. The 20th and 80th percentiles that are farthest apart give its ends. A band is never narrower than the difference
between two runs. Between two measured sizes, middle and ends are interpolated in the logarithm of the bytes. Beyond the
measured sizes, and where two of them are farther apart than ``MOST_APART``, nothing is known.

A way replaces the default table's way only where its whole band is below 0. So the default stays where the difference is inside
the noise, and where nothing was measured. A crossover lies where the difference is sure.
"""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from tw_compile.gating.facts import Backend
from tw_compile.gating.table import Entry, Source
from tw_compile.kernels.collective.transports import preferred_names
from tw_compile.tuning.measured import AT_LEAST, LEFT, Timing

NOISE = 0.02
"""Medians of two runs differ by up to this share, whatever the repeats of one run say (``benchmarks/thresholds-notes.md``)."""
MOST_APART = 16
"""Two neighbouring sizes of the grid whose bytes have a larger ratio than this say nothing about the sizes between them."""


@dataclass(frozen=True)
class Band:
    """Logarithms of a ratio of times, at the logarithms of bytes; ascending in bytes."""

    nbytes: tuple[int, ...]
    low: tuple[float, ...]
    middle: tuple[float, ...]
    high: tuple[float, ...]

    def at(self, nbytes: int, values: Sequence[float]) -> float | None:
        """``values``, which is ``low``, ``middle`` or ``high``, interpolated at ``nbytes``; None where nothing is known."""
        after = bisect_left(self.nbytes, nbytes)
        if after < len(self.nbytes) and self.nbytes[after] == nbytes:
            return values[after]
        if after in (0, len(self.nbytes)):
            return None
        begin, end = self.nbytes[after - 1 : after + 1]
        if end > MOST_APART * begin:
            return None
        share = math.log(nbytes / begin) / math.log(end / begin)
        return values[after - 1] + share * (values[after] - values[after - 1])

    def below(self, nbytes: int) -> bool:
        """Whether the ratio is surely below 1."""
        high = self.at(nbytes, self.high)
        return high is not None and high < 0


def band(timings: Iterable[Timing], way: str, other: str) -> Band:
    """``way`` against ``other``, where both were timed at the same size in the same run.

    If several hidden sizes or runs have the same bytes, one band covers all of them.
    """
    times: dict[tuple[int, int, int], dict[str, Timing]] = defaultdict(dict)
    for timing in timings:
        times[timing.nbytes, timing.hidden, timing.run][timing.way] = timing
    points: dict[int, list[tuple[float, float, float]]] = defaultdict(list)
    for (nbytes, _, _), ways in times.items():
        if way in ways and other in ways:
            points[nbytes].append(_ratio(ways[way], ways[other]))
    sizes = sorted(points)
    return Band(
        tuple(sizes),
        tuple(min(low for low, _, _ in points[nbytes]) for nbytes in sizes),
        tuple(sum(middle for _, middle, _ in points[nbytes]) / len(points[nbytes]) for nbytes in sizes),
        tuple(max(high for _, _, high in points[nbytes]) for nbytes in sizes),
    )


def _ratio(own: Timing, other: Timing) -> tuple[float, float, float]:
    middle, noise = math.log(own.p50_us / other.p50_us), math.log1p(NOISE)
    low = min(math.log(own.p20_us / other.p80_us), middle - noise)
    return low, middle, max(math.log(own.p80_us / other.p20_us), middle + noise)


@dataclass(frozen=True)
class Chosen:
    """At one size: the default's entry, the way that is taken, and what measurements say about it.

    Attributes:
        sure: Whether measurements show that ``way`` is right.
        known: Whether the default was measured against leaving the message alone.
    """

    default: Entry
    way: str
    sure: bool
    known: bool


class Chooser:
    """Decides about sizes, for one world size and backend.

    Args:
        timings: The times of ``LEFT`` and of transports, see :func:`tw_compile.tuning.measured.timings`.
        default: The ranges that hold where no other way is surely faster. They cover all sizes.
    """

    def __init__(self, backend: Backend, timings: Sequence[Timing], default: Sequence[Entry]) -> None:
        self._default, self._begins = tuple(default), [entry.from_bytes for entry in default]
        self._ways = sorted({timing.way for timing in timings})
        self._can_be_left = backend not in AT_LEAST
        self.bands = {(way, other): band(timings, way, other) for way, other in itertools.permutations(self._ways, 2)}

    def choose(self, nbytes: int) -> Chosen:
        default = self._default[bisect_right(self._begins, nbytes) - 1]
        usual = self._way_of(default)
        faster = [
            way
            for way in self._ways
            if (way, usual) in self.bands
            and self.bands[way, usual].below(nbytes)
            and (way != LEFT or self._can_be_left)
        ]
        way = (
            min(faster, key=lambda candidate: (self._middle(candidate, usual, nbytes), candidate)) if faster else usual
        )
        return Chosen(default, way, self._sure(way, nbytes), self._known(usual, nbytes))

    def _known(self, usual: str, nbytes: int) -> bool:
        return any(
            against.at(nbytes, against.middle) is not None
            for (way, other), against in self.bands.items()
            if LEFT in (way, other) and usual in (way, other)
        )

    def _middle(self, way: str, other: str, nbytes: int) -> float:
        against = self.bands[way, other]
        return against.at(nbytes, against.middle) or 0.0

    def _way_of(self, entry: Entry) -> str:
        """The measured way that ``entry`` means. ``auto`` means the first measured one of the transports that it tries."""
        if entry.decision == "left":
            return LEFT
        # "host" is measured only without peer access. There "host" serves entries whose transport needs peer access.
        if entry.transport == "auto" or ("host" in self._ways and entry.transport not in self._ways):
            return next((name for name in preferred_names("cuda") if name in self._ways), "nccl")
        return str(entry.transport)

    def _sure(self, way: str, nbytes: int) -> bool:
        """Whether ``way`` is surely right.

        Fusing must be faster than leaving the message alone. Leaving it alone must be faster than every way of fusing it.
        """
        others = [LEFT] if way != LEFT else [other for other in self._ways if other != LEFT]
        bands = [self.bands.get((way, other)) for other in others]
        return bool(bands) and all(against is not None and against.below(nbytes) for against in bands)

    def changes(self) -> list[int]:
        """Every size at which :meth:`choose` may answer differently than for one byte less; ascending, from 0."""
        knots = {0, *self._begins}
        for against in self.bands.values():
            knots.update(against.nbytes)
            knots.update(nbytes + 1 for nbytes in against.nbytes)
        sizes = set(knots)
        for begin, end in itertools.pairwise(sorted(knots)):
            # No band has a knot between ``begin`` and ``end``. So each band is a straight line there, and crosses 0 or another
            # band at most once.
            sizes.update(_flip(against.below, begin, end) for against in self.bands.values())
            for (way, other), (rival, same) in itertools.combinations(self.bands, 2):
                if other == same:
                    sizes.add(_flip(functools.partial(self._before, way, rival, other), begin, end))
        return sorted(sizes)

    def _before(self, way: str, rival: str, other: str, nbytes: int) -> bool:
        return (self._middle(way, other, nbytes), way) < (self._middle(rival, other, nbytes), rival)


def _flip(predicate: Callable[[int], bool], begin: int, end: int) -> int:
    """The first size from ``begin`` to ``end`` at which ``predicate`` differs from its value at ``begin``; else ``end``."""
    first = predicate(begin)
    return bisect_left(range(begin, end), True, key=lambda nbytes: predicate(nbytes) != first) + begin


def entries_from(
    world_size: int, backend: Backend, timings: Sequence[Timing], default: Sequence[Entry], source: Source
) -> list[Entry]:
    """The ranges of a table of thresholds for one world size and backend, ascending and without gaps.

    Ranges that measurements decide have ``source``. Ranges that they leave open are as in ``default``; their source says why.
    """
    chooser = Chooser(backend, timings, default)
    entries: list[Entry] = []
    for nbytes in chooser.changes():
        entry = _entry(world_size, backend, nbytes, chooser.choose(nbytes), source)
        if entries and _same(entries[-1], entry):
            continue
        if entries:
            entries[-1] = replace(entries[-1], to_bytes=nbytes)
        entries.append(entry)
    return entries


def _same(before: Entry, after: Entry) -> bool:
    return (before.decision, before.transport, before.source) == (after.decision, after.transport, after.source)


def _entry(world_size: int, backend: Backend, nbytes: int, chosen: Chosen, source: Source) -> Entry:
    if chosen.sure:
        left = chosen.way == LEFT
        decision, transport = ("left", None) if left else ("fused", chosen.way)
        return Entry(world_size, str(backend), nbytes, None, decision, transport, source)  # type: ignore[arg-type]
    if not chosen.known:
        word, why = "unmeasured", "these sizes were not measured"
    elif backend in AT_LEAST:
        word, why = "bound", "ours is not below what was measured, a lower bound of the backend's time"
    else:
        word, why = "noise", "the difference is inside the noise"
    name = f"{chosen.default.source.name}_{word}_tp{world_size}"
    kept = Source(name, "default", (f"{source.values[0]}: {why}; kept: {chosen.default.source}",))
    return replace(
        chosen.default, world_size=world_size, backend=str(backend), from_bytes=nbytes, to_bytes=None, source=kept
    )
