"""What one benchmark of layers, or of a model, is asked to do. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NoReturn

from tw_compile.harness.requests import UsageError

Scope = Literal["layer", "gemm-site", "model"]

WITHOUT_SITES = frozenset(
    (
        "apertus",
        "arcee",
        "cohere",
        "cohere2",
        "deepseek_v2",
        "deepseek_v3",
        "dots1",
        "ernie4_5_moe",
        "exaone4",
        "flex_olmo",
        "gemma2",
        "gemma3_text",
        "glm",
        "glm4",
        "glm4_moe",
        "gpt_neox",
        "gpt_oss",
        "llama4_text",
        "minimax",
        "minimax_m2",
        "mixtral",
        "nanochat",
        "nemotron",
        "olmo2",
        "olmo3",
        "olmoe",
        "phi",
        "phi3",
        "qwen2_moe",
        "qwen3_moe",
        "starcoder2",
        "vaultgemma",
    )
)
"""Model types whose layers are no sites of ``bench gemm-site``. Of others, only the layers themselves know."""


def refuse_sites(model_type: str) -> NoReturn:
    """Say that layers of ``model_type`` are no sites.

    Raises:
        UsageError: Always; its message names ``--model``.
    """
    raise UsageError(
        f"--model: expected layers with gate_proj, up_proj and down_proj behind one norm, got {model_type}"
    )


@dataclass(frozen=True)
class LayerSpec:
    """One benchmark; plain values, so that it can be handed to another process.

    Attributes:
        scope: What is timed, see :mod:`tw_compile.benchmark.layer.subject`.
        model: A preset, a ``config.json`` or a folder that holds one; the weights are random.
        device: ``cuda`` (NCCL) or ``cpu`` (gloo, a smoke test).
        tokens: Token counts to time. Each is the total of one prefill over all its sequences, and a multiple of ``batch``.
        batch: Sequences of equal length.
        layers: How many of the model's layers take part; for ``gemm-site``, how many MLPs.
        repeats: Timed runs of each variant.
        sweep_split: Whether to time the fused variant split at other places than the planned one, too.
        only: Labels of the variants that take part; empty means all.
        wires: ``fused`` and ``fused+split`` also run with each of these wires. With exact rows they run always.
        prefetch: ``fused`` and ``fused+split`` also run with each of these values of option ``prefetch``.
        kernels: ``fused`` and ``fused+split`` also run with each of these kernels for all of their calls.
        timeout: Seconds after which the benchmark, or one collective of it, has failed.
    """

    scope: Scope
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
    wires: tuple[str, ...] = ()
    prefetch: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    seed: int = 0
    timeout: float = 1800.0
