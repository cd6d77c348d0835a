"""Experts: each token goes to the experts that its own scores choose. Its result is the weighted sum of their results.

``moe_forward`` does all of this for a layer, which it finds by its name. :mod:`tw_compile.hosts.vllm.experts` says what else
such a layer does. The other operators are steps of this, which vLLM's models call by themselves.
"""

from __future__ import annotations

from tw_compile.passes.operators import RowWiseOperator

_OF_TOKENS = ("hidden_states", "router_logits", "shared_experts_input", "input_ids")
_CHOICES = ("topk_weights", "topk_indices", "token_expert_indices")
MOE_FORWARD = RowWiseOperator("vllm::moe_forward", reads=_OF_TOKENS)
MOE_FORWARD_SHARED = RowWiseOperator("vllm::moe_forward_shared", reads=_OF_TOKENS, writes=False)

EXPERTS = (
    MOE_FORWARD,
    MOE_FORWARD_SHARED,
    RowWiseOperator("_moe_C::grouped_topk", reads=("scores",), writes=False),
)
