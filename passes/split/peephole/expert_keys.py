"""Entries are sorted by expert with keys as narrow as experts' numbers.

A router's choices are 64-bit, and sorting them takes a pass for every few bits: 35 us for 4096 entries on an H200, most of
which sort zeros. Each half has a sort of its own, between the sum that it waits for and its experts, where nothing hides it.
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
"""Numbers of experts, and what holds each one's."""


def narrow_expert_keys(graph: fx.Graph) -> int:
    """Sort a half's choices of ``topk`` in the narrowest dtype that has them all; how many sorts now do.

    Which of equal keys comes first may change, as it may anyway with ``sort``. Of halves it is proven that nothing shows it, as
    the order is undone; what is sorted stably stays as it is.
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
    """What holds all values of ``keys``, if they are places of the largest of known many and other dtypes hold more."""
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
