"""What makes one scale of all tokens of a step. Such a step can't be padded: its last rows hold anything."""

from __future__ import annotations

import torch.fx as fx

from tw_compile.hosts.vllm.state import called_operator
from tw_compile.passes.operators import OneScaleOperator, declared_as


def scale_of_all_tokens(graph: fx.Graph) -> str:
    """What makes one scale of all tokens, by an operator's or a method's name; empty if nothing does.

    ``graph`` is Dynamo's. A largest value of a whole tensor is taken for such a scale.
    """
    for node in graph.nodes:
        name = called_operator(node)
        if declared_as(OneScaleOperator, name) is not None:
            return name
        if node.op == "call_method" and node.target in ("max", "amax") and len(node.args) == 1 and not node.kwargs:
            return str(node.target)
    return ""
