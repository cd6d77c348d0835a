"""What one benchmark of an FFN in halves is asked to do. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

WHOLE, EQUAL, PLANNED = "whole", "equal halves", "planned halves"
TUNED = f"{PLANNED}, measured by tune"
"""Planned halves that are in the device's profile, because ``tw-compile tune --halves`` measured them."""
SWEPT = "half@"
STEP, STEPS_EACH_WAY = 128, 3


@dataclass(frozen=True)
class FfnSpec:
    """One benchmark on one GPU; plain values, so that it can be handed to another process.

    Attributes:
        model: A preset, a ``config.json`` or a folder that holds one; the weights are random.
        shards: Ranks among which the weights are divided. The GPU has the share of one rank, and nothing is summed.
        tokens: Numbers of tokens to time. The FFN's input is ``[tokens, hidden]``.
        repeats: Timed runs of each way.
        calls: FFNs in one CUDA graph, and so in one timed run.
        world_size: Processes; always 1.
        timeout: Seconds after which the benchmark has failed.
    """

    model: str
    shards: int
    tokens: tuple[int, ...]
    repeats: int = 30
    calls: int = 4
    seed: int = 0
    timeout: float = 600.0
    world_size: int = 1
    device: str = "cuda"
    dtype: str = "bfloat16"


def swept_sizes(tokens: int) -> tuple[int, ...]:
    """Tokens of the first half: the middle, and up to three steps of 128 to each side of it."""
    sizes = (tokens // 2 + offset * STEP for offset in range(-STEPS_EACH_WAY, STEPS_EACH_WAY + 1))
    return tuple(size for size in sizes if 0 < size < tokens)
