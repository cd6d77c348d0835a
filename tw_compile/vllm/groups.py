"""The graph of a whole model, cut between groups of layers.

    head:   ids -> embedding, norm            -> hidden, residual
    group:  hidden, residual -> layers, norm  -> hidden, residual      as often as there are groups

A layer begins behind the norm that its first matmul reads, so every sum over the ranks is in one group with its norm. Groups of
as many layers are the same graph, which vLLM compiles once. Every cut is right; another one would be slower.
"""

from __future__ import annotations

import inspect
import operator
from typing import Any

import torch
import torch.fx as fx
from torch.fx.passes.split_module import split_module

_ALL_REDUCE = "vllm::all_reduce"
_ATTENTION = "vllm::unified_attention_with_output"
_ADD_NORM = "vllm_ir::fused_add_rms_norm"
_NORMS = ("vllm_ir::rms_norm", _ADD_NORM)


def cut(graph: fx.GraphModule, most_layers: int) -> fx.GraphModule | None:
    """``graph``, which is not changed, as calls of its parts; None where no layers are found.

    Its outputs come first. The residual that the last group leaves may follow, so that it is like the others.
    """
    norms = _borders(graph.graph)
    if len(norms) < 3:
        return None
    renamed: dict[fx.Node, fx.Node] = {}
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph.graph, renamed))
    borders = [renamed[norm] for norm in norms]
    _return_residual(copied, borders[-1])
    ends = {*borders[0 : -1 : group_size(len(borders) - 1, most_layers)], borders[-1]}
    part, number = dict[fx.Node, int](), 0
    for node in copied.nodes:
        within = node.args[0] if node.target is operator.getitem else None
        part[node] = part[within] if within in ends else number  # type: ignore[index]
        number += node in ends
    tuples = {"tuple_return": True} if "tuple_return" in inspect.signature(split_module).parameters else {}
    return split_module(fx.GraphModule(graph, copied), None, part.__getitem__, keep_original_order=True, **tuples)


def group_size(layers: int, most: int) -> int:
    """As many layers as allowed, or at least half as many where all groups are then alike."""
    alike = next(size for size in range(min(most, layers), 0, -1) if layers % size == 0)
    return alike if 2 * alike >= min(most, layers) else most


def _borders(graph: fx.Graph) -> list[fx.Node]:
    """The last norm before the first layer, then that at the end of each layer."""
    found: list[fx.Node] = []
    norm: fx.Node | None = None
    shape: torch.Size | None = None
    for node in graph.nodes:
        name = _name(node)
        if name == _ALL_REDUCE:
            norm, shape = None, _shape(node)
        elif name in _NORMS and _shape(node) == shape:
            norm = node
        elif name == _ATTENTION and norm is not None:
            found.append(norm)
            norm = None
    return found if norm is None else [*found, norm]


def _return_residual(graph: fx.Graph, norm: fx.Node) -> None:
    """Append the second result of ``norm``, if it has one, to what ``graph`` returns."""
    output = graph.output_node()
    (returned,) = output.args
    if _name(norm) != _ADD_NORM or not isinstance(returned, (tuple, list)):
        return
    residual = next((user for user in norm.users if user.args[1:] == (1,)), None)
    if residual is None:
        with graph.inserting_after(norm):
            residual = graph.call_function(operator.getitem, (norm, 1))
        residual.meta["example_value"] = norm.meta["example_value"][1]
    output.args = ((*returned, residual),)


def _shape(node: fx.Node) -> torch.Size | None:
    """Of the value, or of the first of several."""
    value = node.meta.get("example_value")
    first = value[0] if isinstance(value, tuple) else value
    return first.shape if isinstance(first, torch.Tensor) else None


def _name(node: fx.Node) -> str:
    """``library::operator`` of a call, as Dynamo has it: of all overloads, or of one."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name
    return target._qualified_op_name if isinstance(target, torch._ops.OpOverloadPacket) else ""
