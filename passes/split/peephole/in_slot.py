"""Let results be read where peers write them: in the slot's memory, without a copy out of it.

A call beside other work has few SMs, and takes as long as these SMs need to move its data. At 4 ranks, two fifths of this data
are copies, from the slot to a tensor of the graph, of the rows that other ranks have finished. The copies are left out where
the slot's next call, which overwrites the rows, cannot begin before the rows have been read. This is so if all readers have
kernels of their own (matmuls, mostly) from whose results the next call's message is computed.

The next call's barrier ensures that the call comes after these readers on every rank: no rank writes to another rank before the
other rank has begun the call, and a rank begins the call behind earlier work of its stream (``kernels/runtime/barrier.py``).

A compiler treats the memory of a result as its own, and gives it to another value when the last reader has run. So
``all_reduce_rms_norm_hold_`` reads all these results behind everything that the graph computes.
"""

from __future__ import annotations

import torch.fx as fx

from tw_compile.graph.predicates import is_call, makes_view, value
from tw_compile.kernels.collective import ops
from tw_compile.kernels.collective.seam import arrive_, enter_layers, leave_halves
from tw_compile.kernels.collective.transports import TRANSPORTS
from tw_compile.kernels.collective.wires import EXACT
from tw_compile.passes.nodes import Inserter
from tw_compile.passes.reasons import SplitRefused
from tw_compile.passes.split.analysis.parts import half_of
from tw_compile.passes.split.schedule.dependences import CommunicationCall, argument, find_calls
from tw_compile.passes.split.schedule.lock import has_own_kernel


def leave_results_in_slots(graph: fx.Graph, calls: list[CommunicationCall] | SplitRefused | None = None) -> int:
    """Let calls beside other work leave results in their slots, where that is proven right. Returns the number of such calls.

    Comes before the lock, which lets waits keep results of other calls. ``calls`` are the graph's calls; None: found here.

    Raises:
        ValueError: The graph's calls can't be paired.
    """
    calls = find_calls(graph) if calls is None else calls
    if isinstance(calls, SplitRefused):
        raise ValueError(f"graph: expected one with starts and waits in pairs, got {calls.reason}: {calls.detail}")
    place = {node: index for index, node in enumerate(graph.nodes)}
    entered = _entered(graph)
    results: list[fx.Node] = []
    first = {call.slot: call.start for call in reversed(calls) if not call.enters}
    following: dict[tuple[str, int], fx.Node] = {}
    for call in reversed(calls):
        slot = call.slot
        if slot is None or call.enters:
            continue
        hidden = argument(call.wait, "hidden")
        again = entered.get(hidden)
        if again is None:
            read = is_read_before(hidden, following.get(slot), place, place[call.start])
        else:  # the next graph reads it, and is like this graph
            read = readers_of(hidden) == set() and is_read_before(again, first[slot], place, -1)
        # If all ranks get the residual, its rows are in the slot, too, and their readers are additions. Scales are also in the
        # slot, and they have readers of their own.
        in_slot_too = argument(call.start, "residual_out") == "replicated" or is_call(call.start, *ops.QUANT_STARTS)
        if argument(call.start, "overlap_sms") and not in_slot_too and read and _can_stay(call.start):
            call.start.update_kwarg("results_in_slot", True)
            results += [hidden] if again is None else [hidden, again]
        following[slot] = call.start
    if results:
        hold_results(graph, results[::-1])
    return sum(bool(call.start.kwargs.get("results_in_slot")) for call in calls)


def _can_stay(start: fx.Node) -> bool:
    """Whether the transport can leave the results in the slot. Else they would take memory until the graph ends, for nothing.

    Rows in codes are decoded somewhere else.
    """
    return TRANSPORTS[argument(start, "transport")].results_in_slots and argument(start, "wire") == EXACT


def _entered(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Maps the hidden states that each half leaves to the next graph to those that enter this graph (``seams.py``)."""
    leave = next((node for node in graph.nodes if is_call(node, leave_halves)), None)
    if leave is None:
        return {}
    enters = {half_of(node): node for node in graph.nodes if is_call(node, enter_layers)}
    left = {1: argument(leave, "first_hidden"), 2: argument(leave, "hidden")}
    return {
        left[half]: next(one for one in enter.users if one.args[1] == 0)
        for half, enter in enters.items()
        if half in left
    }


def is_read_before(hidden: fx.Node, following: fx.Node | None, place: dict[fx.Node, int], earliest: int) -> bool:
    """Whether all readers of ``hidden`` have a kernel of their own, and run before the slot's next call."""
    readers = readers_of(hidden)
    if readers is None or not all(has_own_kernel(reader) for reader in readers):
        return False
    return following is None or readers <= _needed_by(following, place, earliest)


def readers_of(hidden: fx.Node) -> set[fx.Node] | None:
    """The nodes that read ``hidden``, also by views; None if the graph returns it. Its wait and leave nodes don't count."""
    found: set[fx.Node] = set()
    views = [hidden]
    while views:
        for user in views.pop().users:
            if user.op == "output":
                return None
            if makes_view(user):
                views.append(user)
            elif not (is_call(user, ops.wait_, arrive_, leave_halves) and hidden in _results(user)):
                found.add(user)
    return found


def _results(wait: fx.Node) -> tuple[fx.Node, ...]:
    """The hidden states that a wait waits for, or that the graph leaves."""
    first = (argument(wait, "first_hidden"),) if is_call(wait, leave_halves) else ()
    return (argument(wait, "hidden"), *first)


def _needed_by(start: fx.Node, place: dict[fx.Node, int], earliest: int) -> set[fx.Node]:
    """The nodes from which ``start`` is computed, directly or not, and that come after ``earliest``."""
    found: set[fx.Node] = set()
    rest = list(start.all_input_nodes)
    while rest:
        node = rest.pop()
        if node not in found and place[node] > earliest:
            found.add(node)
            rest += node.all_input_nodes
    return found


def hold_results(graph: fx.Graph, results: list[fx.Node]) -> None:
    output = graph.output_node()
    outputs = [node for node in output.all_input_nodes if node.op != "placeholder" and value(node) is not None]
    with graph.inserting_before(output):
        Inserter(graph).call(
            ops.hold_, (results, outputs), noted={"role": "hold", "stream": 0, "split": "shared"}, result=None
        )
