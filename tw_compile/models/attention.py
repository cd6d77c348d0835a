"""Causal attention without a materialised mask.

transformers skips the ``[seq, seq]`` mask of a plain causal prefill when it runs eagerly, but not while torch < 2.14
compiles; SDPA then misses its flash kernels. The implementation registered here always skips it.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.auto.modeling_auto import MODEL_MAPPING

CAUSAL_SDPA = "tw_compile_causal_sdpa"


def attention_implementation(config: PretrainedConfig) -> str:
    """The value of ``attn_implementation`` for a model: SDPA when the family supports it, else eager.

    SDPA can't cap scores softly, and transformers before 5.21 leaves the cap out of SDPA without a warning.
    """
    model_class: Any = MODEL_MAPPING[type(config)]
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    return CAUSAL_SDPA if model_class._supports_sdpa and not capped else "eager"


def _causal_mask(
    *,
    q_length: int,
    kv_length: int,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> torch.Tensor | None:
    """``sdpa_mask`` of transformers, but None where ``is_causal=True`` of SDPA says the same.

    That is where each token sees all tokens before it: no padding, a window (``local_size``) wider than the prompt and
    no custom mask function (``use_vmap``). transformers also asks for a mask in case ``position_ids`` pack several
    sequences, which cannot be when they are not given to the model.
    """
    is_full = local_size is None or kv_length < local_size
    if attention_mask is None and q_length == kv_length and is_full and not use_vmap:
        return None
    return sdpa_mask(
        q_length=q_length,
        kv_length=kv_length,
        attention_mask=attention_mask,
        local_size=local_size,
        use_vmap=use_vmap,
        **kwargs,
    )


AttentionInterface.register(CAUSAL_SDPA, sdpa_attention_forward)
AttentionMaskInterface.register(CAUSAL_SDPA, _causal_mask)
