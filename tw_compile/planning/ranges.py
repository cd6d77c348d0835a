"""Ranges of token counts, each of which is one graph: where they are cut, and the one expression that splits all of a range.

A split graph is split at all counts of its range. So a graph may be split where the split costs nothing that predictions could
tell at any count (:attr:`~tw_compile.planning.plan.Plan.harmless`), and it is split where that pays at some counts. A host that
compiles for several ranges cuts them where splitting begins to pay or stops paying.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tw_compile.planning.halves import FirstHalf, shares_of_range
from tw_compile.planning.plan import RESOLUTION, Mode, Plan

STEPS = 4
"""How many counts plans are made for in each doubling of the count. Between these counts, plans agree as far as predictions can
tell."""
GRAIN = 64
"""Ranges are cut at multiples of this number, because a GEMM's smallest tiles have this many rows."""
MOST_CUTS = 2
"""At most this many cuts are made, because every range is compiled separately."""
_TRIES = 8

PlanOf = Callable[[int, int | None, int], Plan]
"""Makes a plan from a token count, the tokens of half 1 (None: the best number), and the fewest tokens of the graph."""


@dataclass(frozen=True)
class Shared:
    """One split for all counts of a range.

    ``first``: half 1, as a function of the tokens or as a number of requests. ``plans``: the plan for each count. ``saved``:
    microseconds, added up over all counts of the range.
    """

    first: FirstHalf | int
    plans: tuple[Plan, ...]
    saved: float


@dataclass(frozen=True)
class Part:
    """The range ``low`` to ``high``; ``split`` is None where it stays whole."""

    low: int
    high: int
    split: Shared | None = None


class Ranges:
    """Plans for the ranges of one layer.

    Args:
        plan: Makes a plan. The same plans are asked for again and again.
        world_size: Ranks, which share the rows of each half.
        requests: The number of requests, of equal length. If more than 1, tokens are split between requests.
        may_split: Whether the graph of a range could be split at all.
    """

    def __init__(
        self,
        plan: PlanOf,
        world_size: int,
        requests: int = 1,
        may_split: Callable[[int, int], bool] = lambda low, high: True,
    ) -> None:
        self._plan = plan
        self._world_size = world_size
        self._requests = requests
        self._may_split = may_split
        self._splits: dict[tuple[int, int], Shared | None] = {}

    def at(self, tokens: int, first: int | None = None, least: int | None = None) -> Plan:
        """The plan of ``tokens`` tokens, in a graph for ``least`` tokens or more; default: for ``tokens`` or more."""
        return self._plan(tokens, first, tokens if least is None else least)

    def counts(self, low: int, high: int) -> list[int]:
        """Both ends of a range, and :data:`STEPS` counts for each doubling, all of whole requests."""
        between = (step << power for power in range(high.bit_length()) for step in range(STEPS, 2 * STEPS))
        whole = {count // self._requests * self._requests for count in (*range(STEPS), *between)}
        return sorted({count for count in whole if low < count < high} | {low, high})

    def split(self, low: int, high: int) -> Shared | None:
        """The split for all of a range that is predicted to take the least time, added up over all counts.

        The candidates are sixteenths of the tokens, in whole tiles of GEMMs; or the best numbers of requests. Of candidates
        that predictions can't tell apart, the one with the most equal halves is taken, and then the one with the larger tiles.
        None where no candidate is harmless at all counts, or none pays at any count.
        """
        if (low, high) not in self._splits:
            self._splits[low, high] = self._split(low, high) if self._hoped_for(low, high) else None
        return self._splits[low, high]

    def cut(self, low: int, high: int, ends: Iterable[int] = (), most: int = MOST_CUTS) -> tuple[Part, ...]:
        """Cut ``low`` to ``high`` into ranges that end at the given ``ends``, and at ``most`` more counts at most.

        The further cuts are where splitting begins to pay or stops paying. Of all choices of cuts, the one that saves the most
        time is taken, added up over all counts, or one with fewer cuts that saves nearly as much. No further cut leaves a range
        with one size alone, whose GEMMs a host would have tuned.
        """
        given = sorted({end for end in ends if low <= end < high})
        further = [end for end in self._borders(low, high) if end not in given]
        choices = []
        for number in range(most + 1):
            for chosen in itertools.combinations(further, number):
                ranges = self._between(low, high, sorted({*given, *chosen}))
                if all(first < last for first, last in ranges if not {first - self._requests, last}.isdisjoint(chosen)):
                    choices.append((sum(self._hoped_for(*bounds) for bounds in ranges), number, ranges))
        most_saved = max(saved for saved, _, _ in choices)
        choices.sort(key=lambda choice: (choice[0] < most_saved * (1.0 - RESOLUTION), choice[1], -choice[0]))
        tried = []
        for _, _, ranges in choices[:_TRIES]:
            parts = tuple(Part(*bounds, self.split(*bounds)) for bounds in ranges)
            saved = sum(part.split.saved for part in parts if part.split is not None)
            tried.append((saved, parts))
            if all(part.split is not None or not self._hoped_for(part.low, part.high) for part in parts):
                break
        return self._begin_later(max(tried, key=lambda attempt: attempt[0])[1], given, most)

    def _begin_later(self, parts: tuple[Part, ...], given: list[int], most: int) -> tuple[Part, ...]:
        """The parts, where those that are split begin at a later count if that saves more.

        A split has to be harmless at all counts of its range. So a few counts at the begin of a range, where only some halves
        are, can decide about the halves of all others. The counts before the new begin stay whole. Here, too, no range is left
        with one size alone.
        """
        cuts = len(parts) - 1 - len(given)
        result: list[Part] = []
        for part in parts:
            whole = result[-1] if result and result[-1].split is None and result[-1].high not in given else None
            if part.split is not None and (whole is not None or cuts < most):
                least, most_late = part.low + self._requests, min(2 * part.low, part.high - 1)
                later = [count for count in self.counts(part.low, part.high) if least < count <= most_late]
                found = [Part(count, part.high, self.split(count, part.high)) for count in later]
                best = max(found, key=_saved, default=part)
                if _saved(best) > _saved(part) * (1.0 + RESOLUTION):
                    cuts += whole is None
                    begin = part.low if whole is None else result.pop().low
                    result.append(Part(begin, best.low - self._requests))
                    part = best
            result.append(part)
        return tuple(result)

    def _between(self, low: int, high: int, ends: list[int]) -> list[tuple[int, int]]:
        return list(zip([low, *(end + self._requests for end in ends)], [*ends, high], strict=True))

    def _hoped_for(self, low: int, high: int) -> float:
        """Microseconds that could be saved in a range if each count had the best halves; 0 where the range stays whole."""
        if not self._may_split(low, high):
            return 0.0
        plans = [self.at(count, least=low) for count in self.counts(low, high)]
        if not any(_pays(plan) for plan in plans) or not all(plan.harmless for plan in plans):
            return 0.0
        return max(_added_up(low, plans), 0.0)

    def _split(self, low: int, high: int) -> Shared | None:
        counts = self.counts(low, high)
        weights = _weights(low, counts)
        best_us = [weight * _us(self.at(count, least=low)) for count, weight in zip(counts, weights, strict=True)]
        least_us = math.inf
        shares: list[tuple[float, tuple[float, int], Shared]] = []
        for rank, first, halves in self._candidates(low, high, counts):
            plans: list[Plan] = []
            us, rest_us = 0.0, sum(best_us)
            for place in reversed(range(len(counts))):  # long steps first, which decide most
                plan = self.at(counts[place], halves[place], low)
                plans.insert(0, plan)
                us, rest_us = us + weights[place] * _split_us(plan), rest_us - best_us[place]
                if not plan.harmless or us + rest_us > least_us * (1.0 + 2 * RESOLUTION):
                    break
            else:
                saved = _added_up(low, plans)
                if saved > 0 and any(_pays(plan) for plan in plans):
                    shares.append((us, rank, Shared(first, tuple(plans), saved)))
                    least_us = min(least_us, us)
        near = [share for share in shares if share[0] <= least_us * (1.0 + RESOLUTION)]
        return min(near, key=lambda share: share[1])[2] if near else None

    def _candidates(
        self, low: int, high: int, counts: list[int]
    ) -> Iterator[tuple[tuple[float, int], FirstHalf | int, list[int]]]:
        """Candidates for half 1: a rank, the half, and the half's tokens at each count.

        Of equally fast candidates, the one with the lowest rank is best.
        """
        if self._requests > 1:
            best = [plan for plan in (self.at(count, least=low) for count in counts) if _pays(plan)]
            for first in sorted({plan.sizes[0] * self._requests // plan.tokens for plan in best}):
                yield (
                    (abs(2 * first / self._requests - 1), 0),
                    first,
                    [first * count // self._requests for count in counts],
                )
            return
        shares = sorted(
            shares_of_range(low, high, self._world_size),
            key=lambda half: (abs(2 * half.numerator - half.denominator), -half.multiple),
        )
        for half in shares:
            rank = (abs(2 * half.numerator / half.denominator - 1), -half.multiple)
            yield rank, half, [half(count) for count in counts]

    def _borders(self, low: int, high: int) -> list[int]:
        """The last count before each change from counts that pay to counts that don't, or back."""
        borders = []
        for count, following in itertools.pairwise(self.counts(low, high)):
            if _pays(self.at(count)) != _pays(self.at(following)):
                borders.append(self._border(count, following))
        return borders

    def _border(self, below: int, above: int) -> int:
        grain = math.lcm(GRAIN, self._requests)
        pays = _pays(self.at(below))
        inside = [below, *range(below // grain * grain + grain, above, grain), above]
        first, last = 0, len(inside) - 1
        while last - first > 1:
            middle = (first + last) // 2
            if _pays(self.at(inside[middle])) == pays:
                first = middle
            else:
                last = middle
        return inside[first] if pays else inside[last] - self._requests


def _pays(plan: Plan) -> bool:
    return plan.mode is not Mode.OFF


def _saved(part: Part) -> float:
    return 0.0 if part.split is None else part.split.saved


def _split_us(plan: Plan) -> float:
    return math.inf if plan.predicted.split_us is None else plan.predicted.split_us


def _us(plan: Plan) -> float:
    return min(plan.predicted.unsplit_us, _split_us(plan))


def _weights(low: int, counts: list[int]) -> list[int]:
    """How many counts of a range each of ``counts`` stands for: itself, and those below it without a plan of their own."""
    return [count - before for before, count in itertools.pairwise([low - 1, *counts])]


def _added_up(low: int, plans: list[Plan]) -> float:
    """Microseconds that splitting saves over all counts of a range."""
    weights = _weights(low, [plan.tokens for plan in plans])
    return sum(weight * plan.saved_us for weight, plan in zip(weights, plans, strict=True))
