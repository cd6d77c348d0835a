"""Layers of the shipped models, read from their files alone, which saves importing transformers and torch."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from types import SimpleNamespace

from tw_compile.planning.layer import LayerShape, layer_shape

_PLAN = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
    "layers.*.mlp.experts": "moe_tp_experts",
}
_MODEL_TYPES = ("llama", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""The model types that transformers shards by ``_PLAN``, and whose shipped files leave no field that counts to transformers'
defaults. A test compares each type with what transformers makes of it."""


def preset_layer(name: str, world_size: int) -> tuple[LayerShape, int] | None:
    """The layer of a shipped model on one of ``world_size`` ranks, and the number of layers.

    None where ``name`` is no shipped model, and where only transformers knows how it is sharded. Raises ValueError as
    :func:`~tw_compile.planning.layer.layer_shape` does.
    """
    config = _config(name)
    if config is None or config.model_type not in _MODEL_TYPES:
        return None
    return layer_shape(config, _PLAN, world_size), config.num_hidden_layers


@cache
def _config(name: str) -> SimpleNamespace | None:
    files = (resources.files("tw_compile.configs") / "models").iterdir()
    file = next((file for file in files if file.name == f"{name}.json"), None)
    return None if file is None else SimpleNamespace(**json.loads(file.read_text()))
