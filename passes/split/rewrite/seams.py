"""Hand halves from one of a host's graphs to the next graph, which is split in the same way.

    before:  start2 | wait2 | return cat(leave_layers(hidden1, residual1), leave_layers(hidden2, residual2))
    after:   start2 | return leave_halves(hidden2, residual2, ..., hidden1, residual1)

So a graph joins nothing that the next graph takes apart. The next graph waits for the last call of half 2, behind the attention
of half 1. Each graph begins and ends as a layer does in the middle of a model.

Where a layer computes something behind its last sum, such as a norm before the residual is added, this sum has arrived:

    after:   start2 | wait2 | norm2 | return leave_done_halves(hidden2, residual2, hidden1, residual1)

A graph between two attentions leaves a residual alone (``residual_seam.py``):

    before:  wait1 | wait2 | ... | return cat(leave_residual(residual1), leave_residual(residual2)), others
    after:   wait1 | wait2 | ... | return leave_residual_halves(residual1, residual2, ..., after=others), others
"""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from tw_compile.graph.predicates import aten, is_call, value
from tw_compile.kernels.collective import ops
from tw_compile.kernels.collective.residual_seam import leave_residual, leave_residual_halves
from tw_compile.kernels.collective.seam import arrive_, enter_layers, leave_done_halves, leave_halves, leave_layers
from tw_compile.passes.nodes import Inserter, annotation
from tw_compile.passes.split.analysis.parts import half_of
from tw_compile.passes.split.schedule.dependences import argument


def mend_seams(graph: fx.Graph) -> bool:
    """Let halves enter and leave a graph that :func:`split_tokens` has split as halves. Returns whether the graph has changed.

    Raises:
        ValueError: The graph leaves something else than two halves, or waits several times for the second half.
    """
    if _leave_residuals(graph):
        return True
    enters = [node for node in graph.nodes if is_call(node, enter_layers)]
    leaves = {half_of(node): node for node in graph.nodes if is_call(node, leave_layers)}
    if not enters or not leaves:
        return False  # at the ends of a model; the graph before the first layers of a kind leaves all tokens
    if set(leaves) != {1, 2}:
        raise ValueError(f"graph: expected one that leaves two halves, got {list(leaves)}")
    results = list(leaves[2].args[:2])
    waits = [node for node in graph.nodes if is_call(node, ops.wait_) and list(node.args[:2]) == results]
    if not waits:
        _leave_done(graph, leaves[1], leaves[2])
        return True
    if len(waits) > 1:
        raise ValueError(f"graph: expected one wait for what half 2 leaves, got {len(waits)}")
    if argument(waits[0], "scales") is not None:
        return False  # only hidden states and a residual can leave
    slot = (argument(waits[0], "group_name"), argument(waits[0], "slot"))
    _leave(graph, leaves[1], leaves[2], waits[0], slot)
    for enter in [node for node in enters if half_of(node) == 2]:
        _arrive(graph, enter, slot)
    return True


def _leave(graph: fx.Graph, first: fx.Node, second: fx.Node, wait: fx.Node, slot: tuple[str, int]) -> None:
    """Leave both halves instead of the value that joins them, and do not wait for the second half."""
    joined, replaced, tokens = _joined(first, second)
    halves = (*second.args[:2], argument(wait, "keep"), *slot, *first.args[:2], argument(first, "sharded"), tokens)
    with graph.inserting_before(graph.output_node()):
        left = Inserter(graph).call(
            leave_halves, halves, noted={**annotation(wait), "role": "leave"}, result=joined.meta["val"]
        )
    joined.replace_all_uses_with(left)
    for node in (*reversed(replaced), wait):
        graph.erase_node(node)


def _leave_done(graph: fx.Graph, first: fx.Node, second: fx.Node) -> None:
    """Leave both halves, which are done, instead of the value that joins them."""
    joined, replaced, tokens = _joined(first, second)
    halves = (*second.args[:2], *first.args[:2], argument(first, "sharded"), tokens)
    with graph.inserting_before(graph.output_node()):
        left = Inserter(graph).call(leave_done_halves, halves, noted=annotation(joined), result=joined.meta["val"])
    joined.replace_all_uses_with(left)
    for node in reversed(replaced):
        graph.erase_node(node)


def _leave_residuals(graph: fx.Graph) -> bool:
    """Leave the halves of a residual instead of the value that joins them. Returns whether there are any."""
    leaves = {half_of(node): node for node in graph.nodes if is_call(node, leave_residual)}
    if set(leaves) != {1, 2}:
        return False  # a model's last graph, or one that leaves all tokens
    first, second = leaves[1], leaves[2]
    joined, replaced, tokens = _joined(first, second)
    output = graph.output_node()
    others = [node for node in output.all_input_nodes if node is not joined and node.op != "placeholder"]
    after = [node for node in others if value(node) is not None]
    halves = (first.args[0], second.args[0], argument(first, "tokens"), tokens)
    with graph.inserting_before(output):
        left = Inserter(graph).call(
            leave_residual_halves,
            (*halves, argument(first, "group_name"), argument(first, "sharded"), after),
            noted=annotation(joined),
            result=joined.meta["val"],
        )
    joined.replace_all_uses_with(left)
    for node in reversed(replaced):
        graph.erase_node(node)
    return True


def _joined(first: fx.Node, second: fx.Node) -> tuple[fx.Node, list[fx.Node], Any]:
    """The node that joins the two halves that are left, all nodes from the halves to this node, and the number of tokens."""
    replaced, joined = [first, second], second
    while not any(user.op == "output" for user in joined.users):
        (joined,) = joined.users
        replaced.append(joined)
    tokens = joined.args[1][0] if is_call(joined, aten.as_strided.default) else joined.meta["val"].shape[0]  # type: ignore[index]
    return joined, replaced, tokens


def _arrive(graph: fx.Graph, enter: fx.Node, slot: tuple[str, int]) -> None:
    """Wait for the call that the previous graph has left in flight, before anything reads the call's results."""
    results: dict[Any, fx.Node] = {user.args[1]: user for user in enter.users}
    if set(results) != {0, 1}:
        raise ValueError(f"graph: expected readers of both results of {enter.name}, got {sorted(results)}")
    with graph.inserting_after(max(results.values())):
        arguments: tuple[Any, ...] = (results[0], results[1], [], *slot)
        Inserter(graph).call(arrive_, arguments, noted={**annotation(enter), "role": "wait", "site": None}, result=None)
