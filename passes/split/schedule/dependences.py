"""Find which nodes must come before which in a graph: by data, writes to what others read, and one call at a time in a slot.

Every edge goes from an earlier node to a later node. Any order that respects all edges is right. The graph's own order does.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from tw_compile import compat
from tw_compile.graph.predicates import draws_random_numbers, is_call, makes_view, value
from tw_compile.kernels.collective import ops
from tw_compile.kernels.collective.seam import arrive_, enter_layers, leave_halves
from tw_compile.passes.fusion.forms import functionalised
from tw_compile.passes.reasons import SplitRefusal, SplitRefused
from tw_compile.passes.split.rewrite.duplicate import mutated

_c10d = torch.ops._c10d_functional
_STARTS = (*ops.STARTS, *ops.MM_STARTS)
_WAITS = (ops.wait_, leave_halves, arrive_)
"""The nodes with which a call ends in this graph. Their first arguments are the same."""


@dataclass(frozen=True)
class CommunicationCall:
    """A fused operator, or a functional collective, and the node that waits for it.

    One of them may be in another graph (``seams.py``). In its place is the node that enters or leaves with the call in flight.
    """

    start: fx.Node
    wait: fx.Node

    @property
    def fused(self) -> bool:
        return self.start.target in _STARTS or self.enters

    @property
    def enters(self) -> bool:
        """Whether the previous graph has started the call."""
        return self.start.target is enter_layers

    @property
    def leaves(self) -> bool:
        """Whether the next graph waits for the call."""
        return self.wait.target is leave_halves

    @property
    def slot(self) -> tuple[str, int] | None:
        """``(group_name, slot)``, in which at most one call is in flight; None for collectives."""
        return (argument(self.wait, "group_name"), argument(self.wait, "slot")) if self.fused else None

    @property
    def issued(self) -> fx.Node:
        """A tensor that exists once the call has been started."""
        return argument(self.wait, "hidden") if self.fused else self.start


def argument(node: fx.Node, name: str) -> Any:
    """What an operator is given for the argument ``name`` of its schema."""
    index = place_of(node, name)
    if index < len(node.args):
        return node.args[index]
    return node.kwargs.get(name, node.target._schema.arguments[index].default_value)  # type: ignore[union-attr]


def place_of(node: fx.Node, name: str) -> int:
    """The index of the argument ``name`` in an operator's schema."""
    for index, declared in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if declared.name == name:
            return index
    raise ValueError(f"name: expected an argument of {node.target}, got {name!r}")


def find_calls(graph: fx.Graph) -> list[CommunicationCall] | SplitRefused:
    """The calls of a graph, in the order of their starts; a refusal if two would be in flight in one slot."""
    calls: list[CommunicationCall] = []
    collectives: set[fx.Node] = set()
    place = {node: index for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if is_call(node, *_WAITS):
            hidden = argument(node, "hidden")
            start = hidden.args[0] if is_call(hidden, operator.getitem) else None
            if not is_call(start, *_STARTS, enter_layers):
                return SplitRefused(
                    SplitRefusal.CALL_WITHOUT_START, f"{node.name} waits for {hidden}, which is no start's"
                )
            calls.append(CommunicationCall(start, node))
        elif is_call(node, _c10d.wait_tensor.default):
            (start,) = node.all_input_nodes
            if getattr(start.target, "namespace", None) == "_c10d_functional" and start not in collectives:
                collectives.add(start)  # a later wait for the same collective finds it done
                calls.append(CommunicationCall(start, node))
    waited = {call.start for call in calls}
    for node in graph.nodes:
        if is_call(node, *_STARTS) and node not in waited:
            return SplitRefused(SplitRefusal.CALL_WITHOUT_START, f"nothing waits for {node.name}")
    calls.sort(key=lambda call: place[call.start])
    for earlier, later in _successive(calls):
        if place[later.start] < place[earlier.wait]:
            detail = f"{later.start.name} starts before {earlier.wait.name} on slot {later.slot}"
            return SplitRefused(SplitRefusal.SLOT_IN_FLIGHT_TWICE, detail)
    return calls


def _successive(calls: list[CommunicationCall]) -> Iterator[tuple[CommunicationCall, CommunicationCall]]:
    last: dict[tuple[str, int], CommunicationCall] = {}
    for call in calls:
        if call.slot is None:
            continue
        if call.slot in last:
            yield last[call.slot], call
        last[call.slot] = call


def predecessors(graph: fx.Graph, calls: list[CommunicationCall]) -> dict[fx.Node, list[fx.Node]]:
    """For every node, the nodes that must come before it. Linear in the size of the graph."""
    before = {node: list(node.all_input_nodes) for node in graph.nodes}
    for earlier, later in _successive(calls):
        before[later.start].append(earlier.wait)
    aliases = _Aliases(graph)
    written = {aliases.find(one) for node in graph.nodes for one in written_by(node)}
    last_write: dict[fx.Node, fx.Node] = {}
    reads: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
    waits = {call.wait for call in calls}
    effect: fx.Node | None = None
    for node in graph.nodes:
        touched = {memory for one in node.all_input_nodes if (memory := aliases.find(one)) in written}
        writes = {aliases.find(one) for one in written_by(node)}
        for memory in touched:
            if memory in last_write:
                before[node].append(last_write[memory])
            if memory in writes:
                before[node] += reads.pop(memory, [])
                last_write[memory] = node
            else:
                reads[memory].append(node)
        # wait_tensor counts as a side effect, but its data dependences are enough. Random draws stay in order, so that each
        # gives the numbers that it gives in the unsplit graph.
        effects = draws_random_numbers(node) or (node.is_impure() and not writes)
        if node.op == "call_function" and effects and node not in waits:
            if effect is not None:
                before[node].append(effect)
            effect = node
    return before


def written_by(node: fx.Node) -> list[fx.Node]:
    """The operands that a node writes to; all operands if no schema says which."""
    if functionalised(node) is not None:  # it returns what the operator behind it would have written
        return []
    return node.all_input_nodes if compat.is_higher_order(node.target) else mutated(node)


class _Aliases:
    """Sets of nodes that may share memory: views and what they are views of."""

    def __init__(self, graph: fx.Graph) -> None:
        self._parent: dict[fx.Node, fx.Node] = {}
        storages: dict[Any, fx.Node] = {}
        items: dict[tuple[fx.Node, Any], fx.Node] = {}
        for node in graph.nodes:
            tensor = value(node)
            if tensor is not None:
                self._unite(node, storages.setdefault(compat.storage_key(tensor), node))
            if is_call(node, operator.getitem):
                producer, index = node.args[:2]
                assert isinstance(producer, fx.Node)
                self._unite(node, items.setdefault((producer, index), node))
                if makes_view(producer):
                    self._unite(node, producer)
            elif node.op == "call_function" and makes_view(node):
                for operand in node.all_input_nodes:
                    if not isinstance(operand.meta.get("val"), torch.SymInt):  # a size is no memory
                        self._unite(node, operand)

    def find(self, node: fx.Node) -> fx.Node:
        root = node
        while (parent := self._parent.get(root, root)) is not root:
            root = parent
        while (parent := self._parent.get(node, node)) is not root:
            self._parent[node] = root
            node = parent
        return root

    def _unite(self, node: fx.Node, other: fx.Node) -> None:
        self._parent[self.find(node)] = self.find(other)
