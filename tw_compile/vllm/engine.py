"""Reads a ``VllmConfig``."""

from __future__ import annotations

from typing import Any

from vllm import envs
from vllm.config import CompilationMode

from tw_compile.vllm.plan import Engine


def engine_of(config: Any) -> Engine:
    """What matters of a ``VllmConfig`` with a model."""
    model, compilation, parallel = config.model_config, config.compilation_config, config.parallel_config
    inductor = compilation.backend in ("", "inductor") and not model.enforce_eager
    return Engine(
        tensor_parallel_size=parallel.tensor_parallel_size,
        hidden_size=model.get_hidden_size(),
        dtype=str(model.dtype).removeprefix("torch."),
        max_tokens=config.scheduler_config.max_num_batched_tokens,
        compiled=inductor and compilation.mode == CompilationMode.VLLM_COMPILE,
        batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
        lora=config.lora_config is not None,
        dual_batch_overlap=parallel.use_ubatching,
        state_space=model.is_hybrid or model.is_attention_free,
    )
