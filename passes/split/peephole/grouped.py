"""Compute grouped GEMMs of a split graph by the operator that rounds groups up to fewer rows and can leave SMs to a call."""

from __future__ import annotations

import torch.fx as fx

from tw_compile import compat
from tw_compile.graph.predicates import aten, value
from tw_compile.kernels.gemm.mm_leaving_sms import grouped_mm_leaving_sms


def use_small_groups(graph: fx.Graph) -> int:
    """Replace grouped GEMMs by ``grouped_mm_leaving_sms``, which leaves no SMs yet. Returns the number of replaced GEMMs.

    A half has as many groups as the whole, with fewer rows each.

    GEMMs stay as they are if Inductor tunes GEMMs, or if they need what the operator does not do: a bias, another dtype, groups
    of the depth or of columns.
    """
    if compat.tunes_gemms():
        return 0
    replaced = 0
    for node in graph.find_nodes(op="call_function", target=aten._grouped_mm.default):
        if len(node.args) == 3 and not node.kwargs and _has_groups_of_rows(node):
            node.target, node.args = grouped_mm_leaving_sms, (*node.args, 0)
            replaced += 1
    return replaced


def _has_groups_of_rows(node: fx.Node) -> bool:
    """Whether the GEMM is of ``[rows, depth]`` by ``[groups, depth, columns]``."""
    a, weights = (value(one) for one in node.args[:2])  # type: ignore[arg-type]
    return a is not None and weights is not None and (a.dim(), weights.dim()) == (2, 3)
