"""Keep Inductor from undoing a schedule.

Inductor orders kernels by the dependences that it sees, and fuses kernels between which there is no path. So the lock turns the
schedule into dependences:

    wait_(hidden1, residual1, keep=[..., hidden2])      # comes after start 2, and so does all that reads hidden1

A wait_ takes what was issued or computed before it as operands, without reading them. Every start depends on its part, and
every part on its wait_. So starts, matmuls and waits of alternating halves are one chain: Inductor can't reorder them for peak
memory, and can't fuse operators of both halves. This needs nothing of Inductor. Some nodes need
:func:`tw_compile.compat.order_after`: those that compute behind a start without depending on it (a half's first part, and what
follows a join), and waits of collectives, which have no ``keep``.

``keep`` protects the memory that a call reads only if Inductor sees one tensor. Inductor copies a view that needs a copy for
each reader, so the wait_ would hold another copy than the start reads. Such operands are cloned once, before both.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.fx as fx
from torch.utils.flop_counter import flop_registry

from tw_compile import compat
from tw_compile.graph.predicates import aten, has_default_strides, is_call, makes_view, operator_name, value
from tw_compile.kernels.attention.suffix import attention_suffix
from tw_compile.kernels.gemm.mm_leaving_sms import (
    addmm_leaving_sms,
    gated_mm_leaving_sms,
    grouped_mm_leaving_sms,
    joint_mm_leaving_sms,
    mm_leaving_sms,
)
from tw_compile.passes.fusion.forms import functionalised
from tw_compile.passes.nodes import Inserter, annotation
from tw_compile.passes.operators import is_attention_half
from tw_compile.passes.reasons import SplitRefused
from tw_compile.passes.split.analysis.parts import computes, half_of
from tw_compile.passes.split.schedule.dependences import (
    CommunicationCall,
    argument,
    find_calls,
    predecessors,
)

_KEEP = 2
_OWN_KERNELS = {
    aten._grouped_mm,
    *(
        one.overloadpacket
        for one in (
            mm_leaving_sms,
            addmm_leaving_sms,
            joint_mm_leaving_sms,
            gated_mm_leaving_sms,
            grouped_mm_leaving_sms,
            attention_suffix,
        )
    ),
}


@dataclass(frozen=True)
class Lock:
    """How the order of a graph was fixed.

    ``kept`` counts the waits that got more to keep, ``ordered`` the operators that got a dependence, ``cloned`` the operands
    of which start and wait_ would have got different copies. ``loose`` are pointwise operators and reductions that belong
    behind a start, but that no dependence holds there. Inductor may compute them before the start, even in one kernel with
    operators of the other half. Results don't depend on this; the start is delayed by the time of these operators.
    """

    kept: int
    ordered: int
    cloned: int
    loose: tuple[str, ...]


def lock_order(graph: fx.Graph, calls: list[CommunicationCall] | SplitRefused | None = None) -> Lock:
    """Add dependences to a scheduled graph so that its starts, matmuls and waits stay in their order.

    Comes last: other passes would not recognise the operators that it puts into subgraphs. ``calls`` are the graph's calls;
    None: found here.

    Raises:
        ValueError: The graph's calls can't be paired, or it belongs to no module, which the subgraphs of ordered nodes need.
    """
    calls = find_calls(graph) if calls is None else calls
    if isinstance(calls, SplitRefused):
        raise ValueError(f"graph: expected a scheduled one, got {calls.reason}: {calls.detail}")
    if graph.owning_module is None:
        raise ValueError("graph: expected one that belongs to a module, got one without")
    cloned = sum(_hold_operands(graph, call) for call in calls if call.fused and not call.enters)
    return _Locker(graph, calls).lock(cloned)


def _hold_operands(graph: fx.Graph, call: CommunicationCall) -> int:
    """Let a call's wait_ keep the memory that its start reads. Returns the number of operands that were cloned for this."""
    cloned = 0
    for operand in call.start.all_input_nodes:
        tensor = value(operand)
        if tensor is None or operand is argument(call.start, "eps_tensor"):  # the host reads it at once
            continue
        if is_copied_by_readers(operand):
            with graph.inserting_before(call.start):
                clone = Inserter(graph).call(
                    aten.clone.default,
                    (operand,),
                    {"memory_format": torch.contiguous_format},
                    like=call.start,
                    noted={**annotation(operand), "role": "clone"},
                )
            for reader in (call.start, call.wait):
                reader.replace_input_with(operand, clone)
            operand = clone
            cloned += 1
        keep = argument(call.wait, "keep")
        if operand not in keep:
            call.wait.update_arg(_KEEP, [*keep, operand])
    return cloned


def is_copied_by_readers(node: fx.Node) -> bool:
    """Whether a node is a view only in name: elements must move somewhere between the memory and the node.

    They also must if Inductor itself computes the viewed value, and the graph expects other than default strides of it:
    Inductor lays such a value out by its dims.
    """
    while node.op == "call_function" and makes_view(node):
        base = node.all_input_nodes[0]
        here, there = value(node), value(base)
        if here is None or there is None or compat.storage_key(here) != compat.storage_key(there):
            return True
        node = base
    maker = node.all_input_nodes[0] if node.target is operator.getitem else node
    laid_out = value(node)
    return (
        laid_out is not None
        and maker.op == "call_function"
        and not has_own_kernel(maker)
        and not has_default_strides(laid_out)
    )


def has_own_kernel(node: fx.Node) -> bool:
    """Whether the operator is a matmul, an attention or a higher-order operator, which Inductor does not merge with others.

    False for operators that a host's later pass looks for at the top level of the graph: they may not go into a subgraph.
    """
    if functionalised(node) is not None:
        return False
    if compat.is_higher_order(node.target):
        return True
    packet = getattr(node.target, "overloadpacket", None)
    return packet in flop_registry or packet in _OWN_KERNELS or is_attention_half(operator_name(node))


class _Locker:
    def __init__(self, graph: fx.Graph, calls: list[CommunicationCall]) -> None:
        self.graph = graph
        self.starts = {call.start: index for index, call in enumerate(calls) if not call.enters}
        self.waits = {call.wait: call for call in calls}
        self.calls = calls
        self.before = predecessors(graph, calls)
        self.kept = 0
        self.after: dict[fx.Node, list[fx.Node]] = {}
        self.loose: list[str] = []

    def lock(self, cloned: int) -> Lock:
        """Add the dependences, by following for each node the latest start that the node is sure to come after."""
        latest = -1
        sure: defaultdict[fx.Node, int] = defaultdict(lambda: -1)
        pending: dict[
            fx.Node, None
        ] = {}  # nodes with kernels of their own, since the latest start or wait, that no other such node depends on
        reach: defaultdict[fx.Node, set[fx.Node]] = defaultdict(set)
        for node in self.graph.nodes:
            if node.op != "call_function":
                continue
            sure[node] = max((sure[one] for one in self.before[node]), default=-1)
            reach[node] = set().union(*(reach[one] for one in self.before[node] if one in reach)) & pending.keys()
            if node in self.waits:
                issued = [] if latest < 0 or self.calls[latest].wait is node else [self.calls[latest].issued]
                self._hold(self.waits[node], [*issued, *pending])
                sure[node] = latest
                pending, reach = {}, defaultdict(set)
            elif node in self.starts:
                if sure[node] < latest:
                    self.after[node] = [self.calls[latest].issued]
                latest = sure[node] = self.starts[node]
                pending, reach = {}, defaultdict(set)
            elif has_own_kernel(node):
                if sure[node] < latest:
                    self.after[node] = [self.calls[latest].issued]
                    sure[node] = latest
                for one in reach[node]:
                    pending.pop(one, None)
                if value(node) is not None:
                    pending[node] = None
                    reach[node] = {node}
            elif is_call(node, operator.getitem) and is_call(node.args[0], joint_mm_leaving_sms):
                pending[node] = None
                reach[node] = {node}
            elif computes(node) and sure[node] < latest and half_of(node) != "shared":
                self.loose.append(node.name)
        self._order_after()
        return Lock(self.kept, len(self.after), cloned, tuple(self.loose))

    def _hold(self, call: CommunicationCall, tensors: list[fx.Node]) -> None:
        """Let a wait come after the computation of ``tensors``."""
        if not call.fused:
            if tensors:
                self.after[call.wait] = tensors
            return
        keep = list(argument(call.wait, "keep"))
        added = [one for one in tensors if one not in keep]
        call.wait.update_arg(_KEEP, [*keep, *added])
        self.kept += bool(added)

    def _order_after(self) -> None:
        if self.after:
            compat.order_after(self.graph, self.after)
