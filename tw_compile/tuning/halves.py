"""Times FFNs in halves on one GPU, by the benchmark of an FFN, and chooses the halves of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from tw_compile.benchmark.layer.ffn import Ffn, times_of
from tw_compile.harness.launch import Progress
from tw_compile.harness.ranks import Keep, Ranks, work_as_rank
from tw_compile.harness.start import launch
from tw_compile.tuning.halves_choice import choose
from tw_compile.tuning.halves_spec import HalvesSpec


def measure(spec: HalvesSpec, ranks: Ranks, progress: Progress, keep: Keep) -> dict[str, Any]:
    """Choose the halves of every trial. What is done is kept after each of them."""
    device, dtype = ranks.ctx.device, getattr(torch, spec.dtype)
    shape: tuple[int, int] | None = None
    rows: list[dict[str, Any]] = []
    for trial in spec.trials:
        progress(str(trial))
        if shape != (trial.hidden_size, trial.intermediate_size):
            shape = trial.hidden_size, trial.intermediate_size
            most = max(other.tokens for other in spec.trials if (other.hidden_size, other.intermediate_size) == shape)
            ffn = Ffn(*shape, most, device, dtype)

        def time(firsts: Sequence[int], ffn: Ffn = ffn, tokens: int = trial.tokens) -> dict[int, list[float]]:
            return times_of(ffn, tokens, set(firsts), ranks, spec.calls, spec.repeats)

        chosen = choose(trial, time)
        rows.append({**asdict(trial), **asdict(chosen), "dtype": spec.dtype})
        keep({"rows": rows})
    return {"rows": rows}


def rank_process(spec: HalvesSpec, rank: int, scratch: str, messages: Connection) -> None:
    """Entry point of the spawned process."""
    work_as_rank(spec, rank, scratch, messages, partial(measure, spec))


def run(spec: HalvesSpec, progress: Progress) -> dict[str, Any]:
    """Run all trials, and return the report as plain values. ``progress`` is called twice, and once for each trial.

    Raises:
        RankError: The process failed or did not finish in time, before any trial was done.
    """
    return launch(spec, "tune", rank_process, progress)
