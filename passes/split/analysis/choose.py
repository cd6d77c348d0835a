"""Decide whether and where the tokens of a graph are split: a pure function of graph, options and device profile."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ParamSpec, Protocol, TypeVar

import torch
import torch.fx as fx

from tw_compile import compat
from tw_compile.config import Config
from tw_compile.graph.predicates import is_call, same_size
from tw_compile.kernels.collective import ops
from tw_compile.passes.contract import HostGraph
from tw_compile.passes.reasons import ATTENTION_JOINS, HostAttention, JoinReason, SplitRefusal, SplitRefused
from tw_compile.passes.split.analysis.layer import GraphLayer, layer_of_graph, layer_of_piece
from tw_compile.passes.split.analysis.layout import Join
from tw_compile.passes.split.analysis.token_axis import TokenAxis, analyse, find_token_axis
from tw_compile.planning import ALL_EXACT, DeviceProfile, Link, Mode, Plan, plan_layer
from tw_compile.planning.halves import MOST_TOKENS, TILE_ROWS, FirstHalf, constant_first_half
from tw_compile.planning.plan import RESOLUTION
from tw_compile.planning.ranges import Ranges

P = ParamSpec("P")
T = TypeVar("T")

_SEVERAL = "several requests of unknown length are split between them, not inside of one"
_REFUSED_FOR = {
    JoinReason.UNKNOWN_OPERATOR: SplitRefusal.OPERATOR_WITHOUT_RULE,
    JoinReason.SCALE_OF_ALL_TOKENS: SplitRefusal.SCALE_OF_ALL_TOKENS,
    JoinReason.EXPERTS: SplitRefusal.EXPERTS,
    JoinReason.LORA: SplitRefusal.LORA,
}
"""Joins for which a host's graph is refused with a special name. The first of these reasons that occurs gives the name."""
_LOOKED_AT = 2**14
"""For a graph without an upper bound, a refusal says where a split would pay, up to this number of tokens."""


@dataclass(frozen=True)
class Counts:
    """The token counts that a graph is for: ``low`` to ``high``, or any more if that is None. Others get a graph of their own.

    ``tokens`` is the graph's symbolic count.
    """

    tokens: torch.SymInt
    low: int
    high: int | None

    def __str__(self) -> str:
        return f"{self.low} and any more" if self.high is None else f"{self.low} to {self.high}"


@dataclass(frozen=True)
class SplitChoice:
    """Half 1 gets ``first`` of the axis's units. ``plan`` is for these halves; None if an option asks for them without a plan.

    ``attention_once``: a host's attention can't be split, whatever the plan. ``counts``: the token counts that the choice is
    for, if the graph could have others; None if it is for all.
    """

    axis: TokenAxis
    first: int | FirstHalf
    plan: Plan | None = None
    attention_once: bool = False
    counts: Counts | None = None

    @property
    def join_attention(self) -> bool:
        """Whether attention runs once for all tokens."""
        return self.attention_once or (self.plan is not None and self.plan.mode is Mode.JOIN)


@dataclass(frozen=True)
class NotSplit:
    """The name of the reason, the words that explain it, and the plan if one was made. ``counts``: see :class:`SplitChoice`."""

    reason: str
    detail: str
    plan: Plan | None = None
    counts: Counts | None = None


class Analyser(Protocol):
    """Computes ``analyse(*operands, **options)``, or has done so before: see :meth:`Context.analysis`."""

    def __call__(self, analyse: Callable[P, T], *operands: P.args, **options: P.kwargs) -> T: ...


def _compute(analyse: Callable[P, T], *operands: P.args, **options: P.kwargs) -> T:
    return analyse(*operands, **options)


@dataclass(frozen=True)
class _Question:
    """What is to be split, and for which host. ``host`` None: for torch.compile. ``link`` None: no link's rates are known."""

    graph: fx.Graph
    config: Config
    profile: DeviceProfile | None
    host: HostGraph | None
    analysis: Analyser
    link: Link | None


@dataclass(frozen=True)
class _Planner:
    """Plans for one way to split one layer, at any number of tokens that it may have."""

    axis: TokenAxis
    batch: int
    profile: DeviceProfile
    layer: GraphLayer
    kernel: str
    attention: str
    gemms_leave_sms: bool
    host: HostGraph | None = None
    link: Link | None = None
    joins_gemms: bool = True

    def plan(self, tokens: int, first: int | None = None) -> Plan:
        return plan_layer(
            self.profile,
            self.layer.shape,
            tokens,
            kernel=self.kernel,
            sequences=(tokens // self.batch,) * self.batch,
            attention=self.attention,
            cut_sequences=self.axis.unit == "token",
            first=first,
            gemms_leave_sms=self.gemms_leave_sms,
            joins_gemms=self.joins_gemms,
            host_us=0.0 if self.host is None else self.host.launch_us(tokens),
            link=self.link,
            wires=self.layer.wires,
        )

    def plan_anyway(self, tokens: int, first: int) -> Plan:
        """Plan halves that are already decided: even where splitting does not pay, attention is cut if it can be."""
        anyway = replace(self, host=None)
        plan = anyway.plan(tokens, first)
        if plan.mode is Mode.OFF and self.attention == "auto":
            return replace(anyway, attention=Mode.SPLIT).plan(tokens, first)
        return plan

    def ranges(self) -> Ranges:
        plan = functools.cache(self.plan)
        requests = self.batch if self.axis.unit == "request" else 1
        return Ranges(lambda tokens, first, least: plan(tokens, first), self.layer.shape.world_size, requests)

    def first(self, plan: Plan) -> int:
        """Half 1 of ``plan`` in units of the axis."""
        return plan.sizes[0] if self.axis.unit == "token" else plan.sizes[0] * self.batch // plan.tokens


def choose_split(
    graph: fx.Graph,
    config: Config,
    profile: DeviceProfile | None,
    analysis: Analyser = _compute,
    link: Link | None = None,
) -> SplitChoice | NotSplit:
    """What ``config.split`` means for ``graph``, as the fusion pass leaves it. ``graph`` is not changed and gets no guards.

    Args:
        profile: The device that ``auto`` plans for, see :func:`tw_compile.current.current_profile`.
        analysis: Computes analyses of the graph, or finds those that were computed before.
        link: The link that sums travel over where they don't use peer memory, see :func:`tw_compile.current.current_link`.
    """
    question = _Question(graph, config, profile, None, analysis, link)
    if config.split_tokens is None and profile is None:  # checked first, as this takes no time
        return _no_profile()
    axis = find_token_axis(graph)
    if isinstance(axis, SplitRefused):
        return NotSplit(axis.reason, axis.detail)
    if config.split_tokens is not None:
        return _as_asked(question, axis)
    axes = [axis]
    requests = _requests(graph, axis)
    if requests is not None:
        axes.insert(0, requests)
    planners = _planners(question, axes)
    if isinstance(planners, NotSplit):
        return planners
    if isinstance(axis.tokens, int):
        return choice_for(planners, axis.tokens)
    low, high = compat.size_bounds(axis.tokens)
    if high is None and compat.can_keep_within(axis.tokens):
        return choice_for_example(planners[0], axis.tokens, low, compat.example_of(axis.tokens, low))
    return choice_for_range(planners[0], low, high)


def choose_split_of_host(
    graph: fx.Graph,
    config: Config,
    profile: DeviceProfile | None,
    host: HostGraph,
    analysis: Analyser = _compute,
    link: Link | None = None,
) -> SplitChoice | NotSplit:
    """As :func:`choose_split`, for a graph of a host that compiles for a range of token counts.

    Halves meet at the graph's outputs, and in attention if attention runs once, but nowhere else. One function of the token
    count gives the first half for the whole range.
    """
    if not any(is_call(node, *ops.STARTS, *ops.MM_STARTS) for node in graph.nodes):
        return NotSplit(SplitRefusal.NO_COMMUNICATION, "no fused call in the piece whose time could be hidden")
    if host.refused is not None:
        return NotSplit(host.refused.reason, host.refused.detail)
    if config.split_tokens is None and profile is None and not host.measures:
        return _no_profile()
    axis = find_token_axis(graph, piece=True)
    if isinstance(axis, SplitRefused):
        return NotSplit(axis.reason, axis.detail)
    once = host.attention is HostAttention.ONCE
    verdicts = analysis(analyse, graph, axis, join_attention=once).verdicts.values()
    joins = [one for one in verdicts if isinstance(one, Join) and not (once and one.reason in ATTENTION_JOINS)]
    for reason, refusal in _REFUSED_FOR.items():
        named = [one for one in joins if one.reason is reason]
        if named:
            return NotSplit(refusal, named[0].detail)
    if joins:
        return NotSplit(SplitRefusal.NEEDS_ALL_TOKENS, joins[0].detail)
    choice = _choose_of_host(_Question(graph, config, profile, host, analysis, link), axis, host)
    return replace(choice, attention_once=once) if isinstance(choice, SplitChoice) else choice


def _choose_of_host(question: _Question, axis: TokenAxis, host: HostGraph) -> SplitChoice | NotSplit:
    if question.config.split_tokens is not None:
        return _as_asked(question, axis)
    planners = _planners(question, [axis])
    if isinstance(planners, NotSplit):
        return _equal_halves(axis, planners, host) if host.measures else planners
    return (
        choice_for(planners, axis.tokens)
        if isinstance(axis.tokens, int)
        else choice_for_range(planners[0], *host.counts)
    )


def _equal_halves(axis: TokenAxis, unplanned: NotSplit, host: HostGraph) -> SplitChoice | NotSplit:
    """Equal halves, in whole tiles of GEMMs, of a graph for which no plan can be made; ``unplanned`` if that is impossible."""
    low, high = host.counts
    if high is not None:
        for tile in TILE_ROWS:
            with contextlib.suppress(ValueError):
                half = FirstHalf(low, high, multiple=tile)
                return SplitChoice(axis, half(axis.tokens) if isinstance(axis.tokens, int) else half)
    return unplanned


def _requests(graph: fx.Graph, axis: TokenAxis) -> TokenAxis | None:
    """The same token axis with whole requests as its units; None if the graph has fewer than two requests."""
    if not isinstance(axis.batch, int) or axis.batch < 2:
        return None
    found = find_token_axis(graph, unit="request")
    return found if isinstance(found, TokenAxis) else None


def _planners(question: _Question, axes: list[TokenAxis]) -> list[_Planner] | NotSplit:
    """A planner for each of ``axes``, which count the same tokens in different units."""
    graph, config, profile, host = question.graph, question.config, question.profile, question.host
    if profile is None:
        return _no_profile()
    axis = axes[-1]
    is_piece = host is not None and host.is_piece
    layer = (
        layer_of_piece(graph, axis, host.attention_kernel)
        if host is not None and is_piece
        else layer_of_graph(graph, axis)
    )
    if isinstance(layer, SplitRefused):
        return NotSplit(layer.reason, layer.detail)
    attention = layer.shape.attention
    if attention.masked and attention.kernel not in profile.attention:
        detail = f"{profile.name}'s profile has no attention.{attention.kernel}, of a kernel that is given a mask"
        return NotSplit(SplitRefusal.ATTENTION_NOT_MEASURED, detail)
    link = question.link
    if link is not None and not link.serves(layer.transport, layer.peer_access):
        link = None
    kernel = layer.transport if link is not None else _kernel_of_peers(layer, profile, config)
    if isinstance(kernel, NotSplit):
        return kernel
    if link is None and layer.wires != ALL_EXACT and profile.coded_kernel is None:
        detail = f"{profile.name}'s profile has no kernel whose rows travel in codes, and those of the sums do: {layer.wires}"
        return NotSplit(SplitRefusal.TRANSPORT_NOT_PLANNED, detail)
    if not isinstance(axis.batch, int):
        return NotSplit(SplitRefusal.TOKEN_COUNT_UNKNOWN, f"the graph is for any number of requests ({axis.batch})")
    leave = config.split_gemm_sms == "auto" and not compat.tunes_gemms()
    joins = config.joins_gemms and not compat.tunes_gemms()
    return [
        _Planner(each, axis.batch, profile, layer, kernel, _attention(question, each), leave, host, link, joins)
        for each in axes
    ]


def _kernel_of_peers(layer: GraphLayer, profile: DeviceProfile, config: Config) -> str | NotSplit:
    """The fused kernel that the layer is planned for where its sums take no link whose rates are known."""
    if not layer.fused:
        detail = f"the sums are not fused, and no rates are known of {layer.transport} here"
        return NotSplit(SplitRefusal.LAYER_NOT_RECOGNISED, detail)
    kernel = profile.kernel_of_transport(layer.transport, named=config.device_profile != "auto")
    if kernel is None:
        detail = f"neither {profile.name}'s profile nor a link has rates of the transport {layer.transport} here"
        return NotSplit(SplitRefusal.TRANSPORT_NOT_PLANNED, detail)
    return kernel


def _as_asked(question: _Question, axis: TokenAxis) -> SplitChoice | NotSplit:
    """The split that the option names, between requests if half 1 ends with a request. The plan says what its windows run with.

    If the number of tokens is symbolic, the plan is for the largest number.
    """
    first, tokens, host = question.config.split_tokens, axis.tokens, question.host
    assert first is not None
    if not isinstance(tokens, int):
        half = _constant_half(first, *(compat.size_bounds(tokens) if host is None else host.counts))
        if isinstance(half, NotSplit):
            return half
        if not same_size(axis.batch, 1):
            return NotSplit(SplitRefusal.TOKEN_COUNT_UNKNOWN, _SEVERAL)
        planners = _planners(question, [axis])
        return SplitChoice(
            axis, half, None if isinstance(planners, NotSplit) else planners[0].plan_anyway(half.high, first)
        )
    if first >= tokens:
        return NotSplit(SplitRefusal.TOO_FEW_TOKENS, f"a first half of {first} leaves none of {tokens} tokens")
    requests, units = None if host else _requests(question.graph, axis), first
    if requests is not None and isinstance(axis.batch, int) and first * axis.batch % tokens == 0:
        axis, units = requests, first * axis.batch // tokens
    planners = _planners(question, [axis])
    return SplitChoice(axis, units, None if isinstance(planners, NotSplit) else planners[0].plan_anyway(tokens, first))


def _attention(question: _Question, axis: TokenAxis) -> str:
    """The mode that the planner must choose, or ``auto``.

    ``join`` where token rules or the host keep attention in one piece; ``split`` where no sequence is cut; ``auto`` otherwise.
    """
    if question.host is not None and question.host.attention is not HostAttention.HALVES:
        return Mode.JOIN
    if ATTENTION_JOINS & set(question.analysis(analyse, question.graph, axis, join_attention=False).joins):
        return Mode.JOIN
    return "auto" if axis.unit == "token" else Mode.SPLIT


def choice_for(planners: list[_Planner], tokens: int) -> SplitChoice | NotSplit:
    """The fastest way to split a known number of tokens; between requests if the planner can't tell the ways apart."""
    plans = [(planner, planner.plan(tokens)) for planner in planners]
    chosen = [one for one in plans if one[1].mode is not Mode.OFF]
    if chosen:
        near = min(plan.us for _, plan in chosen) * (1.0 + RESOLUTION)
        planner, plan = next(one for one in chosen if one[1].us <= near)
        return SplitChoice(planner.axis, planner.first(plan), plan)
    return _off(min((plan for _, plan in plans), key=lambda plan: plan.predicted.split_us or math.inf))


def choice_for_range(planner: _Planner, low: int, high: int | None) -> SplitChoice | NotSplit:
    """One graph for ``low`` to ``high`` tokens is split if that pays at some counts and costs nothing at the others."""
    if planner.axis.unit == "token" and planner.batch != 1:
        return NotSplit(SplitRefusal.TOKEN_COUNT_UNKNOWN, _SEVERAL)
    ranges, requests = planner.ranges(), planner.axis.unit == "request"
    low = max(low, planner.batch)
    if high is None or (high > MOST_TOKENS and not requests):
        return _unbounded(low, None if low >= _LOOKED_AT else _where_it_pays(planner, ranges, low, _LOOKED_AT))
    found = ranges.split(low, high)
    if found is not None:
        paying = [plan for plan in found.plans if plan.mode is not Mode.OFF]
        return SplitChoice(planner.axis, found.first, paying[len(paying) // 2])
    plans = [ranges.at(tokens, least=low) for tokens in ranges.counts(low, high)]
    off = [plan for plan in plans if plan.mode is Mode.OFF]
    if len(off) == len(plans):
        return _off(min(off, key=_cost))
    detail = f"one graph for {low} to {high} tokens, and no first half is harmless at all of them"
    where = _where_it_pays(planner, ranges, low, high)
    worst = max(plans, key=_cost)
    if worst.off is not None:
        detail = f"{detail}: at {worst.tokens} it would be off ({worst.off})"
    return NotSplit(SplitRefusal.TOKEN_COUNT_UNKNOWN, f"{detail}; {where}" if where else detail, worst)


def choice_for_example(planner: _Planner, tokens: torch.SymInt, low: int, example: int) -> SplitChoice | NotSplit:
    """A graph for ``low`` and any more tokens, of which it has ``example`` now, is made for the counts that are split alike.

    The rest gets graphs of its own, when such a count comes. So long prompts are split, although short ones must not be.
    """
    batch = planner.batch
    everywhere = choice_for_range(planner, low, None)
    if (planner.axis.unit == "token" and batch != 1) or max(low, batch) >= _LOOKED_AT:
        return everywhere
    parts = planner.ranges().cut(max(low, batch), _LOOKED_AT // batch * batch)
    if all(part.split is None for part in parts):
        return everywhere
    inside = next((part for part in parts if part.low <= example <= part.high), None)
    if inside is None:
        counts = Counts(tokens, parts[-1].high + 1, None)
        detail = f"a graph for {counts} tokens, which nobody plans for; fewer get graphs of their own"
        return NotSplit(SplitRefusal.TOKEN_COUNT_UNKNOWN, detail, counts=counts)
    counts = Counts(tokens, inside.low, inside.high)
    choice = choice_for_range(planner, inside.low, inside.high)
    if isinstance(choice, NotSplit):
        choice = replace(choice, detail=f"{choice.detail}; a graph for {counts} tokens, others get graphs of their own")
    return replace(choice, counts=counts)


def _where_it_pays(planner: _Planner, ranges: Ranges, low: int, high: int) -> str:
    """The counts of a range at which a graph for these counts alone would be split, in words; empty if there are none."""
    parts = [part for part in ranges.cut(low, high // planner.batch * planner.batch) if part.split is not None]
    if not parts:
        return ""
    best = max(parts, key=lambda part: part.split.saved if part.split else 0.0)
    pays = " and ".join(f"{part.low} to {part.high}" for part in parts)
    if planner.host is not None:
        return f"{pays} would be split"
    size, count = ("", 1) if planner.axis.unit == "token" else (" a request", planner.batch)
    bounds = f"mark_dynamic(min={best.low // count}, max={best.high // count})"
    return f"{pays} would be split{size and f', {count} requests'}: bound it, as by torch._dynamo.{bounds}{size}"


def _cost(plan: Plan) -> float:
    """The predicted time of the split layer divided by that of the unsplit one."""
    return (plan.predicted.split_us or math.inf) / plan.predicted.unsplit_us


def _constant_half(first: int, low: int, high: int | None) -> FirstHalf | NotSplit:
    """A first half of always ``first`` tokens, for graphs of ``low`` to ``high`` tokens."""
    if high is None or high > MOST_TOKENS:
        return _unbounded(low)
    try:
        return constant_first_half(first, low, high)
    except ValueError as error:
        return NotSplit(SplitRefusal.TOO_FEW_TOKENS, str(error))


def _no_profile() -> NotSplit:
    return NotSplit(SplitRefusal.NO_DEVICE_PROFILE, "no device profile says how long a layer takes")


def _unbounded(low: int, where: str | None = None) -> NotSplit:
    """The refusal of a graph whose token count has no upper bound.

    ``where`` says at which of the first :data:`_LOOKED_AT` counts a split would pay; empty if at none; None if nobody looked.
    """
    detail = f"one graph for {low} and any more tokens"
    if where == "":
        return NotSplit(SplitRefusal.TOKEN_COUNT_UNKNOWN, f"{detail}; of up to {_LOOKED_AT} none pays")
    how = (
        "bound it, as by torch._dynamo.mark_dynamic(min=, max=)" if where is None else f"of up to {_LOOKED_AT}, {where}"
    )
    return NotSplit(SplitRefusal.TOKEN_COUNT_UNKNOWN, f"{detail}; {how}")


def _off(plan: Plan) -> NotSplit:
    assert plan.off is not None
    return NotSplit(plan.off, plan.reason, plan)
