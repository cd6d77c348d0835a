"""TokenWeave's figures."""

from __future__ import annotations

from functools import partial

from tw_compile.benchmark.papers import tokenweave_kernels as kernels
from tw_compile.benchmark.papers import tokenweave_layers as layers
from tw_compile.benchmark.papers.exhibit import Exhibit, Needs

EAGER = (
    "The paper's numbers are of 8 H100s with multicast in eager mode; ours were measured in CUDA graphs and without it"
)
EXHIBITS = (
    Exhibit(
        "1",
        "Figure 1: what communication takes of a prefill",
        "Sums take up to 23% of a prefill's time, with NVLink and multicast.",
        f"{EAGER}; the paper's shares are of whole models and follow from the CSV of figure 11, ours are of layers.",
        "tokens",
        "share of the time",
        layers.shares,
        Needs(2, 5),
        layers.layer_requests,
    ),
    Exhibit(
        "4",
        "Figure 4: fused all_reduce + norm, hidden size 8192",
        "The norm is free within the fused kernel, while naive ways to fuse gain nothing.",
        f"{EAGER}, with 2 or 4 ranks instead of 8: times are by those of all_reduce + norm of the same run; the predicted "
        "line is of the paper's ranks and multicast.",
        "tokens",
        "time by that of all_reduce + norm",
        kernels.fused,
        Needs(2, 3),
        kernels.fused_requests,
    ),
    Exhibit(
        "5",
        "Figure 5: reduce_scatter and all_gather beside all_reduce",
        "Two calls take longer than one that does both.",
        f"{EAGER}; the paper's line is of multimem kernels, ours of NCCL's.",
        "tokens",
        "time by that of all_reduce",
        kernels.parts,
        Needs(2, 1.5),
        kernels.alone_requests,
    ),
    Exhibit(
        "6",
        "Figure 6: rate of reduce_scatter by size",
        "Small messages don't reach the links' rate.",
        f"{EAGER}; the paper's side is empty.",
        "tokens of 8192",
        "GB/s",
        kernels.rates,
        Needs(2, 1.5),
        kernels.alone_requests,
    ),
    Exhibit(
        "7",
        "Figure 7: all_reduce by SMs",
        "8 SMs are enough for all_reduce with multicast.",
        f"{EAGER}; the paper's line is all_reduce alone, ours are two fused kernels, as there is no all_reduce of ours without "
        "norm; each line is by its own best.",
        "SMs",
        "time by the best",
        lambda context: kernels.by_sms(context, "7", "all_reduce of", (1024, 4096)),
        Needs(2, 4),
        kernels.sms_requests,
        y_log=True,
    ),
    Exhibit(
        "9",
        "Figure 9: an FFN in two halves on one GPU",
        "Halves that fill waves cost no more than the whole.",
        "The paper has no numbers of it; ours are of the FFN of Llama-3.3-70B on one rank of 4 and of 8, all SMs, merged gate "
        "and up, in CUDA graphs; predictions are of an H100. Planned halves are by the model, or from halves that tw-compile "
        "tune --halves has measured; the sweep is of the run itself.",
        "tokens",
        "time by that of the whole",
        kernels.ffn,
        Needs(1, 6),
        kernels.ffn_requests,
    ),
    Exhibit(
        "10",
        "Figure 10: the fused kernel by SMs",
        "2 to 8 SMs are enough for the fused kernel with multicast.",
        f"{EAGER}, with 2 or 4 ranks: without multicast SMs add up what the switch does for the paper, so ours need more; each "
        "line is by its own best.",
        "SMs",
        "time by the best",
        lambda context: kernels.by_sms(context, "10", "fused,", (64, 1024, 4096)),
        Needs(2, 4),
        kernels.sms_requests,
        y_log=True,
    ),
    Exhibit(
        "11",
        "Figures 2 and 11: speed-up of a prefill",
        "Fused and split, prefills from 1K tokens on are faster, and from 4K on faster than without communication.",
        f"{EAGER}; the paper's are whole models with 8 or 4 ranks, ours are layers with 2 or 4, over the best unfused layer; "
        "the predicted lines are of the paper's ranks and multicast.",
        "tokens",
        "speed-up",
        layers.speedups,
        Needs(2, 9),
        partial(layers.layer_requests, models=(layers.SMALL, layers.LLAMA)),
    ),
    Exhibit(
        "12",
        "Figure 12: throughput of an engine",
        "Throughput grows by up to 1.26x with 8 ranks and 1.11x with 4.",
        f"{EAGER}; x is the paper's prompt length, and the tokens of a step of ours; ours are prefills of layers cut to what "
        "the file says.",
        "tokens",
        "speed-up",
        lambda context: layers.engine(context, "12"),
    ),
    Exhibit(
        "13",
        "Figure 13: throughput by tokens of a step",
        "The gain needs no long steps.",
        f"{EAGER}; the paper's have prompts and answers, ours are prefills.",
        "tokens of a step",
        "speed-up",
        lambda context: layers.engine(context, "13"),
    ),
    Exhibit(
        "14",
        "Figure 14: one layer, and TileLink",
        "One layer is shorter by 20% at 1K tokens, where TileLink makes it longer.",
        f"{EAGER}; TileLink is cited, ours are layers with 2 or 4 ranks; the predicted line is of the "
        "paper's ranks and multicast.",
        "tokens",
        "share of the layer that is saved",
        layers.one_layer,
        Needs(2, 5),
        layers.layer_requests,
    ),
    Exhibit(
        "15",
        "Figure 15: NanoFlow",
        "NanoFlow gains 5 to 8% on the same machine.",
        "It is cited only.",
        "least and most",
        "speed-up",
        layers.nanoflow,
        x_log=False,
    ),
)
