"""A tensor-parallel decoder without LM head: random or checkpoint weights, real or fake tensors."""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from transformers import AutoModel, PretrainedConfig, PreTrainedModel

from tw_compile.compat import fake_mode_active, real_tensors
from tw_compile.models.attention import attention_implementation
from tw_compile.models.config import check_activation, truncate_layers
from tw_compile.models.sharding import load_shards, shard_model

_FINAL_NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f")
_MATRIX_STD = 0.02
_VECTOR_STD = 0.05


class Decoder(nn.Module):
    """The layers and the final norm of a transformers decoder.

    The final norm is taken out of the model, which then returns the norm's input: the residual stream.
    """

    def __init__(self, model: PreTrainedModel, sharded: set[str]) -> None:
        super().__init__()
        name = _final_norm_name(model)
        self.norm = getattr(model, name)
        setattr(model, name, nn.Identity())
        self.model = model
        self.norm_name = name
        self.sharded = sharded

    @property
    def config(self) -> PretrainedConfig:
        return self.model.config

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[batch, seq]`` token ids -> last hidden state after the final norm and the residual stream before it."""
        residual = self.model(input_ids=input_ids, use_cache=False).last_hidden_state
        return self.norm(residual), residual


def build_decoder(
    config: PretrainedConfig,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    num_layers: int | None = None,
    seed: int = 0,
    checkpoint: Path | None = None,
) -> Decoder:
    """Build a decoder sharded over the default process group by the tensor-parallel plan of transformers.

    All parameters are plain tensors. Without ``checkpoint`` the weights are random: equal on all ranks where they are
    replicated, different where they are sharded. Under a FakeTensorMode nothing is initialised and ``device`` need not
    exist. Raises ValueError for a configuration that cannot be built or sharded.
    """
    if not dist.is_initialized():
        raise ValueError("build_decoder needs a default process group; call torch.distributed.init_process_group first")
    check_activation(config)
    if num_layers is not None:
        config = truncate_layers(config, num_layers)
    device = torch.device(device)
    with real_tensors():
        model, sharded = meta_model(config, dtype, device.type)
    if checkpoint is not None:
        assign_tensors(model, load_shards(checkpoint, model, dtype, device))
    else:
        with torch.no_grad():
            _materialise(model, device, seed)
            if not fake_mode_active():
                _randomise(model, sharded, seed)
    return Decoder(model, sharded).eval().requires_grad_(False)


def meta_model(
    config: PretrainedConfig, dtype: torch.dtype, device_type: str, experts: str | None = None
) -> tuple[PreTrainedModel, set[str]]:
    """The sharded model on the meta device and the names of the parameters that differ between ranks.

    ``experts`` is the ``experts_implementation`` of transformers; None means grouped GEMMs, which have no
    data-dependent shapes and compile without graph breaks.
    """
    config = copy.deepcopy(config)
    config.use_cache = False
    with torch.device("meta"):
        model = AutoModel.from_config(
            config,
            dtype=dtype,
            attn_implementation=attention_implementation(config),
            experts_implementation=experts,
        )
    group = dist.group.WORLD
    assert group is not None
    return model, shard_model(model, group, device_type)


def assign_tensors(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Replace every parameter and buffer of ``model`` by the tensor of the same name."""
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        for name, old in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            new = tensors[prefix + name]
            if new.shape != old.shape:
                raise ValueError(f"{prefix + name}: expected shape {tuple(old.shape)}, got {tuple(new.shape)}")
            if name in module._parameters:
                module._parameters[name] = nn.Parameter(new, requires_grad=False)
            else:
                module._buffers[name] = new


def _materialise(model: PreTrainedModel, device: torch.device, seed: int) -> None:
    """Allocate every parameter and buffer on ``device``; let transformers fill the buffers and the vectors.

    The vectors are norm weights and biases, whose neutral value (0 or 1) depends on the family. Some families draw them
    at random, so all ranks use the same seed.
    """
    for module in model.modules():
        module._is_hf_initialized = False  # type: ignore[assignment]
        for name, parameter in module.named_parameters(recurse=False):
            empty = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False)
            empty._is_hf_initialized = parameter.ndim > 1  # type: ignore[attr-defined]
            module._parameters[name] = empty
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device=device)
    seeded_devices = [device] if device.type == "cuda" and not fake_mode_active() else []
    with torch.random.fork_rng(seeded_devices), device:
        torch.manual_seed(seed)
        model.initialize_weights()


def _randomise(model: PreTrainedModel, sharded: set[str], seed: int) -> None:
    for name, parameter in model.named_parameters():
        key = f"{seed}:{name}:{dist.get_rank()}" if name in sharded else f"{seed}:{name}"
        generator = torch.Generator(parameter.device)
        generator.manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "little"))
        if parameter.ndim > 1:
            parameter.normal_(0.0, _MATRIX_STD, generator=generator)
        else:
            noise = torch.empty_like(parameter).normal_(0.0, _VECTOR_STD, generator=generator)
            parameter.add_(noise)


def _final_norm_name(model: PreTrainedModel) -> str:
    for name in _FINAL_NORM_NAMES:
        if isinstance(getattr(model, name, None), nn.Module):
            return name
    raise ValueError(
        f"config: {type(model).__name__} has no final norm named {', '.join(_FINAL_NORM_NAMES)}; "
        f"its children are {', '.join(name for name, _ in model.named_children())}"
    )
