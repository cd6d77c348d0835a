"""Order a split graph so that each half computes while the other half's communication is in flight.

    half 1:  attention | start ......... wait  MLP | start ......... wait  attention | start
    half 2:             wait attention | start ......... wait  MLP | start ......... wait  attention

A part is what lies between a wait and the next start of a half. The starts keep their order, in which halves alternate. Before
each start comes what it needs and nothing else. Among these operators, each wait comes when nothing else is left that could
run. So a start is as early, and a wait as late, as data allow. Layers, prologue and epilogue need no cases of their own. An
operator that reads both halves needs both waits. This is the weave of TokenWeave (arXiv 2505.11329), found from dependences
alone.
"""

from __future__ import annotations

import heapq
import operator
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch.fx as fx

from tw_compile.graph.predicates import is_call
from tw_compile.kernels.collective import ops
from tw_compile.passes.nodes import Part, annotate, annotation
from tw_compile.passes.reasons import SplitRefusal, SplitRefused
from tw_compile.passes.split.analysis.parts import Kind, Parts, computes, half_of
from tw_compile.passes.split.schedule.dependences import CommunicationCall, find_calls, predecessors, written_by
from tw_compile.passes.split.schedule.lock import has_own_kernel

DEFAULT_OVERLAP_SMS = 16


class Exposure(StrEnum):
    """Why nothing of the other half runs between a start and its wait. Stable names, as those of refusals."""

    NOT_SPLIT = "not_split"
    NOTHING_LEFT = "nothing_left"
    NEEDS_BOTH_HALVES = "needs_both_halves"


@dataclass(frozen=True)
class ScheduledWindow:
    """Operators that run one after another while the same calls are in flight.

    ``computes`` is the half that they belong to; ``joined`` if they read both halves or belong to both, ``shared`` if they
    depend on no tokens. ``beside`` are the calls in flight, as ``(site, half)``; a site is the index that the fusion pass gave
    it, None for an unfused collective. ``nodes`` counts operators that compute, not views or sizes. ``kind`` is the layer part.
    """

    index: int
    kind: Kind
    computes: Part
    beside: tuple[tuple[int | None, Part], ...]
    nodes: int


@dataclass(frozen=True)
class Exposed:
    """A wait for a call beside which nothing of the other half computes."""

    node: str
    site: int | None
    half: Part
    reason: Exposure


@dataclass(frozen=True)
class Schedule:
    """What runs beside what. ``calls`` counts the starts; ``exposed`` are the calls that nothing hides.

    ``reserved`` has for each window the SMs of the calls that it hides. ``parts`` are the layer parts of the graph's operators.
    """

    windows: tuple[ScheduledWindow, ...]
    calls: int
    exposed: tuple[Exposed, ...]
    reserved: tuple[int, ...]
    parts: Parts

    @property
    def exposures(self) -> dict[str, int]:
        """How many calls are exposed, by reason, most frequent first."""
        return dict(Counter(str(one.reason) for one in self.exposed).most_common())


OverlapSMs = int | Callable[[ScheduledWindow], int]


def schedule(
    graph: fx.Graph,
    overlap_sms: OverlapSMs = DEFAULT_OVERLAP_SMS,
    most_sms: int | None = None,
    piece: bool = False,
    calls: list[CommunicationCall] | SplitRefused | None = None,
    collective_sms: Callable[[ScheduledWindow], int] = lambda window: 0,
) -> Schedule | SplitRefused:
    """Reorder a graph that :func:`split_tokens` has split, and annotate its operators with ``window`` and ``stream``.

    The order depends on the graph alone, so all ranks issue their calls in the same order. The time is n log n for n nodes.

    Args:
        overlap_sms: SMs for the communication of each fused call that computation hides, or a function of the first window
            that hides the call. Exposed calls get 0, which means all SMs that they want.
        most_sms: The most SMs that all calls in flight may have together; None: no limit besides ``overlap_sms``.
        piece: The graph begins behind an attention operator and ends before one, see :class:`Parts`.
        calls: The graph's calls; None: found here. The scheduled graph has the same calls in the same order.
        collective_sms: The SMs that an unfused collective takes beside the first window that hides it. The collective can't be
            told how many to take, but operators that compute there can leave them.

    A refusal leaves the graph as it was, in an order that is right.
    """
    if isinstance(overlap_sms, int) and overlap_sms < 0:
        raise ValueError(f"overlap_sms: expected 0 or more, got {overlap_sms}")
    calls = find_calls(graph) if calls is None else calls
    if isinstance(calls, SplitRefused):
        return calls
    if not calls:
        return SplitRefused(SplitRefusal.NO_COMMUNICATION, "no call whose time could be hidden")
    weaver = _Weaver(graph, calls)
    order = weaver.order()
    _reorder(graph, order)
    parts = Parts(order, calls, piece)
    # Angles of rotary embeddings and the like belong to the first layer of a model. In a piece they belong to no window.
    aside = {node for node in weaver.aside if not has_own_kernel(node)} if piece else set()
    timeline = _Timeline(order, calls, parts, aside)
    for node in order:
        stream = "communication" if node in timeline.communication else "compute"
        annotate(node, window=timeline.window_of[node], stream=stream)
    given: dict[CommunicationCall, int] = {}
    entering = {
        call.slot: call for call in calls if call.enters
    }  # the previous graph has left with this call, as this graph leaves with its own
    for call in calls:
        window = timeline.hidden_by.get(entering.get(call.slot, call) if call.leaves else call)
        if call.fused:
            asked = 0 if window is None else overlap_sms(window) if callable(overlap_sms) else overlap_sms
            given[call] = asked if most_sms is None else min(asked, most_sms // max(timeline.most_in_flight, 1))
        elif window is not None:
            given[call] = collective_sms(window)
        if call.fused and not call.enters:
            call.start.update_kwarg("overlap_sms", given[call])
    reserved = tuple(sum(given.get(call, 0) for call in hidden) for hidden in timeline.hides)
    started = len(calls) - len(entering)
    return Schedule(tuple(timeline.windows), started, tuple(timeline.exposed), reserved, parts)


class _Weaver:
    def __init__(self, graph: fx.Graph, calls: list[CommunicationCall]) -> None:
        self.calls = calls
        self.before = predecessors(graph, calls)
        self.place = {node: index for index, node in enumerate(graph.nodes)}
        self.operators = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        self.waits = {call.wait for call in calls}
        self._order: list[fx.Node] = []
        self._after: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
        self._missing = {node: 0 for node in graph.nodes}
        for node in self.operators:
            for one in self.before[node]:
                if one.op != "placeholder":
                    self._after[one].append(node)
                    self._missing[node] += 1
        self._parts, rest = self._divide()
        self.aside = {node for node in rest if not self._late(node)}
        self._ready_aside = [self._key(node) for node in self.aside if not self._missing[node]]
        heapq.heapify(self._ready_aside)

    def order(self) -> list[fx.Node]:
        """The operators, without inputs and output."""
        for part in self._parts:
            self._emit(part)
            while self._ready_aside:
                self._append(heapq.heappop(self._ready_aside)[2])
        done = set(self._order)
        self._emit([node for node in self.operators if node not in done])
        return self._order

    def _divide(self) -> tuple[list[list[fx.Node]], set[fx.Node]]:
        """For every start, the nodes that it needs and no earlier start needs, and its results. Also, what no start needs."""
        rest = set(self.operators)
        parts = []
        for call in self.calls:
            part, pending = [], [call.start]
            while pending:
                node = pending.pop()
                if node in rest:
                    rest.remove(node)
                    part.append(node)
                    pending += self.before[node]
            results = [one for one in call.start.users if is_call(one, operator.getitem) and one in rest]
            rest.difference_update(results)
            parts.append(part + results)
        return parts, rest

    def _late(self, node: fx.Node) -> bool:
        """Whether a node comes at the end: the last waits, and writes to graph inputs, which Inductor looks for at the end.

        Other nodes that no start needs run as soon as they can, but behind a start that they would have kept waiting.
        """
        return node in self.waits or any(one.op == "placeholder" for one in written_by(node))

    def _emit(self, nodes: list[fx.Node]) -> None:
        """Append ``nodes``, operators that need nothing but each other. Waits come last, those of older calls first."""
        wanted = set(nodes)
        ready = [self._key(node) for node in nodes if not self._missing[node]]
        heapq.heapify(ready)
        while ready:
            node = heapq.heappop(ready)[2]
            wanted.remove(node)
            for user in self._append(node):
                if user in wanted:
                    heapq.heappush(ready, self._key(user))
        assert not wanted, f"{len(wanted)} operators have a predecessor that is missing"

    def _append(self, node: fx.Node) -> list[fx.Node]:
        """Append ``node`` to the order. Returns the nodes that have become ready."""
        self._order.append(node)
        ready = []
        for user in self._after[node]:
            self._missing[user] -= 1
            if not self._missing[user]:
                ready.append(user)
                if user in self.aside:
                    heapq.heappush(self._ready_aside, self._key(user))
        return ready

    def _key(self, node: fx.Node) -> tuple[bool, int, fx.Node]:
        return node in self.waits, self.place[node], node


class _Timeline:
    """Cuts an order into windows: one ends behind each start, and before each wait that follows a half's computation."""

    def __init__(self, order: list[fx.Node], calls: list[CommunicationCall], parts: Parts, aside: set[fx.Node]) -> None:
        self._aside = aside
        self.windows: list[ScheduledWindow] = []
        self.hides: list[tuple[CommunicationCall, ...]] = []
        self.window_of: dict[fx.Node, int] = {}
        self.hidden_by: dict[CommunicationCall, ScheduledWindow] = {}
        self.exposed: list[Exposed] = []
        self.most_in_flight = 0
        self._started = False
        self._parts = parts
        self._starts = {call.start: call for call in calls}
        self._waits = {call.wait: call for call in calls}
        self.communication = {*self._starts, *self._waits}
        self._in_flight: dict[CommunicationCall, None] = {}
        self._nodes: list[fx.Node] = []
        self._left = Counter(half_of(node) for node in order if self._counts(node))
        for node in order:
            self._add(node)
        if self._nodes:
            self._close()
        last = max(len(self.windows) - 1, 0)
        self.window_of = {node: min(index, last) for node, index in self.window_of.items()}

    def _counts(self, node: fx.Node) -> bool:
        if node in self._aside:
            return False
        return node.target in ops.MM_STARTS or (computes(node) and node not in self.communication)

    def _add(self, node: fx.Node) -> None:
        if node in self._waits and any(half_of(one) != "shared" for one in self._nodes):
            self._close()
        self.window_of[node] = len(self.windows)
        if node in self._waits:
            call = self._waits[node]
            del self._in_flight[call]
            if call not in self.hidden_by and not call.leaves:
                self.exposed.append(Exposed(node.name, _site(call), half_of(call.start), self._why_exposed(call)))
        if self._counts(node):
            self._nodes.append(node)
            self._left[half_of(node)] -= 1
        if node in self._starts:
            if self._nodes:
                self._close()
            self._in_flight[self._starts[node]] = None
            self._started = True
            self.most_in_flight = max(self.most_in_flight, sum(call.fused for call in self._in_flight))

    def _close(self) -> None:
        every = {half_of(node) for node in self._nodes}
        halves = every - {"shared"}
        whose: Part = "shared" if not halves else halves.pop() if len(halves) == 1 else "joined"
        beside = tuple((_site(call), half_of(call.start)) for call in self._in_flight)
        kind = self._parts.kind_of(self._nodes) if self._started else "prologue"
        window = ScheduledWindow(len(self.windows), kind, whose, beside, len(self._nodes))
        self.windows.append(window)
        self.hides.append(tuple(call for call in self._in_flight if _other(half_of(call.start)) in every))
        for call in self.hides[-1]:
            self.hidden_by.setdefault(call, window)
        self._nodes = []

    def _why_exposed(self, call: CommunicationCall) -> Exposure:
        other = _other(half_of(call.start))
        if other is None:
            return Exposure.NOT_SPLIT
        return Exposure.NEEDS_BOTH_HALVES if self._left[other] else Exposure.NOTHING_LEFT


def _other(half: Part) -> Part | None:
    return {1: 2, 2: 1}.get(half)  # type: ignore[arg-type, return-value]


def _site(call: CommunicationCall) -> int | None:
    return annotation(call.start).get("site")


def _reorder(graph: fx.Graph, order: list[fx.Node]) -> None:
    output = next(iter(reversed(graph.nodes)))
    for node in order:
        output.prepend(node)
