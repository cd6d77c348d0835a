"""Checks of whole split decoders in CUDA graphs: what ranks that lag at random do to a thousand steps of them."""

from __future__ import annotations

import random
import time
from typing import Any

import torch

from gpu.checks.stress import count_differences, new_counter
from tw_compile import Config, collect_reports, compat
from tw_compile.harness.problems import BF16, Context, expect_same_on_all_ranks
from tw_compile.kernels.collective.transport import get_transport
from tw_compile.kernels.transports.p2p import P2PTransport
from tw_compile.models.config import config_from_dict
from tw_compile.models.decoder import build_decoder
from tw_compile.models.reference import reference_forward, to_double
from tw_compile.report import GraphReport
from tw_compile.testing.error_budget import budget, relative_error

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 1024,
}
EXPERTS = MODEL | {"model_type": "mixtral", "intermediate_size": 2048, "num_local_experts": 4, "num_experts_per_tok": 4}
"""Every token goes to every expert: else rounding decides for some which ones, and errors say nothing."""
TOKENS, FIRST = 385, 160
STEPS = 1000
_PROMPTS = 4


def thousand_split_steps(ctx: Context, steps: int = STEPS) -> None:
    """Every step has the bits of the first one with the same prompt, which all ranks share and which are right.

    Results become NaN before their memory is used again, so a step that writes too little shows.
    """
    _split_steps(ctx, MODEL, steps)


def thousand_split_steps_of_experts(ctx: Context, steps: int = STEPS) -> None:
    """The same of a model whose halves route their tokens to experts."""
    _split_steps(ctx, EXPERTS, steps)


def _split_steps(ctx: Context, config: dict[str, Any], steps: int) -> None:
    decoder = build_decoder(config_from_dict(config), device=ctx.device, dtype=BF16)
    prompts = [
        torch.randint(config["vocab_size"], (1, TOKENS), generator=ctx.generator(seed), device=ctx.device)
        for seed in range(_PROMPTS)
    ]
    options = Config(strict=True, split=str(FIRST)).as_options() | compat.cuda_graph_options()
    model = torch.compile(decoder, dynamic=False, backend="tw_compile", options=options)

    def step(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.compiler.cudagraph_mark_step_begin()
        return model(prompts[number % _PROMPTS])

    # Reports come from compiling: a graph that comes out of a cache has none.
    with torch.no_grad(), compat.cold_compile(None), collect_reports() as reports:
        firsts = [(hidden.clone(), residual.clone()) for hidden, residual in map(step, range(_PROMPTS))]
        expect_split(ctx, reports)
        double = to_double(decoder)
        for prompt, first in zip(prompts, firsts, strict=True):
            want, base = reference_forward(double, prompt), decoder(prompt)
            for name, got, unfused, exact in zip(("hidden", "residual"), first, base, want, strict=True):
                error, allowed = relative_error(got, exact), budget(unfused, exact)
                ctx.expect(error <= allowed, f"{name} of the first steps: error {error:.3e}, allowed {allowed:.3e}")
                expect_same_on_all_ranks(ctx, f"{name} of the first steps", got)
        skew = random.Random(1 + ctx.rank)
        wrong = new_counter(ctx)
        for number in range(ctx.calls(steps)):
            _lag(skew)
            count_differences(wrong, step(number), firsts[number % _PROMPTS])
        ctx.expect(int(wrong) == 0, f"{int(wrong)} wrong elements")
    ctx.counts["steps"] = ctx.calls(steps)


def expect_split(ctx: Context, reports: list[GraphReport]) -> None:
    """What was compiled is one graph, all of it fused, split where it was asked for, over peer to peer memory on GPUs."""
    ctx.expect(len(reports) == 1, f"expected one graph, got {len(reports)}")
    for report in reports:
        split, counts = report.split, report.counts
        ctx.expect(counts["fused"] == counts["all_reduce"] > 0, f"not all fused: {counts}")
        ctx.expect(split is not None and split.sizes == (FIRST, TOKENS - FIRST), f"split otherwise: {split}")
        for name in {site.transport for site in report.sites if site.transport is not None}:
            transport = get_transport(name)
            if isinstance(transport, P2PTransport):
                obstacle = transport.states[ctx.group_name, ctx.device].obstacle
                ctx.expect(obstacle is None, f"fell back to NCCL: {obstacle}")
            else:
                ctx.expect(ctx.device.type == "cpu", f"served by {name}")


def _lag(skew: random.Random) -> None:
    """This rank's GPU, its host, both, or nothing is late for the next step, by up to a few milliseconds."""
    if skew.random() < 0.4:
        compat.delay_stream(skew.randrange(2_000_000))
    if skew.random() < 0.05:
        # The host runs far ahead otherwise, and how long it takes would not matter.
        torch.cuda.synchronize()
        time.sleep(skew.random() * 3e-3)
