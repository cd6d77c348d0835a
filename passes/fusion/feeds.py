"""What makes the message of an all_reduce: attention (its GEMM is o_proj) or an MLP (down_proj), read off the graph.

Views and elementwise operators make the input of each GEMM of the message. If they start from attention, the GEMM is o_proj. If
they start from other GEMMs, the GEMM is down_proj, or belongs to experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Literal

import torch.fx as fx

from tw_compile.graph.predicates import is_cast, is_view, operator_name, peel_views, same_size, value
from tw_compile.passes.fusion.forms import functionalised, read_all_reduce

Feeds = Literal["attention", "mlp"]

_GEMM = re.compile(r"(?:^|_)(?:add|b|baddb)?mm(?:_|$)|gemm|linear|moe")
_EXPERTS = re.compile(r"moe")
_ATTENTION = re.compile(r"attention")
_BATCHED = ("aten::bmm", "aten::baddbmm")


def feeds_of(partials: Iterable[fx.Node]) -> frozenset[Feeds]:
    """What makes the messages ``partials``; empty if the graph does not tell, both if both are added before they travel."""
    return frozenset(made for gemm in _nearest(partials, _is_gemm) if (made := _behind(gemm)) is not None)


def _behind(gemm: fx.Node) -> Feeds | None:
    if _EXPERTS.search(_name(gemm)):
        return "mlp"  # one operator is the whole MLP
    inputs = [node for node in gemm.all_input_nodes if not _is_parameter(node)]
    if any(_holds_heads(node) for node in gemm.all_input_nodes):
        return "attention"
    makers = _nearest(inputs, lambda node: _is_gemm(node) or _is_attention(node))
    if any(_is_attention(node) or _multiplies_activations(node) for node in makers):
        return "attention"
    return "mlp" if makers else None


def _nearest(nodes: Iterable[fx.Node], wanted: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """The first ``wanted`` nodes on all paths back from ``nodes``, inclusive; an earlier sum over ranks ends a path."""
    pending = list(nodes)
    seen, reached = set(pending), []
    while pending:
        node = pending.pop()
        if wanted(node):
            reached.append(node)
        elif read_all_reduce(node) is None:
            sources = [source for source in node.all_input_nodes if source not in seen]
            seen.update(sources)
            pending += sources
    return reached


def _name(node: fx.Node) -> str:
    """The operator's name without its namespace; for ``auto_functionalized`` the name of the operator that it calls."""
    if node.op != "call_function":
        return ""
    called = functionalised(node)
    return (operator_name(node) or str(node.target) if called is None else called.name).rpartition("::")[2]


def _is_gemm(node: fx.Node) -> bool:
    return bool(_GEMM.search(_name(node)))


def _is_attention(node: fx.Node) -> bool:
    return bool(_ATTENTION.search(_name(node)))


def _multiplies_activations(node: fx.Node) -> bool:
    """Whether a node is a batched GEMM without a parameter, as attention multiplies probabilities by values."""
    return operator_name(node) in _BATCHED and not any(_is_parameter(source) for source in node.all_input_nodes)


def _is_parameter(node: fx.Node) -> bool:
    """Whether a node has the elements of one input of the graph, in whatever order."""
    while node.op == "call_function" and (
        is_view(node) or is_cast(node) or _name(node) in ("permute", "t", "transpose")
    ):
        (node,) = node.all_input_nodes[:1]
    return node.op in ("placeholder", "get_attr")


def _holds_heads(node: fx.Node) -> bool:
    """Whether a node is a view of an input ``[tokens, heads, head_dim]``: then the graph begins behind attention."""
    source, columns = value(peel_views(node)), value(node)
    if peel_views(node).op != "placeholder" or source is None or columns is None or source.dim() != 3:
        return False
    return columns.dim() == 2 and same_size(source.shape[1] * source.shape[2], columns.shape[1])
