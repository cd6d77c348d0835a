"""Which halves of FFNs one tuning times, and how long that takes. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm

from tw_compile.benchmark.layer.ffn_spec import swept_sizes
from tw_compile.harness.requests import UsageError
from tw_compile.planning.device import DeviceProfile
from tw_compile.planning.ffn import merged, plan_ffn, row_multiple
from tw_compile.planning.layer import LayerShape
from tw_compile.planning.plan import ROW_MULTIPLE

TOKENS = (1024, 2048, 4096, 8192)
SHARDS = (4, 8)
MOST_TOKENS = 65536
CONTENDERS = 2
"""This many of the fastest halves of the sweep are timed a second time."""

# Estimates of what a tuning takes beside its timed runs: to start a process and compile the activation; to capture graphs.
_START_SECONDS = 20.0
_TRIAL_SECONDS = 0.5
_WARM_UP_ROUNDS = 3


@dataclass(frozen=True)
class HalvesTrial:
    """Halves of the FFN ``[tokens, hidden_size]`` of one of ``shards`` ranks, as ``planning/measured_halves.py`` has it.

    Attributes:
        modelled: Tokens of half 1 by the model.
        firsts: Tokens of half 1 to time, ascending; ``modelled`` is one of them.
        predicted_us: Microseconds that the model predicts for ``modelled``.
    """

    model: str
    shards: int
    hidden_size: int
    intermediate_size: int
    tokens: int
    modelled: int
    firsts: tuple[int, ...]
    predicted_us: float

    def __str__(self) -> str:
        return f"{self.model}, TP{self.shards}, {self.tokens} tokens"


@dataclass(frozen=True)
class HalvesSpec:
    """One tuning on one GPU; plain values, so that it can be handed to another process.

    ``repeats`` and ``calls`` are as in ``FfnSpec``: what a GPU does under its power limit depends on what ran before, so these
    FFNs run one behind the other as those of the benchmark do.
    """

    trials: tuple[HalvesTrial, ...]
    repeats: int = 20
    calls: int = 4
    timeout: float = 600.0
    world_size: int = 1
    device: str = "cuda"
    dtype: str = "bfloat16"


def check_tokens(tokens: Sequence[int], shards: Sequence[int]) -> None:
    """Raise UsageError where ``tokens`` has a number that makes no two halves for all of ``shards``."""
    least = max(2 * lcm(ROW_MULTIPLE, ranks) for ranks in shards)
    for count in tokens:
        if not least <= count <= MOST_TOKENS:
            raise UsageError(f"--tokens: expected {least} to {MOST_TOKENS} tokens, got {count}")


def trials_of(profile: DeviceProfile, model: str, layer: LayerShape, tokens: Sequence[int]) -> Iterator[HalvesTrial]:
    """One trial for each number of tokens.

    ``profile``: the model's halves are those for this profile, whatever it has measured.

    Raises:
        UsageError: The layer has experts. How many rows each of them gets decides its time, and no random input says that.
    """
    if not layer.has_dense_mlp:
        raise UsageError(f"--halves: expected models without experts, whose FFN is two GEMMs, got {model!r}")
    layer = merged(layer)
    for count in tokens:
        plan = plan_ffn(profile, layer, count)
        intermediate = layer.mlp[-1].depth
        yield HalvesTrial(
            model,
            layer.world_size,
            layer.hidden_size,
            intermediate,
            count,
            plan.modelled,
            firsts_of(count, plan.modelled, row_multiple(layer)),
            plan.us[plan.modelled],
        )


def firsts_of(tokens: int, modelled: int, multiple: int) -> tuple[int, ...]:
    """Tokens of half 1 to time: the sweep of ``bench ffn``, in whole multiples, and the model's halves in both orders.

    The order counts, although a sum of single GEMMs is the same.
    """
    sizes = {size // multiple * multiple for size in (*swept_sizes(tokens), tokens - modelled)}
    return tuple(sorted({size for size in sizes if 0 < size < tokens} | {modelled}))


def seconds(spec: HalvesSpec) -> float:
    """A rough estimate. Of each trial, all halves are timed, and then a few again."""
    runs = [(len(trial.firsts) + CONTENDERS + 2, trial.predicted_us * spec.calls) for trial in spec.trials]
    timed = sum(ways * us for ways, us in runs) * 1e-6 * (_WARM_UP_ROUNDS + spec.repeats)
    return _START_SECONDS + _TRIAL_SECONDS * len(runs) + timed
