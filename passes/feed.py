"""Let the GEMMs behind a fused norm begin with the rows that their rank has, and take the other ranks' rows as they arrive.

    before:  start; wait_; q = mm(hidden, wq); k = mm(hidden, wk)   after:  start; q, k = fed_joint_mm(hidden, [wq, wk]); wait_
    before:  start; wait_; silu(mm(hidden, gate)) * mm(hidden, up)  after:  start; fed_gated_mm(hidden, gate, up); wait_

Option ``feed_mm`` asks for it. A norm's result is fed only if all its readers are GEMMs that one kernel launch computes: any
other reader would wait for all rows. If a result is not fed, the site records the named reason. These decisions, and so the
form of each call's kernels, follow from the graph and the options, which all ranks share. No measurement of a single rank
decides them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx

from tw_compile import compat
from tw_compile.autotune.turns import Turns, measured_turns
from tw_compile.graph.predicates import aten, is_call, same_shape, value
from tw_compile.kernels.collective.fed_mm import fed_gated_mm, fed_joint_mm
from tw_compile.kernels.collective.transports import TRANSPORTS
from tw_compile.kernels.collective.wires import EXACT
from tw_compile.kernels.gemm.mm_leaving_sms import gated_mm_leaving_sms, joint_mm_leaving_sms
from tw_compile.passes import joint
from tw_compile.passes.contract import Context, Outcome, Pass, TokenRange
from tw_compile.passes.fusion.fuse import FusionDecisions
from tw_compile.passes.join import Measure, gemms_of, rows_served
from tw_compile.passes.nodes import annotation
from tw_compile.passes.reasons import FeedRefusal, FeedRefused, SplitRefused
from tw_compile.passes.split.peephole.in_slot import readers_of
from tw_compile.passes.split.rewrite.duplicate import SplitReport
from tw_compile.passes.split.schedule.dependences import CommunicationCall, argument, find_calls
from tw_compile.report import Site

FED_FROM_TOKENS = 4096
"""Shorter messages are not fed. On two H100 layers of 512 and 1024 tokens lost 10% and 4%, and one of 4096 gained 1.8%:
GEMMs of few tokens wait for the other ranks' rows (``benchmarks/kernel-notes.md``, section 8)."""
_FED: dict[Any, Any] = {joint_mm_leaving_sms: fed_joint_mm, gated_mm_leaving_sms: fed_gated_mm}


def feed_gemms(
    graph: fx.Graph, tokens: TokenRange | None, measure: Measure | None = None
) -> dict[int, FeedRefused | None]:
    """Feed the GEMMs that can be fed. The result says, by index of each fused site, why it is not fed; None: it is fed.

    ``tokens`` are the token counts that the graph serves; None: any. ``measure`` (None: :func:`measured_turns`) says for which
    numbers of rows our kernel is faster where rows are not fed.
    """
    calls = find_calls(graph)
    if isinstance(calls, SplitRefused):
        return {}
    place = {node: index for index, node in enumerate(graph.nodes)}
    decided: dict[int, FeedRefused | None] = {}
    for call in calls:
        site = annotation(call.start).get("site")
        if site is None or call.enters or call.leaves:
            continue
        found = fed_by(call, place, tokens)
        decided[site] = found if isinstance(found, FeedRefused) else None
        if not isinstance(found, FeedRefused):
            _feed(call, found, _turns(found, tokens, measure or measured_turns))
    return decided


def fed_by(
    call: CommunicationCall, place: dict[fx.Node, int], tokens: TokenRange | None
) -> list[fx.Node] | FeedRefused:
    """The GEMMs that read the result of ``call``, in the graph's order, if they can be fed."""
    hidden = argument(call.wait, "hidden")
    transport, result = argument(call.start, "transport"), value(hidden)
    assert result is not None
    if not TRANSPORTS[transport].feeds:
        return FeedRefused(FeedRefusal.TRANSPORT_NOT_FED, f"transport {transport}")
    if result.dtype != torch.bfloat16:
        return FeedRefused(FeedRefusal.DTYPE_NOT_SUPPORTED, f"{hidden.name} is {result.dtype}")
    wire = argument(call.start, "wire")
    if wire != EXACT:
        return FeedRefused(FeedRefusal.ROWS_IN_CODES, f"wire {wire}")
    if argument(call.start, "residual_out") == "replicated":
        return FeedRefused(
            FeedRefusal.RESIDUAL_ON_ALL_RANKS, f"all ranks want all rows of {call.start.name}'s residual"
        )
    readers = readers_of(hidden)
    if readers is None:
        return FeedRefused(FeedRefusal.RESULT_USED_ELSEWHERE, f"the graph returns {hidden.name}")
    other = [node for node in readers if not is_call(node, aten.mm.default, aten.addmm.default)]
    if other or not readers:
        names = ", ".join(sorted(node.name for node in other)) or "nothing"
        return FeedRefused(FeedRefusal.RESULT_USED_ELSEWHERE, f"{names} reads {hidden.name}")
    gemms = sorted(readers, key=place.__getitem__)
    if joint.beside(gemms[0], gemms[1:]) != gemms:
        names = ", ".join(node.name for node in gemms)
        return FeedRefused(FeedRefusal.GEMM_NOT_OURS, f"one launch of our kernel can't compute {names}")
    multiplied = value(joint.rows_of(gemms[0]))
    # The view between may be a slice of the rows, or have other rows of the same values.
    if multiplied is None or not same_shape(multiplied, result):
        return FeedRefused(FeedRefusal.GEMM_NOT_OURS, f"{gemms[0].name} does not multiply the rows of {hidden.name}")
    rows = rows_served(gemms[0], tokens)
    if rows is None or rows[-1] < FED_FROM_TOKENS:
        most = 0 if rows is None else rows[-1]
        return FeedRefused(FeedRefusal.MESSAGE_TOO_SMALL, f"{most} < {FED_FROM_TOKENS} tokens")
    return gemms


def _turns(gemms: Sequence[fx.Node], tokens: TokenRange | None, measure: Measure) -> Turns:
    """The numbers of rows for which our kernel computes ``gemms`` where the call is not fed, as for joined GEMMs."""
    described, rows = gemms_of(gemms), rows_served(gemms[0], tokens)
    if described is None or rows is None:
        return ()
    return measure(described, rows, gemms[0].meta["val"].device) or ()


def _feed(call: CommunicationCall, gemms: Sequence[fx.Node], turns: Turns) -> None:
    """Replace the GEMMs by one operator in front of the wait."""
    node = joint.join(gemms).adopt()
    (rows, *operands), hidden = node.args[:-1], argument(call.wait, "hidden")
    for given in node.all_input_nodes:
        if given is not rows:
            joint.hoist(given, call.wait)
    call.start.update_kwarg("feed_from", FED_FROM_TOKENS)
    call.wait.prepend(node)
    node.target = _FED[node.target]
    node.args = (hidden, *operands, list(turns), argument(call.wait, "group_name"), argument(call.wait, "slot"))
    assert isinstance(rows, fx.Node)
    if rows is not hidden and not rows.users:
        joint.erase(rows)


def _look(graph: fx.Graph, context: Context) -> Outcome | None:
    decided = context.kept(FusionDecisions)
    if context.config.feed_mm == "never" or decided is None:
        return Outcome(False)
    whole = _of_the_whole_graph(context)
    if whole is None:
        return None
    return _noted(context, {site.index: whole for site in decided.sites if site.decision == "fused"})


def _run(graph: fx.Graph, context: Context) -> Outcome:
    return _noted(context, feed_gemms(graph, context.tokens))


def _noted(context: Context, by_site: dict[int, FeedRefused | None]) -> Outcome:
    """The outcome. Also adds ``by_site`` to the sites' decisions that ``context`` keeps."""
    decided = context.needed(FusionDecisions)
    context.keep(FusionDecisions(tuple(_with(site, by_site) for site in decided.sites)))
    counts: dict[str, int] = {}
    for refused in by_site.values():
        name = "fed" if refused is None else str(refused.reason)
        counts[name] = counts.get(name, 0) + 1
    return Outcome(bool(counts.get("fed")), counts)


def _of_the_whole_graph(context: Context) -> FeedRefused | None:
    if context.kept(SplitReport) is not None:
        return FeedRefused(FeedRefusal.GRAPH_SPLIT, "the graph is split, and its GEMMs run beside communication")
    if compat.tunes_gemms():
        return FeedRefused(FeedRefusal.GEMMS_TUNED, "Inductor tunes GEMMs (max_autotune)")
    return None


def _with(site: Site, by_site: dict[int, FeedRefused | None]) -> Site:
    if site.index not in by_site:
        return site
    refused = by_site[site.index]
    if refused is None:
        return replace(site, consumer="fed")
    detail = "; ".join(filter(None, (site.detail, f"not fed: {refused.detail}")))
    return replace(site, feed_refusal=refused.reason, detail=detail)


FEED = Pass("feed_gemms", _run, look=_look)
