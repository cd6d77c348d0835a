"""Sort entries by expert with keys that are as narrow as the experts' numbers.

A router's choices are 64-bit. Sorting them takes a pass for every few bits: 35 us for 4096 entries on an H200, and most passes
sort zeros. Each half has its own sort, between the sum that it waits for and its experts, where nothing hides the sort.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx

from tw_compile import compat
from tw_compile.graph.predicates import aten, is_call, peel_views, value
from tw_compile.passes.nodes import Inserter, annotation
from tw_compile.passes.split.analysis.parts import half_of

_DTYPES = ((256, torch.uint8), (32768, torch.int16))
"""The most experts whose numbers a dtype can hold, and this dtype."""


def narrow_expert_keys(graph: fx.Graph) -> int:
    """Sort a half's choices of ``topk`` in the narrowest dtype that holds all of them. Returns the number of changed sorts.

    The order of equal keys may change, as it may with ``sort`` anyway. For halves it is proven that no result shows this order,
    because the order is undone. Stable sorts stay as they are.
    """
    narrowed = 0
    for sort in graph.find_nodes(op="call_function", target=aten.sort.default):
        keys = sort.args[0]
        dtype = _dtype_of(keys)
        if dtype is None or half_of(sort) not in (1, 2):
            continue
        wide = keys.meta["val"].dtype
        narrow = _cast(graph, keys, dtype, before=sort)
        sort.replace_input_with(keys, narrow)
        with compat.tracing_fake_mode(compat.graph_fake_mode(graph)):
            values, indices = sort.meta["val"]
            sort.meta["val"] = (values.to(dtype), indices)
        for result in [user for user in sort.users if user.args[1] == 0]:
            readers = list(result.users)
            result.meta["val"] = sort.meta["val"][0]
            if readers:
                widened = _cast(graph, result, wide, before=result.next)
                for reader in readers:
                    reader.replace_input_with(result, widened)
        narrowed += 1
    return narrowed


def _dtype_of(keys: fx.Node) -> torch.dtype | None:
    """The narrowest dtype for ``keys``, if they are indices from ``topk`` over a known number of scores; None otherwise."""
    chosen = peel_views(keys)
    if not (is_call(chosen, operator.getitem) and is_call(chosen.args[0], aten.topk.default) and chosen.args[1] == 1):
        return None
    topk: Any = chosen.args[0]
    scores = value(topk.args[0])
    assert scores is not None
    size = scores.shape[topk.args[2] if len(topk.args) > 2 else topk.kwargs.get("dim", -1)]
    return next((dtype for most, dtype in _DTYPES if isinstance(size, int) and size <= most), None)


def _cast(graph: fx.Graph, node: fx.Node, dtype: torch.dtype, before: fx.Node) -> fx.Node:
    convert = torch.ops.prims.convert_element_type.default
    with graph.inserting_before(before):
        return Inserter(graph).call(convert, (node, dtype), like=node, noted=annotation(node))
