"""What TokenWeave's figures of layers, models and engines show: figures 1, 2, 11 to 15."""

from __future__ import annotations

from functools import partial

from tw_compile.benchmark.layer.spec import LayerSpec
from tw_compile.benchmark.papers import predict
from tw_compile.benchmark.papers.claims import Bound, judge, times
from tw_compile.benchmark.papers.context import (
    Context,
    Times,
    Values,
    as_measured,
    cannot,
    combined,
    divided,
    first,
    plain,
    predicted,
    quotient,
    quotients,
)
from tw_compile.benchmark.papers.exhibit import Drawn, Series
from tw_compile.benchmark.papers.measure import Request
from tw_compile.benchmark.papers.timed import Timed
from tw_compile.benchmark.papers.tokenweave_kernels import MEASURED_RANKS, PAPER_PROFILE

LLAMA, SMALL, MIXTRAL = "llama-3.3-70b", "llama-3.1-8b", "mixtral-8x22b"
VARIANTS = ("fused+split", "inductor+nccl", "inductor+symm-two-shot", "no-communication")
PREFILLS = (1024, 2048, 4096, 8192, 16384)


def layer_requests(
    tp: int, models: tuple[str, ...] = (LLAMA,), tokens: tuple[int, ...] = PREFILLS, also: tuple[str, ...] = ()
) -> tuple[Request, ...]:
    """``also``: labels of further variants. Each variant takes some 10 s at each number of tokens, most of it to compile."""
    only, minutes = (*also, *VARIANTS), 1.0 + len((*also, *VARIANTS)) * len(tokens) / 6
    return tuple(
        Request(
            "bench layer",
            LayerSpec("layer", model, tp, "cuda", "bfloat16", tokens, layers=2, repeats=20, only=only),
            tp,
            minutes,
        )
        for model in models
    )


def speedups(context: Context) -> Drawn:
    published = context.published
    base, silent, fast = (
        published.points("11", f"Llama-3.3-70B, TP8, {name}, ms")
        for name in ("baseline", "no communication", "TokenWeave")
    )
    eight = "Llama-3.3-70B, TP8"
    series: list[Series] = [
        published.series("11", f"{eight}, TokenWeave, ms", eight, divided(base, fast)),
        published.series("11", "Llama-3.3-70B, TP4, speed-up", "Llama-3.3-70B, TP4"),
        published.series("11", "Mixtral-8x22B, TP8, speed-up", "Mixtral-8x22B, TP8"),
    ]
    ours: dict[float, float] = {}
    for tp in dict.fromkeys((context.tp, *MEASURED_RANKS)):
        for model in (LLAMA, SMALL):
            split = context.layer(tp, model, "fused+split")
            beside = "Llama-3.3-70B, TP4" if tp == 4 else eight
            asked = map(float, PREFILLS) if context.missing and tp == context.tp else ()
            series += context.lines(f"ours, {model}, TP{tp}", quotients(context.layer(tp, model), split), beside, asked)
            if model == LLAMA and tp == 4:
                ours = plain(quotient(context.layer(tp, model, "no-communication"), split))
    eights: dict[float, float] = {}
    for model, beside in ((LLAMA, eight), (MIXTRAL, "Mixtral-8x22B, TP8")):
        plans = {x: predict.plan("H100", model, 8, int(x), multicast=True) for x in map(float, PREFILLS)}
        gains = {x: found.gain for x, found in plans.items()}
        series.append(predicted(f"{beside}, predicted", gains, beside, PAPER_PROFILE))
        if model == LLAMA:
            eights = {x: found.predicted.no_communication_us / found.us for x, found in plans.items()}
    claims = (
        judge(
            "without communication a model takes, of the time with it hidden (ours: Llama-3.3-70B, TP4),",
            Bound("at least", 1.0, somewhere=True),
            divided(silent, fast),
            ours,
            times,
        ),
        judge(
            "without communication a model takes, of the time with it hidden (ours: predicted, TP8),",
            Bound("at least", 1.0, somewhere=True),
            divided(silent, fast),
            eights,
            times,
        ),
        judge(
            "the speed-up is (ours: predicted, TP8)",
            Bound("at least", 1.25, somewhere=True),
            divided(base, fast),
            series_values(series, f"{eight}, predicted"),
            times,
        ),
    )
    return Drawn(tuple(series), claims)


def series_values(series: list[Series], name: str) -> dict[float, float]:
    return next(line.values() for line in series if line.name == name)


def shares(context: Context) -> Drawn:
    published = context.published
    base, silent = (
        published.points("11", f"Llama-3.3-70B, TP8, {name}, ms") for name in ("baseline", "no communication")
    )
    paper = {x: 1.0 - value for x, value in divided(silent, base).items()}
    line = published.series("11", "Llama-3.3-70B, TP8, baseline, ms", "Llama-3.3-70B, TP8", paper)
    series: list[Series] = [line]
    for tp in dict.fromkeys((context.tp, *MEASURED_RANKS)):
        series += context.lines(f"ours, {LLAMA}, TP{tp}", communication_shares(context, tp, LLAMA), line.name)
    plans = {float(x): predict.plan("H100", LLAMA, 8, x, multicast=True) for x in PREFILLS}
    guess = {x: predict.communication_share(found) for x, found in plans.items()}
    series.append(predicted("Llama-3.3-70B, TP8, predicted", guess, line.name, PAPER_PROFILE))
    claim = judge(
        "communication takes, of the layer's time (ours: predicted, TP8),", Bound("at most", 0.23), paper, guess
    )
    return Drawn(tuple(series), (claim,))


def communication_shares(context: Context, tp: int, model: str) -> dict[str, Values]:
    """The share of the best unfused layer's time that communication takes."""
    return saved(context.layer(tp, model, "no-communication"), context.layer(tp, model))


def saved(ours: Times, base: Times) -> dict[str, Values]:
    """The share of the base's time that ours does not take."""
    return combined(lambda ours, base: 1.0 - ours / base, ours, base)


def engine(context: Context, exhibit: str) -> Drawn:
    """Speed-ups of an engine: the paper's lines, and prefills of ours."""
    published = context.published
    lines = [
        published.series(exhibit, row.series, row.series.removesuffix(", speed-up"))
        for row in published.rows
        if row.exhibit == exhibit
    ]
    for tp, model in ((2, SMALL), (4, LLAMA)):
        for label in ("fuse", "fuse+split"):
            found = as_measured(context.times("bench vllm", tp, partial(prefill, label, model)))
            lines += context.lines(f"ours, {label}, prefill, {model}, TP{tp}", found, lines[0].name)
    if not any(line.ours for line in lines):
        lines.append(cannot("ours", lines[0].values(), "no file of bench vllm was given; it takes two GPUs and vLLM"))
    return Drawn(tuple(lines))


def prefill(label: str, model: str, row: Timed) -> bool:
    return (row.label, row.model, row.trace) == (label, model, "prefill")


def one_layer(context: Context) -> Drawn:
    published = context.published
    weave = published.series("14", "TokenWeave, TP8, saving", "TokenWeave, TP8")
    tile = published.series("14", "TileLink, TP8, saving", "TileLink, TP8")
    series: list[Series] = [weave, tile]
    ours: dict[float, float] = {}
    for tp in dict.fromkeys((context.tp, *MEASURED_RANKS)):
        found = saved(context.layer(tp, LLAMA, "fused+split"), context.layer(tp, LLAMA))
        series += context.lines(f"ours, {LLAMA}, TP{tp}", found, weave.name)
        ours = plain(first(found)) if tp == 4 else ours
    gains = {float(x): 1.0 - 1.0 / predict.plan("H100", LLAMA, 8, x, multicast=True).gain for x in PREFILLS}
    series.append(predicted(f"{LLAMA}, TP8, predicted", gains, weave.name, PAPER_PROFILE))
    claim = judge("a layer is shortened by (ours: TP4)", Bound("at least", 0.15), weave.values(), ours)
    return Drawn(tuple(series), (claim,))


def nanoflow(context: Context) -> Drawn:
    line = context.published.series("15", "NanoFlow, TP8, speed-up", "NanoFlow, TP8")
    return Drawn((line, cannot("ours", line.values(), "NanoFlow has an engine of its own, which is not run here")))
