"""Model configurations: shipped presets, ``config.json`` files and checkpoint directories."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tw_compile.model_file import check_sizes, read_model_file

_ATTENTION = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
}
_MLP = {
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}

# Plans of layers that transformers lacks. gpt_oss: attention only, experts replicated (their output bias is not shardable).
# hunyuan_v1_dense: as Llama, since its norms of queries and keys are of each head.
ADDED_PLANS = {
    "gpt_oss": _ATTENTION | {"layers.*.self_attn.sinks": "colwise"},
    "hunyuan_v1_dense": _ATTENTION | _MLP,
}


def load_config(source: str) -> PretrainedConfig:
    """Read a model configuration; nothing is downloaded.

    ``source`` is the name of a preset, the path of a ``config.json`` or a directory that holds one.

    Raises:
        ValueError: The file is wrong; the message names it, the key, what was expected and what came.
    """
    values, name = read_model_file(source)
    try:
        return config_from_dict(values)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def config_from_dict(values: dict[str, Any]) -> PretrainedConfig:
    """The configuration of a decoder; for a multi-modal model, that of its text part."""
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise ValueError(f"model_type: expected a model type that transformers knows, got {model_type!r}")
    check_sizes(values.get)  # before transformers divides by one of them
    try:
        found = CONFIG_MAPPING[model_type].from_dict(values).get_text_config(decoder=True)
    except Exception as error:  # of many kinds: what a configuration checks is its own
        raise ValueError(f"{model_type} config: {' '.join(str(error).split())}") from error
    check_sizes(partial(getattr, found))
    _check_rope(found)
    return found


def _check_rope(config: PretrainedConfig) -> None:
    """Raise ValueError for an unknown kind of rotary embedding; transformers looks the kind up when it builds the model.

    A model has one kind, or one for each kind of layer.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = all(isinstance(value, dict) for value in parameters.values())
    known = ("default", *ROPE_INIT_FUNCTIONS)
    for key, one in parameters.items() if nested else [("", parameters)]:
        found = one.get("rope_type", "default")
        if found not in known:
            where = f"rope_parameters.{key}.rope_type" if key else "rope_parameters.rope_type"
            raise ValueError(f"{where}: expected one of {', '.join(known)}, got {found!r}")


def check_activation(config: PretrainedConfig) -> None:
    """Raise ValueError for an activation that transformers does not have. Not part of the other checks: it takes seconds."""
    from transformers.activations import ACT2FN

    for name in ("hidden_act", "hidden_activation", "activation_function"):
        found = getattr(config, name, None)
        if found is not None and found not in tuple(ACT2FN):
            raise ValueError(f"{name}: expected one of {', '.join(ACT2FN)}, got {found!r}")


def tensor_parallel_plan(config: PretrainedConfig) -> dict[str, str]:
    """The style by which each parameter is sharded, by name; ValueError if neither transformers nor we have a plan."""
    return plan_of_layers(config.model_type, getattr(config, "base_model_tp_plan", None))


def plan_of_layers(model_type: str, plan: Mapping[str, str] | None) -> dict[str, str]:
    """The plan that transformers has of a model, completed by ours if it shards no layer.

    From 5.24 on transformers shards the word embeddings of families that have no other plan, gpt_oss among them. Such a plan
    alone would leave whole layers on all ranks, without a word.

    Raises:
        ValueError: Neither transformers nor we have a plan of the layers.
    """
    found = dict(plan or {})
    if not _shards_layers(found):
        found |= ADDED_PLANS.get(model_type, {})
    if not _shards_layers(found):
        raise ValueError(f"config: {model_type!r} has no tensor-parallel plan of its layers in transformers")
    return found


def _shards_layers(plan: Mapping[str, str]) -> bool:
    """Whether a plan names parameters of layers. It has ``*`` for the number of a layer, and for nothing else."""
    return any("*" in name for name in plan)


def truncate_layers(config: PretrainedConfig, num_layers: int) -> PretrainedConfig:
    """A copy of ``config`` with the first ``num_layers`` layers, per-layer lists cut to match."""
    total = config.num_hidden_layers
    if not 1 <= num_layers <= total:
        raise ValueError(f"num_layers: expected 1 to {total}, got {num_layers}")
    return keep_layers(config, range(num_layers))


def keep_layers(config: PretrainedConfig, layers: Sequence[int]) -> PretrainedConfig:
    """A copy of ``config`` with the layers of these indices alone, per-layer lists cut to match."""
    total = config.num_hidden_layers
    kept = copy.deepcopy(config)
    kept.num_hidden_layers = len(layers)
    for name, value in vars(kept).items():
        if isinstance(value, list) and len(value) == total:
            setattr(kept, name, [value[index] for index in layers])
    return kept
