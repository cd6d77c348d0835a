"""An FFN on one GPU: whole, in equal halves, in halves as planned, and in a sweep of other halves.

Shows what splitting the tokens costs the GEMMs where their waves are not full. The halves run one after the other on all SMs.
There is no communication. gate and up are one GEMM, as in inference engines, and ``silu(gate) * up`` is compiled. The planned
halves are those that ``tw-compile tune --halves`` put into the device's profile, else the model's. The sweep is always timed.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.nn.functional as F

from tw_compile.benchmark.layer.ffn_spec import EQUAL, PLANNED, SWEPT, TUNED, WHOLE, FfnSpec, swept_sizes
from tw_compile.harness.launch import Progress
from tw_compile.harness.measure import GraphTimer, LoopTimer, Timer, interleaved
from tw_compile.harness.ranks import Keep, Ranks, work_as_rank
from tw_compile.harness.rows import csv_of
from tw_compile.harness.start import launch
from tw_compile.models.config import load_config, tensor_parallel_plan
from tw_compile.planning import layer_shape, load_profile, profile_of_device
from tw_compile.planning.ffn import FfnPlan, plan_ffn

OTHERWISE = "H100"
"""The profile to plan with on a device that has no profile."""


def ways(tokens: int, plan: FfnPlan) -> dict[str, int]:
    """Tokens of the first half for every way to split, by label; 0: nothing is split."""
    swept = {f"{SWEPT}{first}": first for first in swept_sizes(tokens)}
    return {WHOLE: 0, EQUAL: tokens // 2, TUNED if plan.measured else PLANNED: plan.first, **swept}


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``[tokens, 2 x columns]`` -> ``[tokens, columns]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class Ffn:
    """The FFN of one rank; weights ``[hidden, 2 x columns]`` and ``[columns, hidden]``."""

    def __init__(self, hidden: int, columns: int, most_tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, generator=generator, device=device) * 0.02).to(dtype)

        self.gate_up, self.down = normal(hidden, 2 * columns), normal(columns, hidden)
        self.x = torch.randn(most_tokens, hidden, generator=generator, device=device).to(dtype)
        self.activation = torch.compile(silu_and_mul, dynamic=True) if device.type == "cuda" else silu_and_mul

    def __call__(self, tokens: int, first: int, out: torch.Tensor) -> None:
        """Write the result of the first ``tokens`` rows of the input to ``out`` ``[tokens, hidden]``."""
        for begin, end in ((0, first), (first, tokens)):
            if begin < end:
                middle = self.activation(self.x[begin:end] @ self.gate_up)
                torch.mm(middle, self.down, out=out[begin:end])


def bench(spec: FfnSpec, ranks: Ranks, progress: Progress, keep: Keep) -> dict[str, Any]:
    """Time every number of tokens. The rows are kept after each number of tokens."""
    device = ranks.ctx.device
    config = load_config(spec.model)
    layer = layer_shape(config, tensor_parallel_plan(config), spec.shards, merged=True)
    ffn = Ffn(layer.hidden_size, layer.mlp[-1].depth, max(spec.tokens), device, getattr(torch, spec.dtype))
    profile = profile_of_device(torch.cuda.get_device_name()) if device.type == "cuda" else None
    profile = profile or load_profile(OTHERWISE)
    rows: list[dict[str, Any]] = []
    for tokens in spec.tokens:
        progress(f"{tokens} tokens")
        firsts = ways(tokens, plan_ffn(profile, layer, tokens, dtype=spec.dtype))
        times = times_of(ffn, tokens, set(firsts.values()), ranks, spec.calls, spec.repeats)
        rows += [
            {"label": label, "tokens": tokens, "first": first, "p50_us": statistics.median(times[first])}
            for label, first in firsts.items()
        ]
        keep({"rows": rows, "planned_for": profile.name})
    return {"rows": rows, "planned_for": profile.name}


def times_of(
    ffn: Ffn, tokens: int, firsts: Collection[int], ranks: Ranks, calls: int, repeats: int
) -> dict[int, list[float]]:
    """Microseconds of each turn, by tokens of the first half. Each split is timed once, even if it has several labels.

    ``calls``: FFNs in one CUDA graph, which is a turn; ``repeats``: turns of each split.
    """
    out = torch.empty_like(ffn.x[:tokens])
    timers: dict[str, Timer] = {}
    make = GraphTimer if ffn.x.is_cuda else LoopTimer
    for first in sorted(firsts):
        call = partial(ffn, tokens, first, out)
        call()  # what is compiled at first use must be there before the capture
        timers[str(first)] = make([call], calls)
    return {int(first): found for first, found in interleaved(ranks, timers, repeats).items()}


def rank_process(spec: FfnSpec, rank: int, scratch: str, messages: Connection) -> None:
    """Entry point of the spawned process."""
    work_as_rank(spec, rank, scratch, messages, partial(bench, spec))


def run(spec: FfnSpec, progress: Progress) -> dict[str, Any]:
    """Run the whole benchmark, and return the report as plain values.

    Raises:
        RankError: The process failed or did not finish in time, before any number of tokens was done.
    """
    return launch(spec, "bench ffn", rank_process, progress)


def as_csv(report: dict[str, Any]) -> str:
    """CSV with one line for each way and number of tokens; ``world_size`` is the number of shards."""
    rows: Sequence[dict[str, Any]] = [row | {"world_size": report["shards"]} for row in report["rows"]]
    return csv_of(report, ("command", "machine", "device", "device_name", "model", "repeats", "planned_for"), rows)
