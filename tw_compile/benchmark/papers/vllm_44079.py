"""vLLM issue 44079: up to which size a fused all_reduce pays beside a fast unfused one."""

from __future__ import annotations

from tw_compile.benchmark.papers import predict
from tw_compile.benchmark.papers.claims import Bound, judge, times
from tw_compile.benchmark.papers.context import Context, cannot, divided, predicted, quotients
from tw_compile.benchmark.papers.exhibit import Drawn, Exhibit, Needs, Series
from tw_compile.benchmark.papers.measure import Request
from tw_compile.benchmark.papers.tokenweave_kernels import FUSED, UNFUSED
from tw_compile.benchmark.spec import BenchSpec

HIDDEN = 2048
CUSTOM_BYTES = 256 * 1024
"""In the issue, vLLM's own all_reduce serves messages below this size, and multimem serves the others."""


def requests(tp: int) -> tuple[Request, ...]:
    spec = BenchSpec(tp, "cuda", "bfloat16", (HIDDEN,), (48, 64, 96, 128), repeats=20, only=(*FUSED, *UNFUSED))
    return (Request("bench kernel", spec, tp, 2.0),)


def decisions(context: Context) -> Drawn:
    """The time of what the cap and the gate run, divided by the time of the faster way. Both are of the issue's own times."""
    fused, unfused = (context.published.points("t1", f"{name}, us") for name in ("fused one-shot", "unfused"))
    best = {x: min(fused[x], unfused[x]) for x in fused}
    line = context.published.series("t1", "fused one-shot, us", "fused up to 0.5 MB, TP8", divided(fused, best))
    chosen: dict[float, float] = {}
    for x in fused:
        backend = "custom" if 2 * HIDDEN * x < CUSTOM_BYTES else "multimem"
        fuses, _ = predict.gate_fuses(int(x), HIDDEN, backend)
        chosen[x] = fused[x] if fuses else unfused[x]
    table = "the gate's table for Hopper with multicast, which is from this issue; times of the issue"
    gate = predicted("what the gate chooses, TP8", divided(chosen, best), line.name, table)
    series: list[Series] = [line, gate]
    for tp in dict.fromkeys((context.tp, 2, 4)):
        found = quotients(context.fastest_fused(tp, HIDDEN), context.unfused(tp, HIDDEN))
        asked = best if context.missing and tp == context.tp else ()
        series += context.lines(f"ours, fused by best unfused, TP{tp}", found, None, asked)
    claim = judge(
        "the choice takes, of the faster way's time, (paper: the cap of 0.5 MB; ours: the gate)",
        Bound("at most", 1.01),
        line.values(),
        gate.values(),
        times,
    )
    return Drawn(tuple(series), (claim,))


def throughput(context: Context) -> Drawn:
    high, low = (context.published.points("t2", f"tokens a second with a cap of {cap} MB") for cap in ("0.5", "0.25"))
    gains = divided(low, high)
    line = context.published.series(
        "t2", "tokens a second with a cap of 0.25 MB", "cap of 0.25 over 0.5 MB, TP8", gains
    )
    why = "it takes 8 GPUs with multicast and vLLM; two GPUs have no multimem all_reduce to lose against"
    claim = judge("a lower cap gives, of the throughput,", Bound("at least", 1.03, somewhere=True), gains, {}, times)
    return Drawn((line, cannot("ours", gains, why, line.name)), (claim,))


EXHIBITS = (
    Exhibit(
        "t1",
        "First table: fused against unfused by size, hidden size 2048",
        "From 256 KiB on the fused kernel is slower than multimem and a norm, and the cap of 0.5 MB takes it all the same.",
        "The times of the first two lines are the issue's, of 8 H200s with multicast: ours is the choice; measured lines have "
        "2 or 4 ranks without multicast, where fusing pays at every size.",
        "tokens",
        "time by that of the faster way",
        decisions,
        Needs(2, 2),
        requests,
    ),
    Exhibit(
        "t2",
        "Second table: decode throughput by cap",
        "With a cap of 256 KiB decoding is 3.4% and 7.4% faster at 96 and 128 requests.",
        "It is cited only.",
        "requests",
        "throughput by that of the higher cap",
        throughput,
        Needs(8, 10, multicast=True),
    ),
)
