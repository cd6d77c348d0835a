"""The model of a run or a benchmark, sharded over the default process group."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from tw_compile.harness.requests import UsageError
from tw_compile.models import Decoder, build_decoder, load_config


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


def build_model(
    spec: ModelSpec, device: torch.device | str, *, seed: int = 0, checkpoint: Path | None = None
) -> Decoder:
    """With random weights where ``checkpoint`` has none.

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
