"""Where vLLM's expert layers do more than compute each token's row: something with other ranks' tokens, or for the whole step.

    router scores [tokens, experts] -> the token's own top k (by groups of experts, with a bias) -> weighted sum of its experts

No token is dropped and no expert is full: without data parallelism each expert takes all rows that chose it. So the rows of a
half equal those of the whole step, except for the rounding of GEMMs of another size.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def whole_experts(layers: Iterable[Any]) -> str:
    """Why the experts of these layers must see all tokens of a step at once; empty where no layer must.

    ``layers`` are the layers of a forward context. Layers without experts are ignored. If none has experts, the reason is that
    the layers of experts are not known.
    """
    experts = [layer for layer in layers if hasattr(layer, "moe_config")]
    if not experts:
        return "the layers of experts are not known"
    return next((reason for layer in experts if (reason := _objection(layer))), "")


def _objection(layer: Any) -> str:
    config = layer.moe_config
    for name in ("dp_size", "pcp_size"):
        if getattr(config, name, 1) != 1:
            return f"{name} is {getattr(config, name)}: tokens go to other ranks by the step's counts"
    if getattr(config, "is_sequence_parallel", False):
        return "each rank has a part of the tokens"
    if getattr(config, "is_lora_enabled", False):
        return "adapters' kernels sort the tokens of a whole step by their adapter"
    if getattr(getattr(layer, "router", None), "capture_fn", None) is not None:
        return "the step's choices are recorded by its tokens' numbers"
    return _one_scale(getattr(layer, "routed_experts", layer))


def _one_scale(experts: Any) -> str:
    """Why the quantised activations of a token depend on other tokens; empty where they don't."""
    method = getattr(experts, "quant_method", None)
    if method is None or "Unquantized" in type(method).__name__:
        return ""
    config = getattr(method, "moe_quant_config", None) or method.get_fused_moe_quant_config(experts)
    if config is None:
        return "it is not known how activations are quantised"
    eight_bits = config.quant_dtype in (torch.float8_e4m3fn, torch.int8)
    by_row = config.per_act_token_quant or config.block_shape is not None or config.a1_scale is not None
    return "activations have one dynamic scale of all tokens" if eight_bits and not by_row else ""
