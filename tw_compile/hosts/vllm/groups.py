"""The graph of a whole model, cut between groups of layers.

    head:   ids -> embedding, norm            -> hidden, residual
    group:  hidden, residual -> layers, norm  -> hidden, residual      as often as there are groups

A layer begins behind the norm (RMSNorm or LayerNorm) that its first matmul reads, so every all_reduce is in one group with its
norm. Groups with the same number of layers are the same graph. The exception are first layers of another kind (dense layers
before those with experts); they become part of the head. If all other groups are the same graph, it is compiled once, and what
one group hands to the next stays as it is (``kernels/collective/seam.py``).
"""

from __future__ import annotations

import inspect
import itertools
import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.passes.split_module import split_module

from tw_compile import compat
from tw_compile.graph.predicates import same_shape
from tw_compile.hosts.vllm.operators import ADD_NORM, ALL_REDUCE, ATTENTION, LATENT_ATTENTION, NORM
from tw_compile.kernels.collective.seam import enter_layers, leave_layers

_ATTENTION = (ATTENTION.name, LATENT_ATTENTION.name)
_NORMS = (NORM.name, ADD_NORM.name)
_MOST_NODES_OF_A_NORM = 24


@dataclass(frozen=True)
class Cut:
    """A graph in parts: ``module`` calls them. ``seamed``: all parts but the first are the same graph, and seams join them."""

    module: fx.GraphModule
    seamed: bool


def cut(graph: fx.GraphModule, most_layers: int) -> Cut | None:
    """A copy of ``graph``, cut into groups of up to ``most_layers`` layers; None where no layers are found."""
    norms = _borders(graph.graph)
    if len(norms) < 3:
        return None
    borders = [*norms[0 : -1 : group_size(len(norms) - 1, most_layers)], norms[-1]]
    module = _cut(graph, borders, seams=True)
    if module is not None:
        identities = [_identity(group.graph) for _, group in [*module.named_children()][1:]]  # type: ignore[arg-type]
        alike = len([*itertools.takewhile(identities[-1].__eq__, reversed(identities))])
        if alike == len(identities):
            return Cut(module, True)
        if alike > len(identities) // 2:
            module = _cut(graph, borders[-alike - 1 :], seams=True)
            assert module is not None, "seams that were there with more borders"
            return Cut(module, True)
    module = _cut(graph, borders, seams=False)
    assert module is not None
    return Cut(module, False)


def _cut(graph: fx.GraphModule, norms: list[fx.Node], seams: bool) -> fx.GraphModule | None:
    """A copy of ``graph``, cut behind each of ``norms``; None where ``seams`` are wanted but one can't be made."""
    renamed: dict[fx.Node, fx.Node] = {}
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph.graph, renamed))
    ends = [renamed[norm] for norm in norms]
    if seams:
        sewn = [_sew(copied, norm) for norm in ends]
        if not all(sewn):
            return None
        ends = [node for node in sewn if node is not None]
    part, number = dict[fx.Node, int](), 0
    for node in copied.nodes:
        within = node.args[0] if node.target is operator.getitem else None
        part[node] = part[within] if isinstance(within, fx.Node) and within in ends else number
        number += node in ends
    options = inspect.signature(split_module).parameters
    tuples: dict[str, Any] = {"tuple_return": True} if "tuple_return" in options else {}
    root: Any = None  # split_module doesn't use it, and vLLM gives None, too
    return split_module(fx.GraphModule(graph, copied), root, part.__getitem__, keep_original_order=True, **tuples)


def group_size(layers: int, most: int) -> int:
    """Layers in a group: as many as allowed, or fewer, but at least half as many, if all groups are then equally long."""
    alike = next(size for size in range(min(most, layers), 0, -1) if layers % size == 0)
    return alike if 2 * alike >= min(most, layers) else most


def _borders(graph: fx.Graph) -> list[fx.Node]:
    """The last norm before the first layer, then the last norm of each layer."""
    borders: list[fx.Node] = []
    norm: fx.Node | None = None
    summed: torch.Tensor | None = None
    for node in graph.nodes:
        name = name_of_call(node)
        if name == ALL_REDUCE.name:
            norm, summed = None, _tensor(node)
        elif _normalised(node) is not None and _same_shape(_tensor(node), summed):
            norm = node
        elif name in _ATTENTION and norm is not None:
            borders.append(norm)
            norm = None
    return borders if norm is None else [*borders, norm]


def _sew(graph: fx.Graph, norm: fx.Node) -> fx.Node | None:
    """Insert a ``leave_layers`` node behind ``norm``, and an ``enter_layers`` node right behind that.

    At the end of the graph there is no enter node: the graph returns the leave node.

    Returns the leave node. Returns None where a seam can't carry hidden states and residual, or where the graph returns
    something other than the hidden states.
    """
    hidden, residual = _results(graph, norm)
    like, other = (node.meta.get("example_value") for node in (hidden, residual))
    group_names = {group_name_of(node) for node in graph.nodes if name_of_call(node) == ALL_REDUCE.name}
    if not isinstance(like, FakeTensor) or not isinstance(other, FakeTensor) or len(group_names) != 1:
        return None
    if like.dtype != other.dtype or not same_shape(like, other):
        return None
    last = max(norm, hidden, residual)
    while compat.leaves_autocast(last.next):  # an autocast region must not continue in the next group
        last = last.next
    after = [node for node in graph.nodes if node > last and not {hidden, residual}.isdisjoint(node.all_input_nodes)]
    at_the_end = [node for node in after if node.op == "output"]
    if at_the_end and (after != at_the_end or after[0].args != ((hidden,),)):
        return None
    (group_name,) = group_names
    with graph.inserting_after(last):
        leave = graph.call_function(leave_layers, (hidden, residual, group_name))
    with like.fake_mode:
        leave.meta["example_value"] = torch.empty_like(like)
    if at_the_end:
        after[0].args = ((leave,),)
        return leave
    with graph.inserting_after(leave):
        enter = graph.call_function(enter_layers, (leave, group_name))
    with like.fake_mode:
        enter.meta["example_value"] = (torch.empty_like(like), torch.empty_like(like))
    for index, made in ((1, residual), (0, hidden)):
        with graph.inserting_after(enter):
            result = graph.call_function(operator.getitem, (enter, index))
        result.meta["example_value"] = enter.meta["example_value"][index]
        for node in after:
            node.replace_input_with(made, result)
    return leave


def _results(graph: fx.Graph, norm: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The nodes of the hidden states that ``norm`` computes, and of the residual beside them."""
    if name_of_call(norm) != ADD_NORM.name:
        residual = _normalised(norm)
        assert residual is not None, "a norm, as it is a border"
        return norm, residual
    results = {user.args[1]: user for user in norm.users if user.target is operator.getitem}
    for index in sorted({0, 1} - set(results)):
        with graph.inserting_after(max((norm, *results.values()))):
            results[index] = graph.call_function(operator.getitem, (norm, index))
        results[index].meta["example_value"] = norm.meta["example_value"][index]
    return results[0], results[1]


def _identity(part: fx.Graph) -> str:
    """A text that is equal for graph parts that compute the same results from their arguments."""
    places = {node: f"%{place}" for place, node in enumerate(part.nodes)}
    lines = []
    for node in part.nodes:
        value = node.meta.get("example_value")
        shape = (value.shape, value.stride(), value.dtype) if isinstance(value, torch.Tensor) else type(value)
        given = fx.map_arg((node.args, node.kwargs), places.__getitem__)
        lines.append(f"{node.op} {'' if node.op == 'placeholder' else node.target} {given} {shape}")
    return "\n".join(lines)


def group_name_of(all_reduce: fx.Node) -> Any:
    return all_reduce.kwargs.get("group_name", all_reduce.args[1] if len(all_reduce.args) > 1 else None)


def _normalised(node: fx.Node) -> fx.Node | None:
    """The input of the norm that ends at ``node``; None if ``node`` is no norm.

    A norm is an operator of vLLM's, torch's LayerNorm, or written out in single operators.
    """
    if name_of_call(node) in _NORMS or node.target is torch.nn.functional.layer_norm:
        return node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    return _normalised_in_float32(node) if node.target == "to" else None


def _normalised_in_float32(cast: fx.Node) -> fx.Node | None:
    """``x`` of ``(weight * (x.to(float32) - mean) * rsqrt(variance + eps)).to(dtype)``, which Cohere's models write out."""
    sources, seen, pending = set[fx.Node](), set[fx.Node](), cast.all_input_nodes
    while pending and len(seen) < _MOST_NODES_OF_A_NORM:
        node = pending.pop()
        seen.add(node)
        if node.target == "to" and _same_shape(_tensor(node), _tensor(cast)):
            sources.update(node.all_input_nodes)
        else:
            pending += [one for one in node.all_input_nodes if one not in seen]
    is_norm = not pending and len(sources) == 1 and any(node.target is torch.rsqrt for node in seen)
    return sources.pop() if is_norm else None


def _tensor(node: fx.Node) -> torch.Tensor | None:
    """The node's example value, or the first one of a tuple; None if it is no tensor."""
    value = node.meta.get("example_value")
    first = value[0] if isinstance(value, tuple) else value
    return first if isinstance(first, torch.Tensor) else None


def _same_shape(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether both are known to have the same shape in all steps.

    Comparing the sizes of the current step would specialise the graph to that step.
    """
    return one is not None and other is not None and same_shape(one, other)


def name_of_call(node: fx.Node) -> str:
    """``library::operator`` of a call. In Dynamo's graphs the target is an operator with all its overloads, or one overload."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name
    return target._qualified_op_name if isinstance(target, torch._ops.OpOverloadPacket) else ""
