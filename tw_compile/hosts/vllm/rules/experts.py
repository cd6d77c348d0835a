"""The token rule of vLLM's experts, which are found by their layer's name. They run once for each half, if the layer allows it.

Experts are not row-wise to the last bit. As with any GEMM, the number of rows decides which block of rows an expert's GEMM
takes. Apart from that, a row depends on its token alone (:mod:`tw_compile.hosts.vllm.experts` says when).
"""

from __future__ import annotations

import sys
from typing import Any

from tw_compile.hosts.vllm.experts import whole_experts
from tw_compile.hosts.vllm.operators.experts import MOE_FORWARD, MOE_FORWARD_SHARED
from tw_compile.passes.fusion.forms import functionalised
from tw_compile.passes.reasons import JoinReason
from tw_compile.passes.split.analysis.layout import Verdict
from tw_compile.passes.split.rules.registry import OperatorCall, token_rule
from tw_compile.passes.split.rules.row_wise import row_wise

_BY_COUNT = "from_forward_context"
"""The layer's name in calls that take the next layer of the step (``VLLM_USE_LAYERNAME=0``, or torch before 2.11)."""


@token_rule(MOE_FORWARD.name, enters=True)
def _experts(call: OperatorCall) -> Verdict:
    form = functionalised(call.node)
    assert form is not None, "a rule of an operator that writes to arguments"
    objection = _objection(form.arguments.get("layer_name"))
    return call.join(JoinReason.EXPERTS, objection) if objection else row_wise(call, MOE_FORWARD)


@token_rule(MOE_FORWARD_SHARED.name, enters=True)
def _experts_and_shared_ones(call: OperatorCall) -> Verdict:
    objection = _objection(call.argument("layer_name"))
    return call.join(JoinReason.EXPERTS, objection) if objection else row_wise(call, MOE_FORWARD_SHARED)


def _objection(layer_name: Any) -> str:
    if layer_name == _BY_COUNT:
        return "each call takes the next layer of experts, so a second call for a layer can't be made"
    return whole_experts(_layers())


def _layers() -> list[Any]:
    """The model's layers. vLLM's forward context has them while vLLM compiles."""
    context = sys.modules.get("vllm.forward_context")
    if context is None or not context.is_forward_context_available():
        return []
    return list(context.get_forward_context().no_compile_layers.values())
