"""DistFuse's table: a GEMM whose tiles are summed as soon as they are done."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from tw_compile.benchmark.papers import predict
from tw_compile.benchmark.papers.claims import Bound, judge
from tw_compile.benchmark.papers.context import Context, Values, first, plain, predicted
from tw_compile.benchmark.papers.exhibit import Drawn, Exhibit, Needs, Series
from tw_compile.benchmark.papers.hidden import MORE, PROFILE, measured_share
from tw_compile.benchmark.papers.tokenweave_layers import LLAMA, SMALL, communication_shares, layer_requests

TOKENS = 1024
MEAN = 0.0
DEPTHS = {8192.0: "o_proj", 28672.0: "down", MEAN: "mean, or layer"}


def hidden(context: Context) -> Drawn:
    """The time that DistFuse saves over PyTorch, as a share of PyTorch's all_reduce. Ours is of the layer with both GEMMs."""
    base, sums, fast = (
        context.published.points("t1", name)
        for name in ("PyTorch, GEMM then all_reduce, us", "all_reduce of PyTorch alone, us", "DistFuse, us")
    )
    share = {x: (base[x] - fast[x]) / sums[x] for x in base}
    share[MEAN] = sum(share.values()) / len(share)
    line = context.published.series("t1", "DistFuse, us", "DistFuse, TP4", share)
    series: list[Series] = [line]
    guesses: dict[float, float] = {}
    measured: dict[float, float] = {}
    for tp in dict.fromkeys((context.tp, 2, 4)):
        for label in ("fused", "fused+split"):
            found = _at_tokens(measured_share(context.over_peers, tp, LLAMA, label))
            series += context.lines(f"ours, {label}, {LLAMA}, TP{tp}", found, line.name)
            for value in plain(first(found)).values():
                measured[tp] = max(value, measured.get(tp, value))
        plan = predict.plan(PROFILE, LLAMA, tp, TOKENS)
        guess = {MEAN: predict.hidden_share(plan)}
        series.append(predicted(f"ours, layer, TP{tp}, predicted", guess, line.name, f"planner, {PROFILE}"))
        guesses[tp] = guess[MEAN]
    through_host = _at_tokens(measured_share(context.over_host, context.tp, SMALL, "fused+split"))
    series += context.lines(f"ours, fused+split, {SMALL}, TP{context.tp}", through_host, line.name)
    slow_link = {float(context.tp): value for value in plain(first(through_host)).values()}
    claims = tuple(
        judge(
            f"the share of all_reduces that is hidden, at {TOKENS} tokens, is (paper: mean of two GEMMs, NVLink; ours: {side})",
            Bound("at least", 0.443),
            {4.0: share[MEAN]},
            values,
            x="ranks",
        )
        for side, values in (
            ("predicted, by ranks", guesses),
            ("measured with peer access, by ranks", measured),
            (f"{SMALL} through host memory", slow_link),
        )
    )
    return Drawn(tuple(series), claims)


def _at_tokens(found: Mapping[str, Values]) -> dict[str, Values]:
    """The value at ``TOKENS``, where there is one, drawn at the x of the GEMMs' mean."""
    return {where: {MEAN: values[TOKENS]} for where, values in found.items() if TOKENS in values}


def shares(context: Context) -> Drawn:
    line = context.published.series("s3", "share of communication, least and most", "4x A100, TP4")
    ours: list[Series] = []
    for tp, model, view in ((4, LLAMA, context.over_peers), (context.tp, SMALL, context.over_host)):
        found = {where: _ends(values) for where, values in communication_shares(view, tp, model).items()}
        ours += context.lines(f"ours, {model}, TP{tp}", found, line.name)
    plans = [predict.plan(PROFILE, LLAMA, 4, tokens) for tokens in (512, 1024, 2048, 4096, 8192)]
    found_shares = sorted(map(predict.communication_share, plans))
    guess = {1.0: found_shares[0], 2.0: found_shares[-1]}
    series = (
        line,
        *ours,
        predicted("H200, TP4, 512 to 8192 tokens, predicted", guess, line.name, f"planner, {PROFILE}"),
    )
    return Drawn(series)


def _ends(values: Values) -> Values:
    """The least and the greatest value."""
    ordered = sorted(values.values(), key=lambda pair: pair[0])
    return {1.0: ordered[0], 2.0: ordered[-1]}


EXHIBITS = (
    Exhibit(
        "t1",
        "Table 1: a GEMM and its all_reduce, 1024 tokens",
        "Tiles that are summed at once hide 44.3% of all_reduce, on average of two GEMMs.",
        f"The paper has single GEMMs on A100s with NCCL; ours are whole layers over the best unfused one, those of {LLAMA} "
        f"of the same shape; through host memory it is {SMALL}, whose rows are half as long; {MORE}.",
        "GEMM",
        "share that is hidden",
        hidden,
        Needs(2, 2),
        partial(layer_requests, tokens=(TOKENS,), also=("fused",)),
        ticks=DEPTHS,
        x_log=False,
    ),
    Exhibit(
        "s3",
        "Section 3.3: what communication takes",
        "All_reduces take 8% to 25% of the latency.",
        "The paper has A100s with NVLink and all of inference; ours are prefills of layers.",
        "least and most",
        "share of the time",
        shares,
        ticks={1.0: "least", 2.0: "most"},
        x_log=False,
    ),
)
