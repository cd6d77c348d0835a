"""Who needs which rows of the residual.

After a two-shot site each rank holds the rows of ``h`` that it owns. If the only other user of ``h`` is the residual add
of the next fused site, on the same group and the same rows, it stays like that ("sharded") and is never moved. Such rows
are kept in float32: that costs no communication and saves a rounding at every site. If anything else reads ``h`` (a graph
output, a refused site, another group, a sum of several residuals) the site shares all rows ("replicated"); if nothing
does, it is not kept ("none"). The two layouts have different shapes, so a graph can't mix them up unnoticed.

A residual that is handed from graph to graph (``handed.py``) stays sharded, too, in a tensor of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.fx as fx

from tw_compile.graph.predicates import (
    is_cast,
    is_lossless_cast,
    is_view,
    peel_views,
    same_size,
    value,
    views_and_casts_of,
)
from tw_compile.kernels.all_reduce_rms_norm.spec import ResidualOut
from tw_compile.passes.fusion.find import FusionSite


@dataclass(frozen=True)
class ResidualLayout:
    """``source`` is the site whose sharded residual this one takes in; None for a whole residual, or none at all.

    ``taken`` is the node that takes in one from another graph, ``passed`` the one that hands the site's own to another graph.
    """

    source: FusionSite | None
    out: ResidualOut
    taken: fx.Node | None = None
    passed: fx.Node | None = None

    @property
    def takes_rows(self) -> bool:
        """Whether the site's residual are the rows that the rank owns."""
        return self.source is not None or self.taken is not None


def plan_layouts(
    sites: list[FusionSite], transports: list[str], handed: frozenset[fx.Node] = frozenset()
) -> list[ResidualLayout]:
    """A layout per site, in the same order; ``handed`` are the nodes that take in and pass on sharded residuals.

    NCCL leaves whole sums on every rank, so there a sharded residual would only cost an all_gather: it stays whole.
    """
    by_stream = {site.stream: site for site in sites}
    whole_sums = {site.h for site, transport in zip(sites, transports, strict=True) if transport == "nccl"}
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
        whole_reads.update(node for node in (site.bias, site.norm.weight) if node is not None)
        if source is None:
            whole_reads.update(site.residuals)
    replaced = set().union(*(site.replaced() for site in sites))
    passed = {
        id(site): user
        for site in sites
        for user in (() if site.stream is None else site.stream.users)
        if user in handed and site.h not in whole_sums and _rows_of(user, site)
    }
    whole = {id(site) for site in sites if _needed_whole(site, {*replaced, *passed.values()}, whole_reads)}
    chained = {id(source) for source in sources if source is not None}
    layouts = []
    for site, source in zip(sites, sources, strict=True):
        out: ResidualOut = "none"
        if id(site) in whole:
            out = "replicated"
        elif id(site) in chained or id(site) in passed:
            out = "sharded"
        taken = None
        if len(site.residuals) == 1 and site.h not in whole_sums and site.residuals[0] in handed:
            taken = site.residuals[0] if _rows_of(site.residuals[0], site) else None
        passed_on = passed.get(id(site)) if out == "sharded" else None
        given = None if source is None or id(source) in whole else source
        layouts.append(ResidualLayout(given, out, taken, passed_on))
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


def _rows_of(handed: fx.Node, site: FusionSite) -> bool:
    """Whether a residual that is handed over, ``[tokens, hidden]``, is shared out as the rows of the site's message are."""
    residual, message = value(handed), value(site.all_reduce.partial)
    if residual is None or message is None or handed.args[1] != site.all_reduce.group_name:
        return False
    return residual.dim() == 2 and message.dim() == 2 and same_size(residual.shape[0], message.shape[0])


def _same_rows(producer: FusionSite, consumer: FusionSite) -> bool:
    """Whether both sites share rows out in the same way: one group, one token count, one dtype."""
    if producer.all_reduce.group_name != consumer.all_reduce.group_name:
        return False
    made, used = producer.stream_value, value(consumer.residuals[0])
    first, second = value(producer.all_reduce.partial), value(consumer.all_reduce.partial)
    if made is None or used is None or first is None or second is None:
        return False
    return made.dtype == used.dtype and same_size(first.numel(), second.numel()) and first.shape[-1] == second.shape[-1]
