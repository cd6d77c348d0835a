"""Operators of vLLM's that hand a state from each token to the next: Mamba's and linear attention's.

They are told by their names, so that one of a newer vLLM is known, too. vLLM marks most models whose layers have a state, but
not all: of Qwen3.5 it marks the model that sees images, and not its text model.
"""

from __future__ import annotations

import torch.fx as fx

from tw_compile import compat
from tw_compile.hosts.vllm.groups import name_of_call

_WORDS = ("mamba", "gdn", "linear_attention", "short_conv", "kda", "plamo2")


def state_operator(graph: fx.Graph) -> str:
    """The name of an operator that keeps a state; empty if there is none. ``graph`` is Dynamo's, or one for Inductor."""
    called = (name for node in graph.nodes if (name := called_operator(node)).startswith("vllm::"))
    return next((name for name in called if any(word in name for word in _WORDS)), "")


def called_operator(node: fx.Node) -> str:
    """The operator that a node calls, also through ``auto_functionalized``."""
    target = node.args[0] if compat.is_higher_order(node.target) and node.args else node.target
    return target._schema.name if isinstance(target, compat.OpOverload) else name_of_call(node)
