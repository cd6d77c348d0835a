"""CommFuse's tables: how much communication is hidden when collectives are cut into chunks that travel beside compute."""

from __future__ import annotations

from tw_compile.benchmark.papers.claims import Bound, judge, percent
from tw_compile.benchmark.papers.context import Context, cannot, divided, first, plain
from tw_compile.benchmark.papers.exhibit import Claim, Drawn, Exhibit, Needs, Point, Series
from tw_compile.benchmark.papers.hidden import MORE, measured_share, predicted_share
from tw_compile.benchmark.papers.tokenweave_layers import LLAMA, SMALL, layer_requests

SEQUENCES = {1024: 128, 2048: 64, 4096: 32, 8192: 16, 16384: 8}
"""Number of sequences in a batch, by the tokens of a sequence."""
METHODS = {0.0: "no overlap", 1.0: "slices", 2.0: "CommFuse"}


def by_method(context: Context) -> Drawn:
    left = context.published.points("t1", "communication that is left, ms")
    share = {x: 1.0 - value / left[0] for x, value in left.items()}
    line = context.published.series("t1", "communication that is left, ms", "MLP, TP4, hidden", share)
    guess = predicted_share(4, SMALL, (4096,), "ours", line.name, SEQUENCES)
    moved = Series(
        f"ours, {SMALL}, TP4, predicted",
        True,
        tuple(Point(2.0, point.value, point.how, point.detail) for point in guess.points),
        line.name,
    )
    return Drawn((line, moved), (_claim(share[2.0], guess),))


def _claim(share: float, ours: Series) -> Claim:
    return judge(
        "the share of communication that is hidden is (sequences of 4096; ours: predicted, TP4)",
        Bound("at least", 0.99),
        {4096.0: share},
        {x: value for x, value in ours.values().items() if x == 4096},
        percent,
    )


def by_length(context: Context) -> Drawn:
    published = context.published
    slices = published.series("t3", "slices of the data, hidden", "slices of the data, TP4")
    fuse = published.series("t3", "CommFuse, hidden", "CommFuse, TP4")
    guess = predicted_share(4, SMALL, tuple(SEQUENCES), f"ours, {SMALL}, TP4, predicted", fuse.name, SEQUENCES)
    series: list[Series] = [slices, fuse, guess]
    peers, host = context.over_peers, context.over_host
    for view, tp, model, label, says in (
        (peers, context.tp, SMALL, "fused+split", "fused+split"),
        (peers, 4, LLAMA, "fused+split", "fused+split"),
        (host, context.tp, SMALL, "fused+split", "fused+split"),
        (host, context.tp, SMALL, "fused+split-int8", "split with int8 rows"),
    ):
        found = measured_share(view, tp, model, label)
        series += context.lines(f"ours, {says}, {model}, TP{tp}", found, fuse.name)
    if context.missing and len(series) == 3:
        series.append(cannot(f"ours, TP{context.tp}", (1024.0, 4096.0), context.missing, fuse.name))
    claims = [
        judge(f"{name} hides, of communication ({side}),", Bound("at least", limit), line.values(), values)
        for side, values in (
            ("ours: predicted, TP4", guess.values()),
            (f"ours: {LLAMA} with peer access, TP4", plain(first(measured_share(peers, 4, LLAMA, "fused+split")))),
            (
                f"ours: {SMALL} through host memory",
                plain(first(measured_share(host, context.tp, SMALL, "fused+split"))),
            ),
        )
        for name, line, limit in (("CommFuse", fuse, 0.99), ("slicing", slices, 0.77))
    ]
    return Drawn(tuple(series), tuple(claims))


def attention(context: Context) -> Drawn:
    published = context.published
    base = published.points("t4", "no overlap, ms")
    lines = [
        published.series("t4", f"{name}, ms", f"{name}, TP4", divided(base, published.points("t4", f"{name}, ms")))
        for name in ("slices of the data", "queries split")
    ]
    why = "nothing here is of attention alone: figure 11 of tokenweave is of whole layers"
    return Drawn((*lines, cannot("ours", base, why, lines[1].name)))


OTHERS = "The paper's device is not named, its batches are those of training, and its layers are TP with sequence parallelism"
EXHIBITS = (
    Exhibit(
        "t1",
        "Table 1: communication of an MLP that is hidden",
        "CommFuse hides 99.8% of it, slices of the data 84%.",
        f"{OTHERS}; ours is a whole layer of Llama-3.1-8B, whose hidden size is the paper's, as predicted; {MORE}.",
        "method",
        "share that is hidden",
        by_method,
        ticks=METHODS,
        x_log=False,
    ),
    Exhibit(
        "t3",
        "Table 3 and figure 8: hidden communication by length",
        "CommFuse hides 99.7% or more at every length.",
        f"{OTHERS}; predicted lines have the paper's batches, measured ones are of one sequence; "
        f"int8 rows change results a little; {MORE}.",
        "tokens of a sequence",
        "share that is hidden",
        by_length,
        Needs(2, 5),
        lambda tp: layer_requests(tp, (SMALL,)),
    ),
    Exhibit(
        "t4",
        "Table 4: attention by length",
        "Splitting the queries shortens attention by 1.2x to 1.3x.",
        f"{OTHERS}; it is cited only.",
        "tokens of a sequence",
        "speed-up over no overlap",
        attention,
    ),
)
