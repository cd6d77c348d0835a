"""Chooses halves from times. A pure function of them, so that it can be checked without a GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tw_compile.harness.measure import percentiles
from tw_compile.tuning.halves_spec import CONTENDERS, HalvesTrial

TimeHalves = Callable[[Sequence[int]], dict[int, list[float]]]
"""``tokens of half 1 -> microseconds of each turn``. All of them take turns; a second call times anew."""


@dataclass(frozen=True)
class ChosenHalves:
    """What one trial found; microseconds are medians.

    Attributes:
        first: Tokens of half 1 that are taken.
        us, modelled_us, equal_us: The FFN in these halves, in the model's, and in equal ones, all of the second timing.
        swept: The first timing, by tokens of half 1.
    """

    first: int
    us: float
    modelled_us: float
    equal_us: float
    swept: dict[int, float]


def choose(trial: HalvesTrial, time: TimeHalves) -> ChosenHalves:
    """The fastest halves of ``trial``, or the model's unless others are surely faster.

    The fastest of many is fast by chance, too. So the fastest ones of a sweep are timed once more beside the model's, and only
    this second timing counts. It begins anew, with other memory, so that what only one capture had doesn't count either.
    """
    equal = trial.tokens // 2
    swept = {first: statistics.median(times) for first, times in time(sorted({*trial.firsts, equal})).items()}
    fastest = sorted(trial.firsts, key=swept.__getitem__)[:CONTENDERS]
    again = time(sorted({*fastest, trial.modelled, equal}))
    medians = {first: statistics.median(times) for first, times in again.items()}
    sure = [first for first in fastest if surely_faster(again[first], again[trial.modelled])]
    first = min(sure, key=medians.__getitem__, default=trial.modelled)
    return ChosenHalves(first, medians[first], medians[trial.modelled], medians[equal], swept)


def surely_faster(times: Sequence[float], others: Sequence[float]) -> bool:
    """Whether the ratio of both is below 1, noise included: in four of five turns or more.

    Both were timed in the same turns, so a drift of the clocks is in both.
    """
    _, _, high = percentiles([own / other for own, other in zip(times, others, strict=True)])
    return high < 1.0
