"""Keep residuals of calls beside other work in the model's dtype.

Between two fused sites a residual is kept in float32, which costs no communication (``passes/fusion/layout.py``). Beside other
work float32 costs SMs: with few SMs, a call takes as long as these need to write its rows. With a 16-bit residual this is a
quarter less (``benchmarks/kernel-notes.md``). The residual is then rounded at every site, as in the unfused graph.
"""

from __future__ import annotations

import operator

import torch.fx as fx

from tw_compile.graph.predicates import is_call
from tw_compile.kernels.collective import ops
from tw_compile.kernels.collective.seam import leave_halves
from tw_compile.passes.nodes import annotation
from tw_compile.passes.split.schedule.dependences import argument, place_of

_READERS = (*ops.STARTS, *ops.MM_STARTS, ops.wait_, leave_halves)


def narrow_residuals(graph: fx.Graph) -> int:
    """Let calls that get a number of SMs keep sharded residuals in the model's dtype. Returns the number of changed calls.

    This is done only where nothing but our own operators reads the residual: these take it in any dtype.
    """
    narrowed = 0
    for node in graph.nodes:
        if not is_call(node, *ops.STARTS, *ops.MM_STARTS) or not argument(node, "overlap_sms"):
            continue
        dtype = annotation(node).get("stream_dtype")
        kept = next((user for user in node.users if is_call(user, operator.getitem) and user.args[1] == 1), None)
        if argument(node, "residual_out") != "sharded" or dtype is None or kept is None:
            continue
        if argument(node, "residual_dtype").itemsize <= dtype.itemsize or not all(
            is_call(user, *_READERS) for user in kept.users
        ):
            continue
        node.update_arg(place_of(node, "residual_dtype"), dtype)
        hidden, residual, *scales = node.meta["val"]
        kept.meta["val"] = residual = residual.to(dtype)
        node.meta["val"] = (hidden, residual, *scales)
        narrowed += 1
    return narrowed
