"""What Flash Communication says of accuracy: figure 5, tables 3 and 4. Ours are reports of ``tw-compile run --wire``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from tw_compile.benchmark.papers.accuracy import CallError, Cost
from tw_compile.benchmark.papers.claims import Bound, judge, times
from tw_compile.benchmark.papers.context import Context, cannot
from tw_compile.benchmark.papers.exhibit import Drawn, Point, Series
from tw_compile.gating.wire_accuracy import BUDGET_NATS

BITS = {4.0: "INT4", 6.0: "INT6", 8.0: "INT8", 16.0: "16 bits"}
WIRE_BITS = {"exact": 16.0, "int8": 8.0, "int6": 6.0}
THIRDS = {1.0: "first", 2.0: "middle", 3.0: "last"}
PROJECTIONS = ("o_proj", "down_proj")
NO_REPORT = "no report of tw-compile run --wire is there"
NO_INT4 = "no wire sends results in 4 bits, which breaks models"
MODELS = ("LLaMA-3-8B", "LLaMA-3-70B")


def errors(context: Context) -> Drawn:
    """Errors of sums and results behind each projection, by thirds of the layers."""
    found: dict[tuple[str, str], CallError] = {}
    for error in context.accuracy.errors:
        if error.wire == "int8":
            found.setdefault((error.feeds, error.third), error)
    series = []
    for of in ("sums", "results"):
        for feeds in PROJECTIONS:
            points = tuple(
                Point(x, getattr(found[feeds, third], of), "measured earlier", found[feeds, third].source)
                for x, third in THIRDS.items()
                if (feeds, third) in found
            )
            name = f"ours, {of} behind {feeds}, int8"
            series.append(Series(name, True, points) if points else cannot(name, THIRDS, NO_REPORT))
    whole = {x: [found[feeds, third] for feeds in PROJECTIONS] for x, third in THIRDS.items() if _both(found, third)}
    claims = (
        judge(
            "down_proj is harder: the error of its sums is, of o_proj's,",
            Bound("at least", 2.0),
            {},
            {x: down.sums / attention.sums for x, (attention, down) in whole.items()},
            times,
            "of 3 thirds",
        ),
        judge(
            "the second way is harder: the error behind all_gather is, of that behind reduce_scatter,",
            Bound("at least", 1.0),
            {},
            {x: min(error.results / error.sums for error in pair) for x, pair in whole.items()},
            times,
            "of 3 thirds",
        ),
    )
    return Drawn(tuple(series), claims)


def _both(found: Mapping[tuple[str, str], CallError], third: str) -> bool:
    return all((feeds, third) in found for feeds in PROJECTIONS)


def accuracy_of_tasks(context: Context) -> Drawn:
    lines = [context.published.series("t3", f"{model}, mean accuracy of 5 tasks, %", model) for model in MODELS]
    why = "no tasks are run here; table 4 shows what wires cost"
    return Drawn((*lines, cannot("ours", lines[0].values(), why)))


def perplexities(context: Context) -> Drawn:
    """Perplexities divided by the perplexity with INT8, because the paper's table has none without codes."""
    series: list[Series] = []
    for model in MODELS:
        points = context.published.points("t4", f"{model}, C4 perplexity")
        of_int8 = {bits: value / points[8.0] for bits, value in points.items()}
        series.append(context.published.series("t4", f"{model}, C4 perplexity", model, of_int8))
    narrow: list[float] = []
    added: dict[str, dict[float, float]] = {"int8": {}, "int6": {}}
    for (checkpoint, ranks), costs in _by_model(context.accuracy.costs).items():
        for wire, cost in costs.items():
            added[wire][float(ranks)] = max(cost.added, added[wire].get(float(ranks), cost.added))
        if "int8" in costs:
            line = _perplexity(f"ours, {checkpoint}, {ranks} ranks", costs, MODELS[0])
            series.append(line)
            narrow += [value for bits, value in line.values().items() if bits == WIRE_BITS["int6"]]
    if len(series) == len(MODELS):
        series.append(cannot("ours", WIRE_BITS.values(), NO_REPORT, MODELS[0]))
    budget = Bound("at most", BUDGET_NATS)
    claims = [
        judge(f"{wire.upper()} costs, over exact rows,", budget, {}, values, nats, "ranks")
        for wire, values in added.items()
    ]
    claims.append(
        judge(
            "INT6's perplexity is, of INT8's (each side's worst),",
            Bound("at most", 1.035),
            {WIRE_BITS["int6"]: max(line.values()[WIRE_BITS["int6"]] for line in series if not line.ours)},
            {WIRE_BITS["int6"]: max(narrow)} if narrow else {},
            lambda value: f"{value:.4f}x",
            "bits",
        )
    )
    return Drawn(tuple(series), tuple(claims))


def nats(value: float) -> str:
    return f"{value:.4f} nats a token"


def _by_model(costs: Iterable[Cost]) -> dict[tuple[str, int], dict[str, Cost]]:
    """The cost of each wire, by checkpoint and ranks."""
    found: dict[tuple[str, int], dict[str, Cost]] = {}
    for cost in (cost for cost in costs if cost.wire in WIRE_BITS):
        found.setdefault((cost.checkpoint, cost.world_size), {}).setdefault(cost.wire, cost)
    return found


def _perplexity(name: str, costs: Mapping[str, Cost], beside: str) -> Series:
    """The line of one model: perplexities divided by the perplexity with int8."""
    base = costs["int8"]
    found = {WIRE_BITS[wire]: (cost.nats, cost) for wire, cost in costs.items()}
    found[WIRE_BITS["exact"]] = (base.exact_nats, base)
    points = [
        Point(bits, math.exp(value - base.nats), "measured earlier", cost.source)
        for bits, (value, cost) in sorted(found.items())
    ]
    return Series(name, True, (Point(4.0, None, "cannot", NO_INT4), *points), beside)
