"""Model configurations: shipped presets, ``config.json`` files and checkpoint directories."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# Plans that transformers lacks. gpt_oss: attention only, experts replicated (its experts' output bias is not shardable).
ADDED_PLANS = {
    "gpt_oss": {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.sinks": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
    }
}


def preset_names() -> list[str]:
    """Names of the configurations shipped in ``configs/models``."""
    folder = resources.files("tw_compile.configs") / "models"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def load_config(source: str) -> PretrainedConfig:
    """Read a model configuration; nothing is downloaded.

    ``source`` is the name of a preset, the path of a ``config.json`` or a directory that holds one.
    """
    if source in preset_names():
        text = (resources.files("tw_compile.configs") / "models" / f"{source}.json").read_text()
    else:
        path = Path(source)
        if path.is_dir():
            path = path / "config.json"
        if not path.is_file():
            raise ValueError(
                f"source: expected a preset ({', '.join(preset_names())}), a config.json or a checkpoint directory, "
                f"got {source!r}"
            )
        text = path.read_text()
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"source: expected JSON in {source!r}, got {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"source: expected a JSON object in {source!r}, got {type(values).__name__}")
    return config_from_dict(values)


def config_from_dict(values: dict[str, Any]) -> PretrainedConfig:
    """The configuration of a decoder; for a multi-modal model, that of its text part."""
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise ValueError(f"model_type: expected a model type that transformers knows, got {model_type!r}")
    _check_sizes(values.get)  # before transformers divides by one of them
    try:
        found = CONFIG_MAPPING[model_type].from_dict(values).get_text_config(decoder=True)
    except Exception as error:  # of many kinds: what a configuration checks is its own
        raise ValueError(f"{model_type} config: {' '.join(str(error).split())}") from error
    _check_sizes(partial(getattr, found))
    return found


def _check_sizes(get: Callable[[str, int], Any]) -> None:
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        size = get(name, 1)
        if isinstance(size, int) and size < 1:
            raise ValueError(f"{name}: expected a positive number, got {size}")


def tensor_parallel_plan(config: PretrainedConfig) -> dict[str, str]:
    """Parameter names to styles, as the decoder is sharded; ValueError where transformers has no plan and neither have we."""
    plan = getattr(config, "base_model_tp_plan", None) or ADDED_PLANS.get(config.model_type)
    if not plan:
        raise ValueError(f"config: {config.model_type!r} has no tensor-parallel plan in transformers")
    return dict(plan)


def truncate_layers(config: PretrainedConfig, num_layers: int) -> PretrainedConfig:
    """A copy of ``config`` with the first ``num_layers`` layers, per-layer lists cut to match."""
    total = config.num_hidden_layers
    if not 1 <= num_layers <= total:
        raise ValueError(f"num_layers: expected 1 to {total}, got {num_layers}")
    truncated = copy.deepcopy(config)
    truncated.num_hidden_layers = num_layers
    for name, value in vars(truncated).items():
        if isinstance(value, list) and len(value) == total:
            setattr(truncated, name, value[:num_layers])
    return truncated
