"""What one benchmark of layers is asked to do. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerSpec:
    """One benchmark; plain values, so that it can be handed to another process.

    Attributes:
        model: A preset, a ``config.json`` or a folder that holds one; the weights are random.
        device: ``cuda`` (NCCL) or ``cpu`` (gloo, a smoke test).
        tokens: Of one prefill, over all its sequences; multiples of ``batch``.
        batch: Sequences of equal length.
        layers: In the stack that is timed.
        repeats: Timed runs of each variant.
        sweep_split: Time the fused stack split at other places than the planned one, too.
        only: Labels of the variants that take part; empty means all.
        timeout: Seconds after which the benchmark, or one collective of it, has failed.
    """

    model: str
    world_size: int
    device: str
    dtype: str
    tokens: tuple[int, ...]
    batch: int = 1
    layers: int = 4
    repeats: int = 50
    only: tuple[str, ...] = ()
    sweep_split: bool = False
    seed: int = 0
    timeout: float = 1800.0
