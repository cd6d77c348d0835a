"""The model of a run or a benchmark, sharded over the default process group."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from transformers import PretrainedConfig

from tw_compile.harness.requests import UsageError
from tw_compile.models.config import load_config, truncate_layers
from tw_compile.models.decoder import Decoder, build_decoder


class ModelSpec(Protocol):
    """What building a model needs to know; see :class:`tw_compile.runner.spec.RunSpec`."""

    @property
    def model(self) -> str: ...

    @property
    def world_size(self) -> int: ...

    @property
    def dtype(self) -> str: ...

    @property
    def layers(self) -> int | None: ...


def model_config(model: str, layers: int | None) -> PretrainedConfig:
    """The configuration of ``model``, cut to ``layers`` layers; None keeps all layers.

    Raises:
        UsageError: There is no such model, or it has fewer layers.
    """
    try:
        config = load_config(model)
    except ValueError as error:
        raise UsageError(f"--model {model}: {error}") from error
    if layers is None:
        return config
    depth = config.num_hidden_layers
    if layers > depth:
        raise UsageError(f"--layers: expected at most {depth}, the layers of {model}, got {layers}")
    return truncate_layers(config, layers)


def build_model(
    spec: ModelSpec, device: torch.device | str, *, seed: int = 0, checkpoint: Path | None = None
) -> Decoder:
    """Build the model of ``spec`` on ``device``, with random weights where ``checkpoint`` has none.

    Raises:
        UsageError: The model can't be built as asked.
    """
    try:
        return build_decoder(
            load_config(spec.model),
            device=device,
            dtype=getattr(torch, spec.dtype),
            num_layers=spec.layers,
            seed=seed,
            checkpoint=checkpoint,
        )
    except ValueError as error:
        raise UsageError(f"--model {spec.model} --tp {spec.world_size}: {error}") from error
