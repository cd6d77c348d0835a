"""Requests of a trace: lengths and random tokens, always the same for a seed. Imports neither torch nor vLLM."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

PROMPT_MEDIAN, PROMPT_SIGMA = 120.0, 1.1
OUTPUT_MEDIAN, OUTPUT_SIGMA = 150.0, 0.8
SHORTEST, LONGEST = 4, 1024
ACCURACY = "accuracy"
"""Kind of the trace that asks for log-probabilities; it is not timed."""
_ACCURACY_PROMPT, _ACCURACY_PROMPTS = 256, 32
_WARM_PROMPT, _WARM_OUTPUT = 128, 16
TURN, STOP = b".", b"!"
"""What a benchmark sends to an engine: run the next trace, or end with the results so far. An engine answers TURN with TURN."""
MIXED = (
    f"prompts log-normal with median {PROMPT_MEDIAN:.0f} and sigma {PROMPT_SIGMA}, outputs with median {OUTPUT_MEDIAN:.0f} "
    f"and sigma {OUTPUT_SIGMA}, both {SHORTEST} to {LONGEST} tokens"
)


@dataclass(frozen=True)
class Trace:
    """Requests that are all there when the clock starts: tokens of each prompt, and how many each generates."""

    kind: str
    prompts: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def label(self) -> str:
        return f"decode-{len(self.prompts)}" if self.kind == "decode" else self.kind

    @property
    def longest(self) -> int:
        return max(map(sum, zip(self.prompts, self.outputs, strict=True)))


def mixed_lengths(requests: int, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lengths of prompts and of outputs like those of chats: ``MIXED``, drawn independently of each other.

    The means are 202 and 205 tokens, about what benchmarks report of ShareGPT. The lengths of ShareGPT itself need its data.
    """
    drawn = random.Random(seed)

    def lengths(median: float, sigma: float) -> tuple[int, ...]:
        values = (drawn.lognormvariate(math.log(median), sigma) for _ in range(requests))
        return tuple(min(max(round(value), SHORTEST), LONGEST) for value in values)

    return lengths(PROMPT_MEDIAN, PROMPT_SIGMA), lengths(OUTPUT_MEDIAN, OUTPUT_SIGMA)


def accuracy_trace(step: int) -> Trace:
    """Prompts that together are one step of ``step`` tokens, because the number of tokens decides how pieces are split."""
    count = min(-(-step // _ACCURACY_PROMPT), _ACCURACY_PROMPTS)
    return Trace(ACCURACY, tuple(step // count + (index < step % count) for index in range(count)), (1,) * count)


def warm_trace(traces: Sequence[Trace], step: int) -> Trace:
    """One request that wakes an engine that runs ``traces``: a prompt within one step of ``step`` tokens, then steps of decode.

    It is no longer than the longest request of ``traces``, because vLLM takes no longer one (``max_model_len``). If that has 3
    tokens or fewer, no step of decode is left.
    """
    longest = max(trace.longest for trace in traces)
    output = min(_WARM_OUTPUT, longest // 2)
    return Trace("warm", (min(_WARM_PROMPT, longest - output, step),), (output,))


def turns(traces: Sequence[Trace], repeats: int) -> list[tuple[int, Trace]]:
    """Rounds and traces in the order of the runs: round 0 warms up, and only round 0 has traces of accuracy."""
    rounds = range(1 + repeats)
    return [(number, trace) for number in rounds for trace in traces if number == 0 or trace.kind != ACCURACY]


def prompt_tokens(trace: Trace, vocabulary: int, seed: int) -> list[list[int]]:
    """The tokens of each prompt, uniform over the vocabulary."""
    drawn = random.Random(f"{trace.label} {seed}")
    return [[drawn.randrange(vocabulary) for _ in range(length)] for length in trace.prompts]
