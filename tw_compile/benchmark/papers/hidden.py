"""The share of communication that our layers hide, as measured and as predicted."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tw_compile.benchmark.papers import predict
from tw_compile.benchmark.papers.context import Context, Values, combined, predicted
from tw_compile.benchmark.papers.exhibit import Series

PROFILE = "H200"
MORE = "more than all is hidden where norms are saved, too: each rank norms its own rows only"


def measured_share(context: Context, tp: int, model: str, label: str) -> dict[str, Values]:
    """The share that ``label`` saves of the best unfused layer's time in excess of the time without communication."""
    unfused, silent = context.layer(tp, model), context.layer(tp, model, "no-communication")
    return combined(_share, context.layer(tp, model, label), unfused, silent)


def _share(ours: float, unfused: float, silent: float) -> float:
    communication = unfused - silent
    return (unfused - ours) / communication if communication > 0 else math.nan


def predicted_share(
    tp: int, model: str, tokens: Sequence[int], name: str, beside: str | None, sequences: dict[int, int] | None = None
) -> Series:
    """The predicted share of communication that is hidden.

    ``sequences``: the number of equal sequences in a batch, by their length. Then ``tokens`` and x are the length of one.
    """
    many = sequences or {}
    values = {}
    for count in tokens:
        rows = many.get(count, 1)
        plan = predict.plan(PROFILE, model, tp, count * rows, sequences=rows)
        values[float(count)] = predict.hidden_share(plan)
    return predicted(name, values, beside, f"planner, {PROFILE}, TP{tp}")
