"""Experts: each token goes to the experts that its own scores choose, and its result is the weighted sum of theirs.

``moe_forward`` does all of it for the layer of a name; what else that layer does is in :mod:`tw_compile.hosts.vllm.experts`.
The others are steps of it, which vLLM's models call by themselves.
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
