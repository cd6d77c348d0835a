"""Residuals that cross vLLM's cuts at attention. In the graph of a whole model, one piece leaves each, and another enters it.

    hidden, residual = fused_add_rms_norm(...)     in the piece before attention
    left = leave_residual(residual, ...)           at its end
    residual = enter_residual(left)                in the piece behind attention
    fused_add_rms_norm(sum, residual, ...)

A piece does not know who reads its results, so each rank would have to send its rows of the residual to the others. The graph
of the whole model shows all readers (``kernels/collective/residual_seam.py``). What is in a piece is known only when vLLM has
cut: it moves tensors that attention will fill into the piece before. So :func:`leave_last` is for the graph of a piece.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from tw_compile.hosts.vllm.groups import group_name_of, name_of_call
from tw_compile.hosts.vllm.operators import ADD_NORM, ALL_REDUCE
from tw_compile.kernels.collective.residual_seam import enter_residual, leave_residual

_RESIDUAL = 1
"""The number of the residual among the arguments of vLLM's norm with an addition."""


def sew_residuals(graph: fx.GraphModule, cuts: Callable[[fx.Node], bool]) -> int:
    """Let residuals that cross a cut be left and entered. Returns their number, also for a graph in which they are already.

    ``graph`` is Dynamo's. ``cuts``: whether vLLM has a piece begin and end at a node. A residual is sewn only if one norm reads
    it behind the cut, and nothing else does. At most one residual is left at a time, so the one before must be entered first.
    """
    already = graph.graph.find_nodes(op="call_function", target=enter_residual)
    if already:
        return len(already)  # vLLM has loaded a graph that was sewn before it was saved
    piece = _pieces(graph.graph, cuts)
    group_names = {group_name_of(node) for node in graph.graph.nodes if name_of_call(node) == ALL_REDUCE.name}
    if len(group_names) != 1:
        return 0
    (group_name,) = group_names
    sewn: list[fx.Node] = []
    for norm in [node for node in graph.graph.nodes if name_of_call(node) == ADD_NORM.name]:
        residual = norm.args[_RESIDUAL] if len(norm.args) > _RESIDUAL else None
        if not isinstance(residual, fx.Node) or (sewn and not _is_behind(residual, sewn[-1], piece)):
            continue
        if _sew(graph.graph, norm, residual, piece, group_name):
            sewn.append(norm)
    if sewn:
        graph.recompile()
    return len(sewn)


def leave_last(graph: fx.Graph) -> None:
    """Let a piece leave its residual behind all else that it computes, so that nothing gets the residual's memory."""
    output = graph.output_node()
    for leave in graph.find_nodes(op="call_function", target=leave_residual):
        others = [node for node in output.all_input_nodes if node is not leave and node.op != "placeholder"]
        *given, _ = leave.args
        leave.args = (*given, [node for node in others if isinstance(node.meta.get("val"), torch.Tensor)])
        leave.meta.pop("eager_input_vals", None)  # with those of the old arguments, Inductor would lay out the new ones
        output.prepend(leave)


def without_seams(graph: fx.GraphModule) -> fx.GraphModule:
    """A copy of ``graph`` in which residuals go to their readers directly."""
    renamed: dict[fx.Node, fx.Node] = {}
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph.graph, renamed))
    for enter in copied.find_nodes(op="call_function", target=enter_residual):
        (leave,) = enter.all_input_nodes
        residual, tokens, *_ = leave.args
        enter.replace_all_uses_with(residual)
        for node in (enter, leave, tokens):
            if isinstance(node, fx.Node) and not node.users:
                copied.erase_node(node)
    return fx.GraphModule(graph, copied)


def _pieces(graph: fx.Graph, cuts: Callable[[fx.Node], bool]) -> dict[fx.Node, int]:
    """For each node a number that is equal for nodes of one piece, and grows from piece to piece."""
    piece: dict[fx.Node, int] = {}
    number = 0
    for node in graph.nodes:
        cut = cuts(node)
        number += cut
        within = node.args[0] if node.target is operator.getitem else None
        piece[node] = piece[within] if isinstance(within, fx.Node) else number
        number += cut
    return piece


def _is_behind(residual: fx.Node, norm: fx.Node, piece: dict[fx.Node, int]) -> bool:
    """Whether ``residual`` is in a later piece than ``norm``, or is computed from what ``norm`` computes, in the same one."""
    if piece[residual] != piece[norm]:
        return piece[residual] > piece[norm]
    seen, rest = set[fx.Node](), [residual]
    while rest:
        node = rest.pop()
        if node not in seen and piece[node] == piece[norm]:
            seen.add(node)
            rest += node.all_input_nodes
    return norm in seen


def _sew(graph: fx.Graph, norm: fx.Node, residual: fx.Node, piece: dict[fx.Node, int], group_name: Any) -> bool:
    if residual.op == "placeholder" or piece[residual] == piece[norm]:
        return False
    here, like = piece[residual], residual.meta.get("example_value")
    if not isinstance(like, FakeTensor) or like.dim() != 2 or norm.all_input_nodes.count(residual) != 1:
        return False
    if any(piece[user] != here for user in residual.users if user is not norm):
        return False
    crossing = [node for node in piece if piece[node] == here and any(piece[user] > here for user in node.users)]
    given = [node for node in piece if node.op == "placeholder"]
    if any(_share_memory(residual, node) for node in {*crossing, *given} - {residual}):
        return False  # who enters may write there
    end = next(node for node in graph.nodes if piece[node] > here and node.target is not operator.getitem)
    if residual > end:
        return False
    with graph.inserting_before(end):
        tokens: fx.Node | int = like.shape[0]
        if isinstance(like.shape[0], torch.SymInt):
            tokens = graph.call_function(torch.ops.aten.sym_size.int, (residual, 0))
            tokens.meta["example_value"] = like.shape[0]
            piece[tokens] = here
        leave = graph.call_function(leave_residual, (residual, tokens, group_name, False, []))
    with graph.inserting_before(norm):
        enter = graph.call_function(enter_residual, (leave, group_name))
    with like.fake_mode:
        leave.meta["example_value"], enter.meta["example_value"] = torch.empty_like(like), torch.empty_like(like)
    piece[leave], piece[enter] = here, piece[norm]
    norm.replace_input_with(residual, enter)
    return True


def _share_memory(one: fx.Node, other: fx.Node) -> bool:
    first, second = (node.meta.get("example_value") for node in (one, other))
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return False
    return StorageWeakRef(first.untyped_storage()) == StorageWeakRef(second.untyped_storage())
