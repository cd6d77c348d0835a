"""Decide which rows of a residual each site keeps.

After a two-shot site each rank holds the rows of ``h`` that it owns. If the only other user of ``h`` is the residual add
of the next fused site, on the same group and the same rows, it stays like that ("sharded") and is never moved. Such rows
are kept in float32: that costs no communication and saves a rounding at every site. If anything else reads ``h`` (a graph
output, a refused site, another group, a sum of several residuals) the site shares all rows ("replicated"). If nothing
reads ``h``, it is not kept ("none"). The two layouts have different shapes, so a graph can't mix them up unnoticed.

A residual that one graph leaves to the next (``kernels/collective/seam.py``, ``residual_seam.py``) also stays sharded, if both
sides shard it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch.fx as fx

from tw_compile.graph.predicates import (
    is_call,
    is_cast,
    is_lossless_cast,
    is_view,
    peel_views,
    same_size,
    value,
    views_and_casts_of,
)
from tw_compile.kernels.collective.residual_seam import enter_residual, leave_residual
from tw_compile.kernels.collective.seam import enter_layers, leave_layers
from tw_compile.kernels.collective.spec import ResidualOut
from tw_compile.kernels.collective.transports import TRANSPORTS
from tw_compile.kernels.collective.wires import EXACT
from tw_compile.passes.fusion.find import FusionSite


@dataclass(frozen=True)
class ResidualLayout:
    """``source`` is the site whose sharded residual this one takes in; None for a whole residual, or none at all.

    ``entered``: the site takes in a residual that another graph has left. ``left``: its own residual is left to another graph.
    """

    source: FusionSite | None
    out: ResidualOut
    entered: bool = False
    left: bool = False

    @property
    def takes_rows(self) -> bool:
        """Whether the site takes in only the rows of a residual that the rank owns."""
        return self.source is not None or self.entered


@dataclass(frozen=True)
class Seam:
    """The seams of a graph.

    ``entered`` is the residual that it enters with, and ``enter`` the node that enters. ``leave`` is the node that leaves
    ``left``; both are None in a model's last graph. ``residual_alone``: no hidden states are left with it, so it may be entered
    in another form than the one in which it was left (``residual_seam.py``).
    """

    entered: fx.Node
    enter: fx.Node
    leave: fx.Node | None = None
    left: fx.Node | None = None
    residual_alone: bool = False

    @property
    def group_names(self) -> tuple[object, object]:
        """The groups of ranks that share the rows of what is entered, and of what is left."""
        return self.enter.args[1], None if self.leave is None else self.leave.args[2]


def find_seam(graph: fx.Graph) -> Seam | None:
    """The seams of a graph. None for a graph without seams, and for the ends of a model where all tokens are left whole."""
    entered = [user for node in graph.find_nodes(op="call_function", target=enter_layers) for user in node.users]
    residuals = [user for user in entered if is_call(user, operator.getitem) and user.args[1] == 1]
    leaves = graph.find_nodes(op="call_function", target=leave_layers)
    if len(residuals) == len(leaves) == 1:
        return Seam(residuals[0], residuals[0].args[0], leaves[0], leaves[0].args[1])  # type: ignore[arg-type]
    enters = graph.find_nodes(op="call_function", target=enter_residual)
    leaves = graph.find_nodes(op="call_function", target=leave_residual)
    if len(enters) != 1 or len(leaves) > 1:
        return None
    leave = leaves[0] if leaves else None
    return Seam(enters[0], enters[0], leave, None if leave is None else leave.args[0], residual_alone=True)


def plan_layouts(
    sites: list[FusionSite],
    transports: list[str],
    seam: Seam | None = None,
    wires: Sequence[str] | None = None,
) -> list[ResidualLayout]:
    """A layout for each site, in the same order. ``wires``: the wire of each site; None: all exact.

    Some transports leave whole sums on every rank. There a sharded residual would only cost an all_gather, so it stays whole.
    With a wire, ranks don't have whole sums.
    """
    wires = wires or [EXACT] * len(sites)
    by_stream = {site.stream: site for site in sites}
    whole_sums = {
        site.h
        for site, transport, wire in zip(sites, transports, wires, strict=True)
        if wire == EXACT and not TRANSPORTS[transport].keeps_shards
    }
    sources: list[FusionSite | None] = []
    whole_reads: set[fx.Node] = set()
    for site in sites:
        source = None
        if len(site.residuals) == 1:
            candidate = by_stream.get(peel_views(site.residuals[0]))
            if candidate is not None and _same_rows(candidate, site) and candidate.h not in whole_sums:
                source = candidate
        sources.append(source)
        whole_reads.update(site.partials())
        whole_reads.update((*site.biases, *site.norm.vectors()))
        if source is None:
            whole_reads.update(site.residuals)
    replaced = set().union(*(site.replaced() for site in sites))
    enters = next((site for site in sites if _enters(site, seam) and site.h not in whole_sums), None)
    leaves = next((site for site in sites if _leaves(site, seam) and site.h not in whole_sums), None)
    alone = seam is not None and seam.residual_alone
    if alone and enters is None:
        leaves = None  # the graph behind is most likely like this one
    spared = replaced if seam is None or seam.leave is None or leaves is None else {*replaced, seam.leave}
    whole = {id(site) for site in sites if _needed_whole(site, spared, whole_reads)}
    if alone and leaves is not None and id(leaves) in whole:
        leaves = None
    if not alone and (enters is None or leaves is None or id(leaves) in whole):
        if enters is not leaves:
            return plan_layouts(
                sites, transports, wires=wires
            )  # neighbouring graphs are like this one, so its two seams must agree
        enters = leaves = None
    chained = {id(source) for source in sources if source is not None}
    layouts = []
    for site, source in zip(sites, sources, strict=True):
        out: ResidualOut = "none"
        if id(site) in whole:
            out = "replicated"
        elif id(site) in chained or site is leaves:
            out = "sharded"
        given = None if source is None or id(source) in whole else source
        layouts.append(ResidualLayout(given, out, site is enters, site is leaves))
    return layouts


def _needed_whole(site: FusionSite, replaced: set[fx.Node], whole_reads: set[fx.Node]) -> bool:
    """Whether anything but a chained residual add reads ``h``, directly or through views and casts."""
    for node in () if site.stream is None else views_and_casts_of(site.stream):
        if node in whole_reads:
            return True
        for user in node.users:
            see_through = is_view(user) or (is_cast(user) and is_lossless_cast(user))
            if user not in replaced and not see_through:
                return True
    return False


def _enters(site: FusionSite, seam: Seam | None) -> bool:
    """Whether the residual that the graph enters with is the site's, and nothing but the site reads it."""
    if seam is None or list(site.residuals) != [seam.entered] or not set(seam.entered.users) <= set(site.replaced()):
        return False
    return _rows_of(seam.entered, seam.group_names[0], site)


def _leaves(site: FusionSite, seam: Seam | None) -> bool:
    """Whether the site's residual is what the graph leaves to the next graph."""
    if seam is None or site.stream is None or seam.left is not site.stream:
        return False
    return _rows_of(site.stream, seam.group_names[1], site)


def _rows_of(residual: fx.Node, group_name: object, site: FusionSite) -> bool:
    """Whether the rows of a residual, ``[tokens, hidden]``, belong to the same ranks as the rows of the site's message."""
    whole, message = value(residual), value(site.all_reduce.partial)
    if whole is None or message is None or group_name != site.all_reduce.group_name:
        return False
    return whole.dim() == 2 and message.dim() == 2 and same_size(whole.shape[0], message.shape[0])


def _same_rows(producer: FusionSite, consumer: FusionSite) -> bool:
    """Whether both sites distribute rows over the ranks in the same way: one group, one token count, one dtype."""
    if producer.all_reduce.group_name != consumer.all_reduce.group_name:
        return False
    made, used = producer.stream_value, value(consumer.residuals[0])
    first, second = value(producer.all_reduce.partial), value(consumer.all_reduce.partial)
    if made is None or used is None or first is None or second is None:
        return False
    return made.dtype == used.dtype and same_size(first.numel(), second.numel()) and first.shape[-1] == second.shape[-1]
