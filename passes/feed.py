"""Let the GEMMs behind a fused norm begin with the rows that their rank has, and take the other ranks' rows as they arrive.

    before:  start; wait_; q = mm(hidden, wq); k = mm(hidden, wk)   after:  start; q, k = fed_joint_mm(hidden, [wq, wk]); wait_
    before:  start; wait_; silu(mm(hidden, gate)) * mm(hidden, up)  after:  start; fed_gated_mm(hidden, gate, up); wait_

Option ``feed_mm`` allows it, and does so by default. A norm's result is fed only if all its readers are GEMMs that one kernel
launch computes: any other reader would wait for all rows. If a result is not fed, the site records the named reason.

All ranks must run the same form of each call. Most of what decides is the same on all ranks: the graph, the options, the
group, the GPUs' compute capability. But a rank's part of a matrix may have other columns than another rank's, and measured
times differ. So ranks take the decision of the rank that comes first (``agree.py``). A rank whose own GEMMs can't be fed runs
the call in the same form and collects the rows behind it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx

from tw_compile import compat
from tw_compile.agree import agreed
from tw_compile.autotune.turns import Gemms, Turns, measured_turns
from tw_compile.graph.predicates import aten, is_call, same_shape, value
from tw_compile.kernels.collective.fed_mm import fed_gated_mm, fed_joint_mm
from tw_compile.kernels.collective.transports import TRANSPORTS
from tw_compile.kernels.collective.wires import EXACT
from tw_compile.kernels.gemm.mm_leaving_sms import gated_mm_leaving_sms, joint_mm_leaving_sms
from tw_compile.kernels.runtime.wgmma import CAPABILITY
from tw_compile.passes import joint
from tw_compile.passes.contract import Context, Outcome, Pass, TokenRange
from tw_compile.passes.fusion.fuse import FusionDecisions
from tw_compile.passes.join import Measure, gemms_of, rows_served
from tw_compile.passes.nodes import annotation
from tw_compile.passes.reasons import FeedRefusal, FeedRefused, SplitRefused
from tw_compile.passes.split.peephole.in_slot import readers_of
from tw_compile.passes.split.rewrite.duplicate import SplitReport
from tw_compile.passes.split.schedule.dependences import CommunicationCall, argument, find_calls
from tw_compile.planning import feeding
from tw_compile.report import Site

FED_UP_TO_RANKS = 2
"""Larger groups are not fed. On four H100 and four H200 layers of 4096 tokens gained nothing, and the rows need memory on each
rank."""
_FED: dict[Any, Any] = {joint_mm_leaving_sms: fed_joint_mm, gated_mm_leaving_sms: fed_gated_mm}


@dataclass(frozen=True)
class Feedable:
    """A call, and the GEMMs that can be fed the rows of its result, in the graph's order.

    ``turns``: the numbers of rows for which our kernel computes the GEMMs where the call is not fed, as for joined GEMMs.
    ``feed_from``: the number of tokens from which on the call is fed.
    """

    call: CommunicationCall
    gemms: tuple[fx.Node, ...]
    turns: Turns
    feed_from: int


@dataclass(frozen=True)
class NotHere:
    """A call whose GEMMs are not fed on this rank, as another rank's perhaps are.

    ``follows``: the number of tokens from which on the other ranks feed theirs; 0: they don't.
    """

    call: CommunicationCall
    refused: FeedRefused
    follows: int = 0


Found = Mapping[int, Feedable | NotHere | FeedRefused]
"""By index of each fused site: what can be fed, or why nothing can. A plain ``FeedRefused`` holds on all ranks."""


def feed_gemms(
    graph: fx.Graph,
    tokens: TokenRange | None,
    measure: Measure | None = None,
    capability: tuple[int, int] | None = None,
    always: bool = False,
) -> Found:
    """Feed what :func:`find_feedable` finds and all ranks feed. Return what was found."""
    return _feed_all(agreed_on(find_feedable(graph, tokens, capability, always, measure), tokens, always))


def find_feedable(
    graph: fx.Graph,
    tokens: TokenRange | None,
    capability: tuple[int, int] | None,
    always: bool = False,
    measure: Measure | None = None,
) -> Found:
    """What can be fed behind each fused call on this rank.

    ``tokens`` are the token counts that the graph serves; None: any. ``capability`` is that of the GPUs; None on a machine
    without GPUs. ``measure`` (None: :func:`measured_turns`) says for which numbers of rows our kernel is faster where rows are
    not fed. ``always``: whatever the numbers of tokens and ranks.
    """
    calls = find_calls(graph)
    if isinstance(calls, SplitRefused):
        return {}
    place = {node: index for index, node in enumerate(graph.nodes)}
    found: dict[int, Feedable | NotHere | FeedRefused] = {}
    for call in calls:
        site = annotation(call.start).get("site")
        if site is None or call.enters or call.leaves:
            continue
        refused = _refused_whatever_reads(call, tokens, capability, always)
        found[site] = (
            _found_behind(call, place, tokens, always, measure or measured_turns) if refused is None else refused
        )
    return found


def agreed_on(found: Found, tokens: TokenRange | None, always: bool) -> Found:
    """``found``, with what the rank that came first feeds, and from which number of tokens on, in the place of this rank's.

    The key has what all ranks find alike. A graph with the same key may get the decision of another one: then calls have a form
    that this graph did not need, but the same one on all ranks.
    """
    alike = [(site, _alike(one)) for site, one in sorted(found.items())]
    if all(isinstance(one, FeedRefused) for one in found.values()):
        return found
    own = {site: one.feed_from for site, one in found.items() if isinstance(one, Feedable)}
    key = hashlib.sha256(repr((alike, tokens, always)).encode()).hexdigest()[:32]
    fed: dict[int, int] = agreed(f"fed/{key}", lambda: own)
    return {site: _as_agreed(one, fed.get(site, 0)) for site, one in found.items()}


def _alike(one: Feedable | NotHere | FeedRefused) -> str:
    if isinstance(one, FeedRefused):
        return str(one.reason)
    hidden = argument(one.call.wait, "hidden")
    names = sorted(str(user.target) for user in hidden.users)
    return f"{_result(one.call).shape[-1]} columns, {compat.size_bounds(_result(one.call).shape[0])} rows, {names}"


def _as_agreed(one: Feedable | NotHere | FeedRefused, feed_from: int) -> Feedable | NotHere | FeedRefused:
    """``feed_from``: the number of tokens from which on the first rank's GEMMs are fed; 0: never."""
    if isinstance(one, NotHere):
        return replace(one, follows=feed_from)
    if isinstance(one, Feedable) and not feed_from:
        return NotHere(
            one.call, FeedRefused(FeedRefusal.GEMM_NOT_OURS, "the rank that compiled first does not feed its part")
        )
    return replace(one, feed_from=feed_from) if isinstance(one, Feedable) else one


def _refused_whatever_reads(
    call: CommunicationCall, tokens: TokenRange | None, capability: tuple[int, int] | None, always: bool
) -> FeedRefused | None:
    """Why nothing is fed the result of ``call``, whatever reads it; None if GEMMs may be fed."""
    transport = argument(call.start, "transport")
    if not TRANSPORTS[transport].feeds:
        return FeedRefused(FeedRefusal.TRANSPORT_NOT_FED, f"transport {transport}")
    ranks = _ranks(call)
    if ranks > FED_UP_TO_RANKS and not always:
        return FeedRefused(FeedRefusal.GROUP_TOO_LARGE, f"{ranks} > {FED_UP_TO_RANKS} ranks")
    if _result(call).device.type == "cuda" and capability not in (None, CAPABILITY):
        return FeedRefused(FeedRefusal.DEVICE_NOT_SUPPORTED, f"no GEMM for {capability} takes rows as they arrive")
    least, most = feeding.tokens_to_send(_result(call).shape[-1], ranks), _rows_of(call, tokens)[1]
    if most is not None and most < least and not always:
        return FeedRefused(FeedRefusal.MESSAGE_TOO_SMALL, f"{most} < {least} tokens")
    wire = argument(call.start, "wire")
    if wire != EXACT:
        return FeedRefused(FeedRefusal.ROWS_IN_CODES, f"wire {wire}")
    return None


def _rows_of(call: CommunicationCall, tokens: TokenRange | None) -> tuple[int, int | None]:
    """The fewest and the most rows of the result; None: any number."""
    rows = _result(call).shape[0]
    least, most = compat.size_bounds(rows)
    if tokens is not None and not isinstance(rows, int):
        factor = compat.known_factor(rows)  # as in rows_served
        least = max(least, tokens[0] * factor)
        if tokens[1] is not None:
            most = tokens[1] * factor if most is None else min(most, tokens[1] * factor)
    return least, most


def _found_behind(
    call: CommunicationCall, place: dict[fx.Node, int], tokens: TokenRange | None, always: bool, measure: Measure
) -> Feedable | NotHere | FeedRefused:
    gemms = _gemms_behind(call, place)
    if isinstance(gemms, FeedRefused):
        return NotHere(call, gemms) if gemms.reason is FeedRefusal.GEMM_NOT_OURS else gemms
    described = gemms_of(gemms)
    if described is None:
        return NotHere(call, FeedRefused(FeedRefusal.GEMM_NOT_OURS, "a matrix has a symbolic size"))
    feed_from = 1 if always else _feed_from(call, described)
    least, most = _rows_of(call, tokens)
    if most is not None and most < feed_from:
        why = f"{most} < {feed_from} tokens, which these GEMMs need to be busy while rows arrive"
        return NotHere(call, FeedRefused(FeedRefusal.MESSAGE_TOO_SMALL, why))
    turns = _turns(gemms, described, tokens, measure)
    if least < feed_from and not turns and _result(call).device.type == "cuda":
        why = f"from {least} tokens on, and with fewer than {feed_from} these GEMMs are better left as they are"
        return NotHere(call, FeedRefused(FeedRefusal.MESSAGE_TOO_SMALL, why))
    return Feedable(call, tuple(gemms), turns, feed_from)


def _feed_from(call: CommunicationCall, gemms: Gemms) -> int:
    ranks = _ranks(call)
    return max(feeding.tokens_to_send(_result(call).shape[-1], ranks), feeding.tokens_to_fill(gemms.columns, ranks))


def _gemms_behind(call: CommunicationCall, place: dict[fx.Node, int]) -> list[fx.Node] | FeedRefused:
    """The GEMMs that read the result of ``call``, if they can be fed. ``place`` is the place of each node in the graph."""
    hidden, result = argument(call.wait, "hidden"), _result(call)
    if result.dtype != torch.bfloat16:
        return FeedRefused(FeedRefusal.DTYPE_NOT_SUPPORTED, f"{hidden.name} is {result.dtype}")
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
    if len(gemms) == 1:
        return FeedRefused(FeedRefusal.GEMM_ALONE, f"{gemms[0].name} is the only one, and the library's can't be fed")
    return gemms


def _ranks(call: CommunicationCall) -> int:
    return dist.get_world_size(compat.resolve_process_group(argument(call.start, "group_name")))


def _result(call: CommunicationCall) -> torch.Tensor:
    result = value(argument(call.wait, "hidden"))
    assert result is not None
    return result


def _feed_all(found: Found) -> Found:
    for one in found.values():
        if isinstance(one, Feedable):
            _feed(one)
        elif isinstance(one, NotHere) and one.follows:
            one.call.start.update_kwarg("feed_from", one.follows)
    return found


def _turns(gemms: Sequence[fx.Node], described: Gemms, tokens: TokenRange | None, measure: Measure) -> Turns:
    rows = rows_served(gemms[0], tokens)
    if rows is None:
        return ()
    return measure(described, rows, gemms[0].meta["val"].device) or ()


def _feed(found: Feedable) -> None:
    """Replace the GEMMs by one operator in front of the wait."""
    call = found.call
    node = joint.join(found.gemms).adopt()
    (rows, *operands), hidden = node.args[:-1], argument(call.wait, "hidden")
    for given in node.all_input_nodes:
        if given is not rows:
            joint.hoist(given, call.wait)
    call.start.update_kwarg("feed_from", found.feed_from)
    call.wait.prepend(node)
    node.target = _FED[node.target]
    node.args = (hidden, *operands, list(found.turns), argument(call.wait, "group_name"), argument(call.wait, "slot"))
    assert isinstance(rows, fx.Node)
    if rows is not hidden and not rows.users:
        joint.erase(rows)


def _look(graph: fx.Graph, context: Context) -> Outcome | None:
    decided = context.kept(FusionDecisions)
    if context.config.feed_mm == "never" or decided is None:
        return Outcome(False)
    whole = _of_the_whole_graph(context)
    if whole is not None:
        return _noted(context, {site.index: whole for site in decided.sites if site.decision == "fused"})
    found = _found(graph, context)
    return None if any(_changes(one) for one in found.values()) else _noted(context, found)


def _run(graph: fx.Graph, context: Context) -> Outcome:
    return _noted(context, _feed_all(_found(graph, context)))


def _found(graph: fx.Graph, context: Context) -> Found:
    capability, always = context.gate.node.capability, context.config.feed_mm == "always"
    found = context.analysis(find_feedable, graph, context.tokens, capability, always)
    return agreed_on(found, context.tokens, always)


def _changes(one: Feedable | NotHere | FeedRefused) -> bool:
    return isinstance(one, Feedable) or (isinstance(one, NotHere) and one.follows > 0)


def _refused(one: Feedable | NotHere | FeedRefused) -> FeedRefused | None:
    """Why no GEMM is fed on this rank; None: one is."""
    if isinstance(one, NotHere):
        return one.refused
    return one if isinstance(one, FeedRefused) else None


def _noted(context: Context, found: Found) -> Outcome:
    """The outcome. Also adds ``found`` to the sites' decisions that ``context`` keeps."""
    decided = context.needed(FusionDecisions)
    context.keep(FusionDecisions(tuple(_with(site, found) for site in decided.sites)))
    counts: dict[str, int] = {}
    for one in found.values():
        refused = _refused(one)
        name = "fed" if refused is None else str(refused.reason)
        counts[name] = counts.get(name, 0) + 1
    return Outcome(any(map(_changes, found.values())), counts)


def _of_the_whole_graph(context: Context) -> FeedRefused | None:
    if context.kept(SplitReport) is not None:
        return FeedRefused(FeedRefusal.GRAPH_SPLIT, "the graph is split, and its GEMMs run beside communication")
    if compat.tunes_gemms():
        return FeedRefused(FeedRefusal.GEMMS_TUNED, "Inductor tunes GEMMs (max_autotune)")
    return None


def _with(site: Site, found: Found) -> Site:
    if site.index not in found:
        return site
    refused = _refused(found[site.index])
    if refused is None:
        return replace(site, consumer="fed")
    return replace(site, feed_refusal=refused.reason, feed_detail=refused.detail)


FEED = Pass("feed_gemms", _run, look=_look)
