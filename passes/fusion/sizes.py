"""Find symbolic sizes in a graph, so that results can be viewed in the shapes that the graph gives them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.fx as fx

from tw_compile.graph.predicates import same_size, value

SizeSource = fx.Node | tuple[fx.Node, int]
"""A node that is the size, or a tensor and the dim of it that has the size."""


def sizes_of_view(tensor: torch.Tensor, hidden_size: int) -> list[torch.SymInt]:
    """The symbolic sizes that rows ``[tokens, hidden]`` need to become a tensor of this shape.

    Empty for rows themselves, and for a single symbolic size, which follows from the other sizes.
    """
    if tensor.dim() == 2 and same_size(tensor.shape[1], hidden_size):
        return []
    sizes: list[int | torch.SymInt] = list(tensor.shape)
    symbolic = [size for size in sizes if isinstance(size, torch.SymInt)]
    return symbolic if len(symbolic) > 1 else []


def known_sizes(graph: fx.Graph) -> dict[object, fx.Node]:
    """The first node of each symbolic size in the graph, by the expression of the size."""
    nodes: dict[object, fx.Node] = {}
    for node in graph.nodes:
        if isinstance(node.meta.get("val"), torch.SymInt):
            nodes.setdefault(node.meta["val"].node.expr, node)
    return nodes


def size_source(
    known: dict[object, fx.Node], tensors: Iterable[fx.Node], size: torch.SymInt, before: fx.Node
) -> SizeSource | None:
    """A source of ``size`` in front of ``before``: a node of ``known`` sizes, or a dim of ``tensors``. None: there is none."""
    node = known.get(size.node.expr)
    if node is not None and node < before:
        return node
    for tensor in tensors:
        shape = () if (fake := value(tensor)) is None else fake.shape
        for dim, candidate in enumerate(shape):
            if same_size(candidate, size):
                return tensor, dim
    return None
