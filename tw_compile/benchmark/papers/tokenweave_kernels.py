"""What TokenWeave's figures of kernels, and of an FFN, show: figures 4 to 7, 9 and 10."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from tw_compile.benchmark.layer.ffn_spec import EQUAL, PLANNED, SWEPT, TUNED, WHOLE, FfnSpec, swept_sizes
from tw_compile.benchmark.papers import predict
from tw_compile.benchmark.papers.claims import Bound, judge, times
from tw_compile.benchmark.papers.context import (
    Context,
    Times,
    Values,
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
from tw_compile.benchmark.spec import BenchSpec

HIDDEN = 8192
LLAMA = "llama-3.3-70b"
UNFUSED = ("nccl+norm", "symm-one-shot+norm", "symm-two-shot+norm")
SCATTERED = "nccl-reduce-scatter+norm+all-gather"
PIECES = ("nccl-all-reduce-alone", "nccl-reduce-scatter-alone", "nccl-all-gather-alone")
FUSED = ("tw-push-one-shot", "tw-push-two-shot", "tw-stream-in-slot")
TOKENS = (64, 256, 1024, 4096, 8192, 16384)
LONG_TOKENS = (1024, 2048, 4096, 8192, 16384)
SMS_TOKENS, SMS = (64, 1024, 4096), (2, 4, 8, 16, 32, 64, 128)
MEASURED_RANKS = (2, 4)
FFN_RANKS, FFN_TOKENS = (4, 8), (1024, 2048, 4096, 8192)
BEST = "best of a sweep"
BY_MODEL, BY_TUNE = "planned halves, by the model", "planned halves, from halves that tune measured"
PAPER_PROFILE = "planner, H100 with multicast, TP8"


def _request(
    tp: int, tokens: tuple[int, ...], only: tuple[str, ...], minutes: float, sms: tuple[int, ...] = ()
) -> tuple[Request, ...]:
    spec = BenchSpec(tp, "cuda", "bfloat16", (HIDDEN,), tokens, repeats=20, only=only, sms=sms)
    return (Request("bench kernel", spec, tp, minutes),)


def fused_requests(tp: int) -> tuple[Request, ...]:
    return _request(tp, TOKENS, (*FUSED, *UNFUSED, SCATTERED), 3.0)


def alone_requests(tp: int) -> tuple[Request, ...]:
    return _request(tp, LONG_TOKENS, PIECES, 1.5)


def sms_requests(tp: int) -> tuple[Request, ...]:
    return _request(tp, SMS_TOKENS, ("tw-push-two-shot", "tw-stream-in-slot"), 4.0, SMS)


def ffn_requests(tp: int) -> tuple[Request, ...]:
    """One GPU has the share of one rank, whatever ``tp``."""
    return tuple(
        Request(
            "bench ffn",
            FfnSpec(LLAMA, shards, FFN_TOKENS),
            1,
            3.0,
            predict.tuned_halves(LLAMA, shards, FFN_TOKENS),
        )
        for shards in FFN_RANKS
    )


def fused(context: Context) -> Drawn:
    published = context.published
    base = published.points("4", "all_reduce + norm, us")
    series: list[Series] = []
    for name in ("fused", "simple fusion", "reduce_scatter + norm + all_gather"):
        values = divided(published.points("4", f"{name}, us"), base)
        series.append(published.series("4", f"{name}, us", f"{name}, TP8", values))
    saved = {x: 1.0 - value for x, value in series[0].values().items()}
    ours: dict[str, Values] = {}
    for tp in dict.fromkeys((context.tp, *MEASURED_RANKS)):
        unfused = context.unfused(tp, HIDDEN)
        found = quotients(context.fastest_fused(tp, HIDDEN), unfused)
        asked = base if tp == context.tp else ()
        series += context.lines(f"ours, fused, TP{tp}", found, "fused, TP8", asked)
        if tp == context.tp:
            ours = found
            scattered = quotients(context.kernel(tp, HIDDEN, SCATTERED), unfused)
            name = "reduce_scatter + norm + all_gather, TP8"
            series += context.lines(f"NCCL's {name.removesuffix('8')}{tp}", scattered, name, [4096.0])
    values = {x: predict.fused_of_unfused("H100", 8, int(x), HIDDEN) for x in base}
    series.append(predicted("fused, TP8, predicted", values, "fused, TP8", PAPER_PROFILE))
    side = ", ".join((f"TP{context.tp}", *filter(None, list(ours)[:1])))
    claim = f"the fused kernel saves, of all_reduce + norm (ours: {side}, of the best unfused),"
    here = {x: 1.0 - value for x, value in plain(first(ours)).items()}
    return Drawn(tuple(series), (judge(claim, Bound("at least", 0.24), saved, here),))


def parts(context: Context) -> Drawn:
    name = "multimem, (reduce_scatter + all_gather) / all_reduce"
    line = context.published.series("5", name, "multimem, TP8")
    whole, scatter, gather = (context.kernel(context.tp, HIDDEN, label) for label in PIECES)
    both = combined(lambda scatter, gather, whole: (scatter + gather) / whole, scatter, gather, whole)
    ours = context.lines(f"NCCL, TP{context.tp}", both, "multimem, TP8", line.values())
    claim = judge(
        "reduce_scatter and all_gather take, of all_reduce,",
        Bound("at least", 1.1),
        line.values(),
        plain(first(both)),
        times,
    )
    return Drawn((line, *ours), (claim,))


def rates(context: Context) -> Drawn:
    scatter = context.kernel(context.tp, HIDDEN, PIECES[1])
    sent = (context.tp - 1) / context.tp * 2 * HIDDEN
    of_a_token = combined(lambda us: sent / us / 1e3, scatter)
    values = {where: {x: (x * rate, row) for x, (rate, row) in found.items()} for where, found in of_a_token.items()}
    return Drawn(tuple(context.lines(f"NCCL's reduce_scatter, TP{context.tp}", values, None, map(float, LONG_TOKENS))))


def by_sms(context: Context, exhibit: str, prefix: str, shown: tuple[int, ...]) -> Drawn:
    """The paper's lines ``PREFIX N tokens``, and our lines, each divided by its own best value."""
    series: list[Series] = []
    best = context.published.points("7", "all_reduce, best, us") if exhibit == "7" else {}
    two: dict[float, float] = {}
    eight: dict[float, float] = {}
    for tokens in shown:
        name = f"{prefix} {tokens} tokens, us"
        points = context.published.points(exhibit, name)
        least = min(best.get(tokens, points[8]), *points.values())
        values = {x: us / least for x, us in points.items()}
        two[tokens], eight[tokens] = values[2], values[8]
        series.append(context.published.series(exhibit, name, f"{prefix} {tokens} tokens, TP8", values))
    ours: dict[int, dict[float, float]] = {2: {}, 8: {}}
    for tokens in shown:
        beside = f"{prefix} {tokens} tokens, TP8"
        for label, tp in (("push-two-shot", context.tp), ("stream-in-slot", context.tp), ("stream-in-slot", 4)):
            found = context.by("bench kernel", tp, swept(label, tokens), lambda row: row.sms)
            shares = quotients(found, fastest(found))
            known = [other.name for other in series]
            lines = context.lines(f"ours, {label}, {tokens} tokens, TP{tp}", shares, beside)
            series += [line for line in lines if line.name not in known]
            if label == "stream-in-slot" and tp == context.tp:
                here = plain(first(shares))
                for sms in ours.keys() & here.keys():
                    ours[int(sms)][tokens] = here[sms]
    if not any(line.ours for line in series):
        why = context.missing or "no result that was given or committed has it"
        series.append(cannot("ours", SMS, why, series[0].name))
    claims = [
        judge(
            "with 8 SMs it takes, of its best time (ours: stream in the slot),",
            Bound("at most", 1.15),
            eight,
            ours[8],
            times,
        ),
        judge(
            "with 2 SMs it takes, of its best time (ours: stream in the slot),",
            Bound("at most", 1.15),
            two,
            ours[2],
            times,
        ),
    ]
    return Drawn(tuple(series), tuple(claims))


def fastest(found: Times) -> Times:
    """The fastest row of each run, at every x of the run."""
    return {run: dict.fromkeys(rows, min(rows.values(), key=lambda row: row.value)) for run, rows in found.items()}


def swept(label: str, tokens: int) -> Callable[[Timed], bool]:
    def choose(row: Timed) -> bool:
        return row.hidden == HIDDEN and row.tokens == tokens and row.label.startswith(f"tw-{label}-") and bool(row.sms)

    return choose


def ffn(context: Context) -> Drawn:
    series: list[Series] = []
    excess: dict[float, float] = {}
    labels: list[str] = []
    for shards in FFN_RANKS:
        whole, equal, modelled, tuned = (
            context.times("bench ffn", shards, partial(_labelled, (label,))) for label in (WHOLE, EQUAL, PLANNED, TUNED)
        )
        planned = context.times("bench ffn", shards, partial(_labelled, (PLANNED, TUNED)))
        best = context.times("bench ffn", shards, lambda row: row.label.startswith(SWEPT))
        asked = () if whole else map(float, FFN_TOKENS)
        for name, found in ((EQUAL, equal), (BY_MODEL, modelled), (BY_TUNE, tuned), (BEST, best)):
            series += context.lines(f"{name}, TP{shards}", quotients(found, whole), None, asked)
            asked = ()
        for tokens, (value, row) in quotient(planned, best).items():
            excess[tokens] = max(value - 1.0, excess.get(tokens, -1.0))
            labels.append(row.label)
    for shards in FFN_RANKS:
        guesses: dict[str, dict[float, float]] = {EQUAL: {}, BY_MODEL: {}, BEST: {}}
        for tokens in FFN_TOKENS:
            plan = predict.ffn_plan("H100", LLAMA, shards, tokens, swept_sizes(tokens))
            us = {EQUAL: plan.us[tokens // 2], BY_MODEL: plan.us[plan.first]}
            us[BEST] = min(plan.us[size] for size in swept_sizes(tokens))
            for name, value in us.items():
                guesses[name][tokens] = value / plan.us[0]
        for name, values in guesses.items():
            series.append(predicted(f"{name}, TP{shards}, predicted", values, None, "planner, H100"))
    text = f"beyond the best of the sweep the planned halves{_how_planned(labels)} take"
    claim = judge(text, Bound("at most", 0.02), {}, excess)
    return Drawn(tuple(line for line in series if line.points), (claim,))


def _labelled(labels: tuple[str, ...], row: Timed) -> bool:
    return row.label in labels


def _how_planned(labels: Sequence[str]) -> str:
    """How the halves with these labels were planned, in parentheses; empty without any."""
    tuned = labels.count(TUNED)
    if not labels:
        return ""
    if not tuned:
        return " (by the model)"
    if tuned == len(labels):
        return " (from halves that tune measured)"
    return f" ({tuned} of {len(labels)} from halves that tune measured, the others by the model)"
