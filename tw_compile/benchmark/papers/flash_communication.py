"""Flash Communication's figures and tables: sums in few bits. Ours are exact sums, and sums by wires."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from tw_compile.benchmark.layer.spec import LayerSpec
from tw_compile.benchmark.papers import predict
from tw_compile.benchmark.papers.claims import Bound, judge, times
from tw_compile.benchmark.papers.context import (
    Context,
    Values,
    as_measured,
    first,
    measured,
    plain,
    predicted,
    quotients,
)
from tw_compile.benchmark.papers.exhibit import Claim, Drawn, Exhibit, Needs, Point, Series
from tw_compile.benchmark.papers.flash_accuracy import (
    BITS,
    NO_INT4,
    THIRDS,
    WIRE_BITS,
    accuracy_of_tasks,
    errors,
    perplexities,
)
from tw_compile.benchmark.papers.measure import Request
from tw_compile.benchmark.papers.timed import HOST_MEMORY
from tw_compile.benchmark.papers.tokenweave_kernels import HIDDEN, fastest, sms_requests, swept
from tw_compile.benchmark.papers.tokenweave_layers import LLAMA, SMALL, communication_shares, layer_requests, prefill
from tw_compile.benchmark.spec import BenchSpec
from tw_compile.kernels.collective.wires import EXACT

MIB = 2**20
SMALL_HIDDEN = 4096
"""The hidden size of the paper's LLaMA-3-8B, and of Llama-3.1-8B."""
LARGE = 64.0
"""MiB from which on the paper sees its kernel clearly ahead."""
PREFILLS = (1024, 4096)
SIZES = (64, 256, 1024, 4096, 16384)
LAYER_WIRES = {EXACT: "fused+split", "int8": "fused+split-int8"}
"""By wire, the benchmarks' label of the layers that are measured."""
JUDGED = (EXACT, "int6")
"""The widest and the narrowest wire."""
NOT_BY_ENGINE = {
    4.0: NO_INT4,
    6.0: "no engine was measured with int6",
    8.0: "with int8 its log-probabilities were too far from float32's, so bench vllm has no speed-up of it: "
    "2026-11-24-2xh100-vllm-host-wires-llama-3.1-8b-16-layers-tp2.csv",
}


def wire_requests(tp: int) -> tuple[Request, ...]:
    """Calls with every wire, over peer access and through host memory. Calls that a machine does not serve have no time."""
    wires = tuple(WIRE_BITS)
    kernels = [f"tw-{transport}-two-shot" for transport in ("push", "host")]
    only = ("nccl+norm", *(_with(wire, label) for label in kernels for wire in wires))
    return tuple(
        Request(
            "bench kernel",
            BenchSpec(tp, "cuda", "bfloat16", (hidden,), SIZES, repeats=20, only=only, wires=wires),
            tp,
            2.0,
        )
        for hidden in (HIDDEN, SMALL_HIDDEN)
    )


def coded_layer_requests(tp: int) -> tuple[Request, ...]:
    only = ("inductor+nccl", "inductor+symm-two-shot", "no-communication", *LAYER_WIRES.values())
    spec = LayerSpec("layer", SMALL, tp, "cuda", "bfloat16", PREFILLS, layers=2, repeats=20, only=only, wires=("int8",))
    return (Request("bench layer", spec, tp, 3.0),)


def _with(wire: str, label: str) -> str:
    """The benchmarks' label of a variant with the wire."""
    return label if wire == EXACT else f"{label}-{wire}"


def shares(context: Context) -> Drawn:
    line = context.published.series("1", "4x L40, TP4, share", "4x L40, TP4, most")
    series: list[Series] = [line]
    for tp in dict.fromkeys((context.tp, 2, 4)):
        found = communication_shares(context.over_peers, tp, LLAMA)
        series += context.lines(f"ours, {LLAMA}, TP{tp}", found, line.name)
    through_host = communication_shares(context.over_host, context.tp, SMALL)
    series += context.lines(f"ours, {SMALL}, TP{context.tp}", through_host, line.name)
    plans = {float(x): predict.plan("H200", LLAMA, 4, x) for x in (1024, 2048, 4096, 8192)}
    guess = {x: predict.communication_share(found) for x, found in plans.items()}
    series.append(predicted("H200 with NVLink, TP4, predicted", guess, line.name, "planner, H200"))
    most = Bound("at most", 0.65)
    claims = (
        judge("sums take, of a prefill (ours: NVLink, predicted),", most, line.values(), guess),
        judge(f"sums take, of a prefill (ours: {HOST_MEMORY}),", most, line.values(), plain(first(through_host))),
    )
    return Drawn(tuple(series), claims)


def first_token(context: Context) -> Drawn:
    small, large = (
        context.published.series("9", f"{name}, speed-up", name)
        for name in ("LLaMA-3-8B, INT4, 4x L40", "LLaMA-3-70B, INT4, 8x A100")
    )
    series = [small, large]
    for model, tp, name in ((SMALL, 4, small.name), (LLAMA, 8, large.name)):
        gain = {float(tp): predict.plan("H200", model, tp, 4096).gain}
        series.append(predicted(f"ours, exact, {model}, H200, predicted", gain, name, "planner, H200, 4096 tokens"))
    over_peers = _most(layer_gains(context.over_peers, 4, LLAMA, EXACT), 4)
    series += context.lines(f"ours, exact, {LLAMA}, most", over_peers, small.name)
    gains = {wire: layer_gains(context.over_all, context.tp, SMALL, wire) for wire in LAYER_WIRES}
    for wire, found in gains.items():
        coded = {where: values for where, values in found.items() if where in gains["int8"]}
        series += context.lines(f"ours, {wire}, {SMALL}, most", _most(coded, context.tp), small.name)
    host = _most(layer_gains(context.over_host, context.tp, SMALL, "int8"), context.tp)
    claim = judge(
        f"without NVLink the first token comes earlier by (paper: INT4, PCIe; ours: int8, layers, {HOST_MEMORY})",
        Bound("at least", 2.0, somewhere=True),
        small.values(),
        plain(first(host)),
        times,
        "ranks",
    )
    return Drawn(tuple(series), (claim,))


def layer_gains(context: Context, tp: int, model: str, wire: str) -> dict[str, Values]:
    """The best unfused layer's time divided by the time of our layer whose rows travel by ``wire``; by tokens."""
    return quotients(context.layer(tp, model), context.layer(tp, model, LAYER_WIRES[wire]))


def _most(found: Mapping[str, Values], ranks: int) -> dict[str, Values]:
    """The greatest value of each place, drawn at its number of ranks."""
    return {where: {float(ranks): max(values.values(), key=lambda pair: pair[0])} for where, values in found.items()}


def by_bits(context: Context) -> Drawn:
    """Layers from every place where rows travelled in codes, and an engine through host memory."""
    tp = context.tp
    gains = {WIRE_BITS[wire]: layer_gains(context.over_all, tp, SMALL, wire) for wire in LAYER_WIRES}
    series: list[Series] = []
    for tokens in PREFILLS:
        shown = {
            where: {bits: found[where][tokens] for bits, found in gains.items() if tokens in found.get(where, {})}
            for where, coded in gains[WIRE_BITS["int8"]].items()
            if tokens in coded
        }
        series += context.lines(f"ours, layers of {SMALL}, {tokens} tokens, TP{tp}", shown, None, gains)
    engine = as_measured(context.over_host.times("bench vllm", tp, partial(prefill, "fuse+split", SMALL)))
    exact = {where: {WIRE_BITS[EXACT]: next(iter(values.values()))} for where, values in engine.items()}
    lines = context.lines(f"ours, vLLM, {SMALL}, TP{tp}", exact, None, [WIRE_BITS[EXACT]])
    without = tuple(Point(bits, None, "cannot", why) for bits, why in NOT_BY_ENGINE.items())
    series += [replace(line, points=(*without, *line.points)) for line in lines]
    return Drawn(tuple(series))


def by_size(context: Context) -> Drawn:
    line = context.published.series("10", "INT4 all_reduce, most, speed-up", "INT4 all_reduce against NCCL, most")
    series: list[Series] = [line]
    claims: list[Claim] = []
    for view, hidden, link in ((context.over_peers, HIDDEN, "NVLink"), (context.over_host, SMALL_HIDDEN, HOST_MEMORY)):
        for wire in WIRE_BITS:
            shown = _over_nccl(view, hidden, wire)
            for values in shown.values():
                row = next(iter(values.values()))[1]
                name = ", ".join(filter(None, ("ours", wire, row.link, f"TP{context.tp}", row.device)))
                series.append(measured(name, values, line.name))
            if not shown and wire == EXACT:
                series += context.lines(f"ours, {link}, TP{context.tp}", shown, line.name, (1.0, 16.0, 64.0))
            if wire in JUDGED:
                claim = (
                    f"from {LARGE:g} MiB on the kernel beats NCCL by (paper: INT4; ours: {wire}, {link}, with the norm)"
                )
                least = Bound("at least", 3.0, somewhere=True)
                claims.append(judge(claim, least, line.values(), _large(first(shown)), times, "MiB"))
    return Drawn(tuple(series), tuple(claims))


def _large(values: Values) -> dict[float, float]:
    """The values of messages as large as those that the paper's claim is about."""
    return {size: value for size, value in plain(values).items() if size >= LARGE}


def _over_nccl(context: Context, hidden: int, wire: str) -> dict[str, Values]:
    """NCCL's time with a norm divided by the time of our fastest kernel with ``wire``; by MiB of a message."""
    found = quotients(context.kernel(context.tp, hidden, "nccl+norm"), context.fastest_fused(context.tp, hidden, wire))
    return {
        where: {2 * hidden * tokens / MIB: pair for tokens, pair in values.items()} for where, values in found.items()
    }


def by_sms(context: Context) -> Drawn:
    series: list[Series] = []
    for tokens in (1024, 4096):
        found = context.by("bench kernel", context.tp, swept("push-two-shot", tokens), lambda row: row.sms)
        name = f"ours, {tokens} tokens, TP{context.tp}"
        series += context.lines(name, quotients(found, fastest(found)), None, (16.0, 32.0, 64.0, 128.0))
    return Drawn(tuple(series))


NVLINK = "ours are of H200s and H100s with NVLink, and of H100s whose rows go through host memory"
EXHIBITS = (
    Exhibit(
        "1",
        "Figure 1: what communication takes of a prefill",
        "Over PCIe sums take up to 65% of a prefill.",
        f"The paper's most is of L40s over PCIe with a batch of 8; {NVLINK}.",
        "tokens",
        "share of the time",
        shares,
        Needs(2, 5),
        layer_requests,
    ),
    Exhibit(
        "5",
        "Figure 5: which sums, and which way, lose most by codes",
        "Sums of down_proj are much harder to quantise than those of o_proj, and the way behind the sum is "
        "harder than the one before.",
        "The paper has squared errors of LLaMA-3-8B; ours are errors relative to float64 of a small model with random weights, "
        "which has none of the large columns that make down_proj hard, and what travels behind the sum is the normalised row.",
        "third of the layers",
        "relative error",
        errors,
        ticks=THIRDS,
        x_log=False,
    ),
    Exhibit(
        "9",
        "Figure 9: time to the first token",
        "INT4 sums shorten it by 2.06x over PCIe and by 1.19x with NVLink.",
        f"The paper's messages have 4 bits, its weights 8, and its baseline is NCCL's ring on L40s and A100s; {NVLINK}. "
        "They are layers with weights in bfloat16, fused and split, over the best unfused layer.",
        "ranks",
        "speed-up",
        first_token,
        Needs(2, 3),
        coded_layer_requests,
    ),
    Exhibit(
        "10",
        "Figure 10: all_reduce by size",
        "The quantised kernel is up to 3.18x as fast as NCCL's ring, beyond 64 MB.",
        f"The paper's point is the most that it names, of all sizes, with INT4; {NVLINK}. They have residual add and norm in "
        "them, and NCCL's time has these, too; rows have 8192 columns over NVLink and 4096 through host memory.",
        "MiB of a message",
        "speed-up over NCCL",
        by_size,
        Needs(2, 4),
        wire_requests,
    ),
    Exhibit(
        "11",
        "Figure 11: all_reduce by SMs",
        "48 SMs are a good balance.",
        "The paper has no numbers of it; ours are exact, with residual add and norm, and each line is by its own best.",
        "SMs",
        "time by the best",
        by_sms,
        Needs(2, 4),
        sms_requests,
    ),
    Exhibit(
        "13",
        "Figure 13: time to the first token by bits, 2 ranks",
        "The fewer bits, the earlier the first token comes.",
        "The paper's plot has no numbers; it is of LLaMA-3-8B on L40s. Ours are layers of Llama-3.1-8B, fused and split, "
        "and prefills of vLLM, on H100s through host memory, over the best unfused layer and over vLLM alone.",
        "bits",
        "speed-up",
        by_bits,
        Needs(2, 3),
        coded_layer_requests,
        ticks=BITS,
        x_log=False,
    ),
    Exhibit(
        "t3",
        "Table 3: accuracy by bits of a message",
        "INT8 loses nothing, INT4 about 1.5 points.",
        "It is cited only.",
        "bits",
        "%",
        accuracy_of_tasks,
        ticks=BITS,
        x_log=False,
    ),
    Exhibit(
        "t4",
        "Table 4: perplexity by bits of a message",
        "INT8 loses nothing, INT6 a little, INT4 most.",
        "Each line is by its own perplexity with INT8. The paper's is of C4 and large models; our committed one is of a text "
        "of 3066 tokens and a model of 135 million parameters, with exact rows where the paper has FP16.",
        "bits",
        "perplexity by that with INT8",
        perplexities,
        ticks=BITS,
        x_log=False,
    ),
)
