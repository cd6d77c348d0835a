"""Reads a ``VllmConfig``."""

from __future__ import annotations

import logging
from typing import Any

from vllm import envs
from vllm.config import CompilationMode
from vllm.platforms import current_platform

from tw_compile.config import Config
from tw_compile.gating.gate import Gate
from tw_compile.hosts.vllm.known import Known, known_before
from tw_compile.hosts.vllm.plan import Engine
from tw_compile.models.config import tensor_parallel_plan
from tw_compile.planning import LayerShape, layer_shape

logger = logging.getLogger("tw_compile")


def engine_of(config: Any) -> Engine:
    """The facts that matter in a ``VllmConfig`` with a model."""
    model, compilation, parallel = config.model_config, config.compilation_config, config.parallel_config
    inductor = compilation.backend in ("", "inductor") and not model.enforce_eager
    graphs = compilation.cudagraph_mode is not None and compilation.cudagraph_mode.name != "NONE"
    return Engine(
        tensor_parallel_size=parallel.tensor_parallel_size,
        hidden_size=model.get_hidden_size(),
        dtype=str(model.dtype).removeprefix("torch."),
        max_tokens=config.scheduler_config.max_num_batched_tokens,
        compiled=inductor and compilation.mode == CompilationMode.VLLM_COMPILE,
        batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
        lora=config.lora_config is not None,
        dual_batch_overlap=parallel.use_ubatching,
        state_space=model.is_hybrid or model.is_attention_free or _linear_attention(model.hf_text_config),
        context_parallel=parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size > 1,
        kv_transfer=config.kv_transfer_config is not None,
        prefix_lm=bool(getattr(model, "is_mm_prefix_lm", False)),
        speculative=config.speculative_config is not None,
        captured_tokens=compilation.max_cudagraph_capture_size or 0 if graphs else 0,
        one_graph=bool(compilation.use_inductor_graph_partition),
        quantised=model.quantization is not None,
        experts=model.get_num_experts() > 0,
        returns_experts=bool(getattr(model, "enable_return_routed_experts", False)),
        times_steps=_alone(parallel),
        pooling=model.runner_type == "pooling",
        captures_attention=graphs and compilation.cudagraph_mode.mixed_mode().name == "FULL",
        captures_prompts=graphs and compilation.cudagraph_mode.mixed_mode().name != "NONE",
    )


def _alone(parallel: Any) -> bool:
    """Whether all ranks are of one tensor-parallel group: with others, they need not all be there to measure something."""
    return bool(parallel.world_size_across_dp == parallel.tensor_parallel_size)


def _linear_attention(text: Any) -> bool:
    """Whether layers are of linear attention. vLLM does not mark all such models as hybrids, as Qwen3.5 without images."""
    return "linear_attention" in (getattr(text, "layer_types", None) or ())


def layer_of(engine: Any) -> LayerShape | None:
    """The shape of the model's layers on one rank; None where the planner can't describe such layers."""
    try:
        model = engine.model_config.hf_text_config
        return layer_shape(model, tensor_parallel_plan(model), engine.parallel_config.tensor_parallel_size, merged=True)
    except ValueError as error:
        logger.debug("no plan for the ranges of a split: %s", error)
        return None


def known_of(config: Config, engine: Any, choices: tuple[Gate, ...]) -> Known:
    """What is known of the engine's node. vLLM finds the device's name without a CUDA context."""
    parallel, name = engine.parallel_config, current_platform.get_device_name() if current_platform.is_cuda() else None
    return known_before(config, name, parallel.world_size_across_dp, choices, measures=_alone(parallel))
