"""The token rule of adapters' kernels: they run once for all tokens.

    buffer = lora_shrink(x, A, token_indices_sorted_by_lora_ids, num_tokens_per_lora, ...)
    y = lora_expand(buffer, B, y, token_indices_sorted_by_lora_ids, num_tokens_per_lora, ...)

A row depends on its token alone. But the runner sorts the tokens of a whole step by their adapter, and the kernels read this
order. With half of the rows, the order would point to rows of other tokens.
"""

from __future__ import annotations

from tw_compile.graph.predicates import operator_name
from tw_compile.passes.fusion.forms import functionalised
from tw_compile.passes.reasons import JoinReason
from tw_compile.passes.split.analysis.layout import Verdict
from tw_compile.passes.split.rules.registry import OperatorCall, token_rule


@token_rule("vllm::lora_shrink", "vllm::lora_expand", "vllm::lora_linear_async")
def _adapt(call: OperatorCall) -> Verdict:
    """``lora_linear_async`` is a linear layer and its adapters, on two streams."""
    form = functionalised(call.node)
    name = operator_name(call.node) if form is None else form.name
    for operand in call.node.all_input_nodes:
        call.layout(operand)
    return call.join(JoinReason.LORA, f"{name} reads which tokens of a whole step have which adapter")
