"""Tensor-parallel sharding of a transformers model by its own plan; the only module that uses private transformers APIs.

transformers keeps every sharded parameter as a DTensor and wraps ``forward`` of the sharded modules. Here the DTensor
is dropped again right after it has told which slice this rank owns, so a compiled graph sees plain tensors. The wrapped
forwards take a local path for plain tensors under ``no_grad``; the few styles that insist on DTensors, or that do
something for gradients only, are replaced by the local equivalents below.

``ALL_PARALLEL_STYLES`` and its ``shard_param`` / ``install_forward`` protocol are the same in transformers 5.17,
5.23 and 5.24; the function that applies a plan (``apply_tensor_parallelism``) is not, so its loop is written out here.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from safetensors import SafetensorError, safe_open
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoModel, PretrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from tw_compile.models.config import plan_of_layers

# Styles whose forward is the identity at inference; they only reduce gradients.
_GRADIENT_ONLY = {"replicated_with_grad_allreduce", "mla_kv_a_proj", "replicate", "local_params"}
# Styles that sum the module's partial output over the ranks.
_SUM_OUTPUT = {"moe_tp_experts", "all_reduce"}

# The number of heads of an evenly sharded projection. A head split over two ranks would give wrong results without an error.
_HEAD_FIELDS = {
    "q_proj": "num_attention_heads",
    "k_proj": "num_key_value_heads",
    "v_proj": "num_key_value_heads",
    "qkv_proj": "num_key_value_heads",
    "query_key_value": "num_attention_heads",
}


def shard_model(model: PreTrainedModel, group: dist.ProcessGroup, device_type: str) -> set[str]:
    """Shard ``model`` (on the meta device) over ``group`` and make its forward issue the collectives.

    Returns the names of the parameters that differ between ranks. Raises ValueError when the model's layers have no plan or
    a dimension does not divide by the group size.
    """
    world_size = group.size()
    if world_size == 1:
        return set()
    plan = _plan(model)
    _check_heads(model.config, plan, world_size)
    mesh = DeviceMesh.from_group(group, device_type)
    sharded: set[str] = set()
    for module_name, module in model.named_modules():
        for name in [name for name, _ in module.named_parameters(recurse=False)]:
            full_name = f"{module_name}.{name}" if module_name else name
            style = plan.get(_wildcard(full_name)) or plan.get(_wildcard(module_name))
            if style is not None and _shard_parameter(module, name, full_name, style, mesh):
                sharded.add(full_name)
        style = plan.get(_wildcard(module_name))
        if style is not None:
            _install_forward(module, style, mesh)
    return sharded


def load_shards(
    checkpoint: Path, model: PreTrainedModel, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """This rank's parameters and buffers of a checkpoint directory, loaded by transformers and sharded as ``model`` is.

    transformers gets the plan that :func:`shard_model` follows, since its own plan may leave out the layers. Over several
    ranks it wants the package ``accelerate`` installed, and on CUDA it picks the device by the environment variable
    ``LOCAL_RANK``, as torchrun sets it.

    Raises:
        ValueError: A file can't be read, a weight of the model is not in the checkpoint, or a module of the model would leave
            out a weight that is. transformers only logs the latter two: it draws the one at random and drops the other.
    """
    options: dict[str, Any] = {"config": model.config, "dtype": dtype, "local_files_only": True}
    world_size = dist.get_world_size()
    if world_size > 1:
        options["distributed_config"] = DistributedConfig(tp_size=world_size, tp_plan=_plan(model))
    prefix = _prefix(model, _names_in(checkpoint))
    if prefix is not None:
        options["key_mapping"] = {f"^{re.escape(prefix)}": ""}
    loaded, info = AutoModel.from_pretrained(checkpoint, output_loading_info=True, **options)
    _check_complete(checkpoint, loaded, info["missing_keys"], info["unexpected_keys"])
    tensors = {**dict(loaded.named_parameters()), **dict(loaded.named_buffers())}
    return {name: (t.to_local() if isinstance(t, DTensor) else t).to(device) for name, t in tensors.items()}


def _names_in(checkpoint: Path) -> set[str]:
    """The names of the weights in the safetensors files that transformers would read; empty where it would read others.

    Raises:
        ValueError: A file is not there, or is not whole.
    """
    file, names = checkpoint / SAFE_WEIGHTS_NAME, set()
    try:
        files = [file]
        if not file.is_file():
            file = checkpoint / SAFE_WEIGHTS_INDEX_NAME
            if not file.is_file():
                return set()
            files = [checkpoint / name for name in sorted(set(json.loads(file.read_text())["weight_map"].values()))]
        for file in files:
            with safe_open(file, framework="pt") as weights:
                names.update(weights.keys())
    except (OSError, SafetensorError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"checkpoint {str(checkpoint)!r}: {file.name} can't be read ({error})") from error
    return names


def _prefix(model: PreTrainedModel, names: set[str]) -> str | None:
    """What stands before the names of ``model`` in a multi-modal checkpoint, of which ``model`` is the text part.

    It is ``model.language_model.`` or ``language_model.model.``, for example. An encoder of pictures may have some of these
    names too, so the prefix is the one with which most names are found. None where two are as good, and for a checkpoint of
    the text model itself, whose prefix transformers knows.
    """
    own = model.state_dict().keys()
    ends = ((name[: at.end()], name[at.end() :]) for name in names for at in re.finditer(r"^|\.", name))
    found = Counter(prefix for prefix, end in ends if end in own).most_common(2)
    if not found or (len(found) == 2 and found[0][1] == found[1][1]):
        return None
    prefix = found[0][0]
    return None if prefix in ("", f"{model.base_model_prefix}.") else prefix


def _check_complete(checkpoint: Path, model: PreTrainedModel, missing: set[str], unexpected: set[str]) -> None:
    """Refuse a model whose numbers would be wrong.

    A weight that would be left out is a bias that the configuration denies, or a scale of weights in few bits. What belongs
    to no module of the model doesn't matter: layers that were cut off, the head, an encoder of pictures.
    """
    own, name = list(model.state_dict()), type(model).__name__
    lacking = [weight for weight in own if weight in missing]
    if lacking:
        raise ValueError(
            f"checkpoint {str(checkpoint)!r}: it lacks {len(lacking)} of the {len(own)} weights of {name}, "
            f"the first of them is {lacking[0]!r}"
        )
    modules = {weight.rpartition(".")[0] for weight in own}
    inner = (weight.removeprefix(f"{model.base_model_prefix}.") for weight in unexpected)
    left = sorted(weight for weight in inner if weight.rpartition(".")[0] in modules)
    if left:
        raise ValueError(
            f"checkpoint {str(checkpoint)!r}: {name} would leave out weights of its modules ({len(left)}, "
            f"the first of them is {left[0]!r})"
        )


def _plan(model: PreTrainedModel) -> dict[str, str]:
    return plan_of_layers(model.config.model_type, model.tp_plan)


def _wildcard(name: str) -> str:
    """``layers.3.mlp`` -> ``layers.*.mlp``, the form of the keys of a plan."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _check_heads(config: PretrainedConfig, plan: dict[str, str], world_size: int) -> None:
    for key, style in plan.items():
        field = _HEAD_FIELDS.get(key.rsplit(".", 1)[-1])
        heads = getattr(config, field, None) if field else None
        if style == "colwise" and isinstance(heads, int) and heads % world_size:
            raise ValueError(f"config.{field}: expected a multiple of the world size {world_size}, got {heads}")


def _shard_parameter(module: nn.Module, name: str, full_name: str, style: str, mesh: DeviceMesh) -> bool:
    """Replace one (meta) parameter by this rank's slice; True when the slice is smaller than the parameter."""
    shape = module._parameters[name].shape  # type: ignore[union-attr]
    ALL_PARALLEL_STYLES[style].shard_param(module, name, mesh)
    parameter = module._parameters[name]
    if not isinstance(parameter, DTensor):
        return False
    local = parameter.to_local()
    for full, part in zip(shape, local.shape, strict=True):
        if part not in (full, full / mesh.size()):
            raise ValueError(
                f"config: {full_name} of shape {tuple(shape)} does not divide evenly over the world size {mesh.size()}"
            )
    module._parameters[name] = nn.Parameter(local.detach(), requires_grad=False)
    return local.shape != shape


def _install_forward(module: nn.Module, style: str, mesh: DeviceMesh) -> None:
    if style in _GRADIENT_ONLY:
        return
    if style in _SUM_OUTPUT:
        module.forward = _sum_over_ranks(module.forward, mesh)
    elif isinstance(module, nn.Embedding):
        if style not in ("embedding_rowwise", "rowwise"):
            raise NotImplementedError(f"tensor-parallel style {style!r} of an embedding")
        module.padding_idx = None  # matters to gradients only, and may lie outside of this rank's rows
        module.forward = _sum_over_ranks(_vocab_parallel(module, mesh), mesh)  # type: ignore[method-assign]
    else:
        ALL_PARALLEL_STYLES[style].install_forward(module, mesh)


def _sum_over_ranks(forward: Callable[..., torch.Tensor], mesh: DeviceMesh) -> Callable[..., torch.Tensor]:
    def all_reduced(*args: Any, **kwargs: Any) -> torch.Tensor:
        output = forward(*args, **kwargs)
        dist.all_reduce(output, group=mesh.get_group())
        return output

    return all_reduced


def _vocab_parallel(module: nn.Embedding, mesh: DeviceMesh) -> Callable[[torch.Tensor], torch.Tensor]:
    """Look up the rows that this rank owns; other ids give zeros, so that the sum over ranks is the full lookup."""
    rows = module.weight.shape[0]
    first = rows * mesh.get_local_rank()
    lookup = module.forward

    def forward(input_ids: torch.Tensor) -> torch.Tensor:
        foreign = (input_ids < first) | (input_ids >= first + rows)
        local_ids = (input_ids - first).masked_fill(foreign, 0)
        return lookup(local_ids).masked_fill(foreign.unsqueeze(-1), 0.0)

    return forward
