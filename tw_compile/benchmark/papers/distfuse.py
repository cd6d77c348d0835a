"""DistFuse's table: a GEMM whose tiles are summed as soon as they are done."""

from __future__ import annotations

from tw_compile.benchmark.papers import predict
from tw_compile.benchmark.papers.claims import Bound, judge
from tw_compile.benchmark.papers.context import Context, predicted, quotient
from tw_compile.benchmark.papers.exhibit import Drawn, Exhibit, Needs, Point, Series
from tw_compile.benchmark.papers.hidden import MORE, PROFILE, measured_share
from tw_compile.benchmark.papers.tokenweave_layers import LLAMA, layer_requests

TOKENS = 1024
MEAN = 0.0
DEPTHS = {8192.0: "o_proj", 28672.0: "down", MEAN: "mean, or layer"}


def hidden(context: Context) -> Drawn:
    """Of the all_reduce of PyTorch, what DistFuse saves of PyTorch's time; ours is the layer that has both GEMMs."""
    base, sums, fast = (
        context.published.points("t1", name)
        for name in ("PyTorch, GEMM then all_reduce, us", "all_reduce of PyTorch alone, us", "DistFuse, us")
    )
    share = {x: (base[x] - fast[x]) / sums[x] for x in base}
    share[MEAN] = sum(share.values()) / len(share)
    line = context.published.series("t1", "DistFuse, us", "DistFuse, TP4", share)
    series: list[Series] = [line]
    ours: dict[float, float] = {}
    for tp in dict.fromkeys((context.tp, 2, 4)):
        for label in ("fused", "fused+split"):
            name = f"ours, {label}, layer, TP{tp}"
            points = [
                Point(MEAN, point.value, point.how, point.detail)
                for point in measured_share(context, tp, LLAMA, label, name, line.name).points
                if point.x == TOKENS
            ]
            series.append(Series(name, True, tuple(points), line.name))
        plan = predict.plan(PROFILE, LLAMA, tp, TOKENS)
        guess = {MEAN: predict.hidden_share(plan)}
        series.append(predicted(f"ours, layer, TP{tp}, predicted", guess, line.name, f"planner, {PROFILE}"))
        ours[tp] = guess[MEAN]
    claim = judge(
        f"of the all_reduces' time is hidden at {TOKENS} tokens (paper: mean of two GEMMs; ours: predicted, by ranks)",
        Bound("at least", 0.443),
        {4.0: share[MEAN]},
        ours,
        x="ranks",
    )
    return Drawn(tuple(line for line in series if line.points), (claim,))


def shares(context: Context) -> Drawn:
    line = context.published.series("s3", "share of communication, least and most", "4x A100, TP4")
    found = quotient(context.layer(4, LLAMA, "no-communication"), context.layer(4, LLAMA))
    values = sorted(((1.0 - value, row) for value, row in found.values()), key=lambda pair: pair[0])
    ends = {1.0: values[0], 2.0: values[-1]} if values else {}
    measured = context.measured(f"ours, {LLAMA}, 4x H200, TP4", ends, line.name)
    plans = [predict.plan(PROFILE, LLAMA, 4, tokens) for tokens in (512, 1024, 2048, 4096, 8192)]
    found_shares = sorted(map(predict.communication_share, plans))
    guess = {1.0: found_shares[0], 2.0: found_shares[-1]}
    series = (
        line,
        measured,
        predicted("H200, TP4, 512 to 8192 tokens, predicted", guess, line.name, f"planner, {PROFILE}"),
    )
    return Drawn(tuple(line for line in series if line.points))


EXHIBITS = (
    Exhibit(
        "t1",
        "Table 1: a GEMM and its all_reduce, 1024 tokens",
        "Tiles that are summed at once hide 44.3% of all_reduce, on average of two GEMMs.",
        "The paper has single GEMMs on A100s with NCCL; ours are whole layers of the same shape, over the best unfused one, "
        f"with H200s; {MORE}.",
        "GEMM",
        "share that is hidden",
        hidden,
        Needs(2, 5),
        layer_requests,
        ticks=DEPTHS,
        x_log=False,
    ),
    Exhibit(
        "s3",
        "Section 3.3: what communication takes",
        "All_reduces take 8% to 25% of the latency.",
        "The paper has A100s and all of inference; ours are prefills of layers on H200s.",
        "least and most",
        "share of the time",
        shares,
        ticks={1.0: "least", 2.0: "most"},
        x_log=False,
    ),
)
