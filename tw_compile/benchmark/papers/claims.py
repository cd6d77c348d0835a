"""Claims of papers, judged by numbers and said in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tw_compile.benchmark.papers.exhibit import Claim

Values = Mapping[float, float]


@dataclass(frozen=True)
class Bound:
    """A limit that every value meets, or at least one value (``somewhere``). ``word`` is ``at least`` or ``at most``."""

    word: str
    limit: float
    somewhere: bool = False

    def holds(self, value: float) -> bool:
        return value >= self.limit if self.word == "at least" else value <= self.limit


def percent(value: float) -> str:
    return f"{value:.1%}"


def times(value: float) -> str:
    return f"{value:.2f}x"


def judge(
    says: str, bound: Bound, paper: Values, ours: Values, show: Callable[[float], str] = percent, x: str = "tokens"
) -> Claim:
    """Judge whether a claim holds on the two sides. Its text has each side's least and greatest value, and where these are.

    ``says`` is the text before the bound: "fused takes", which "at least 24% ..." follows.
    """
    where = "somewhere" if bound.somewhere else "everywhere"
    in_paper, text_of_paper = _side("paper", bound, paper, show, x)
    here, text_of_ours = _side("ours", bound, ours, show, x)
    claim = f"{says} {bound.word} {show(bound.limit)} {where}"
    return Claim(f"{claim}. {text_of_paper}. {text_of_ours}.", in_paper, here)


def _side(side: str, bound: Bound, values: Values, show: Callable[[float], str], x: str) -> tuple[bool | None, str]:
    values = {at: value for at, value in values.items() if math.isfinite(value)}
    if not values:
        return None, f"{side}: no numbers, so it is not judged"
    least, most = (choose(values, key=lambda at: values[at]) for choose in (min, max))
    span = f"{show(values[least])} at {least:g} {x}"
    if len(values) > 1:
        span += f" to {show(values[most])} at {most:g}"
    good = [at for at, value in values.items() if bound.holds(value)]
    holds = bool(good) if bound.somewhere else len(good) == len(values)
    if holds:
        return True, f"{side}: {span}: it holds"
    bad = ", ".join(f"{at:g}" for at in sorted(values.keys() - set(good)))
    return False, f"{side}: {span}: it does not hold" + ("" if bound.somewhere else f" at {bad} {x}")
