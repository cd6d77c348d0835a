"""Fuse all_reduce + residual add + RMSNorm: find, choose a transport, plan the residual's layout, rewrite."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
import torch.fx as fx

from tw_compile import compat
from tw_compile.config import Config
from tw_compile.gating import Gate, Verdict
from tw_compile.graph.layer import layer_of
from tw_compile.graph.predicates import value
from tw_compile.kernels.collective.transport import group_facts
from tw_compile.kernels.collective.transports import (
    TRANSPORTS,
    Choice,
    GroupFacts,
    choose_transport,
    prefer_transport,
)
from tw_compile.passes.contract import Context, Outcome, Pass, TokenRange
from tw_compile.passes.fusion.find import FoundSite, FusionSite, MergedSite, RefusedSite, find_sites
from tw_compile.passes.fusion.forms import read_all_reduce
from tw_compile.passes.fusion.layout import find_seam, plan_layouts
from tw_compile.passes.fusion.rewrite import Rewriter
from tw_compile.passes.fusion.wire import decide_wire
from tw_compile.passes.reasons import QuantRefused, Refusal
from tw_compile.report import Decision, Producer, Site

GATED_BELOW = "below_fuse_min_bytes"
GATED_ABOVE = "above_fuse_max_bytes"
GATED_OFF = "fusion_off"
FLOAT8 = "float8_e4m3fn"
GATED_FASTER_UNFUSED = "faster_unfused"


@dataclass(frozen=True)
class FusionDecisions:
    """What was decided about each all_reduce of a graph, in graph order."""

    sites: tuple[Site, ...]


def fuse_all_reduce_rms_norm(
    graph: fx.Graph, config: Config, gate: Gate, tokens: TokenRange | None = None
) -> list[Site]:
    """Rewrite ``graph`` in place and say what was decided about each all_reduce, in graph order.

    ``gate`` decides which sizes are fused, for CUDA tensors and where ``config`` doesn't insist on a transport. ``tokens``: the
    token counts that the host will run the graph with, where it knows better than the graph's symbols do.

    If an exception is raised, the graph is as it was, or computes the same.
    """
    sites = find_sites(graph, gate.node.capability)
    decided: list[Site] = []
    fused: list[tuple[int, FusionSite, Site, fx.Node | None]] = []
    for index, entry in enumerate(sites):
        decision = _decide(index, entry, config, gate, tokens)
        decided.append(decision)
        if isinstance(entry, FusionSite) and decision.transport is not None:
            gemm = entry.gemm if decision.producer == "mm" else None
            fused.append((index, entry, decision, gemm))
    if not fused:
        return decided
    # A site's residual may come from a site whose all_reduce is issued later, but whose sum is made earlier.
    position = {node: place for place, node in enumerate(graph.nodes)}
    fused.sort(key=lambda item: position[item[1].h])
    rewriter = Rewriter(graph)
    layouts = plan_layouts(
        [site for _, site, *_ in fused],
        [decision.transport or "" for _, _, decision, _ in fused],
        find_seam(graph),
        [decision.wire for _, _, decision, _ in fused],
    )
    try:
        for (index, site, decision, gemm), layout in zip(fused, layouts, strict=True):
            assert decision.transport is not None
            rewriter.insert(site, index, layout, decision.transport, gemm, decision.wire)
    except Exception:
        rewriter.roll_back()
        raise
    rewriter.commit()
    return decided


def _fuse(graph: fx.Graph, context: Context) -> Outcome:
    decided = FusionDecisions(tuple(fuse_all_reduce_rms_norm(graph, context.config, context.gate, context.tokens)))
    context.keep(decided)
    counts = Counter[str](site.decision for site in decided.sites)
    return Outcome(bool(counts["fused"]), counts)


FUSE = Pass("fuse_all_reduce_rms_norm", _fuse, rolls_back=True)


def gated_sites(graph: fx.Graph, detail: str) -> list[Site]:
    """What to report where the pass is switched off: every all_reduce stays."""
    return _left_sites(graph, "gated", GATED_OFF, detail)


def failed_sites(graph: fx.Graph, detail: str) -> list[Site]:
    """What to report when the rewrite raised: every all_reduce stays."""
    return refused_sites(graph, Refusal.REWRITE_FAILED, detail)


def refused_sites(graph: fx.Graph, reason: StrEnum, detail: str) -> list[Site]:
    """Every all_reduce of the graph, refused for one reason."""
    return _left_sites(graph, "refused", reason, detail)


def _left_sites(graph: fx.Graph, decision: Decision, reason: str, detail: str) -> list[Site]:
    nodes = [node for node in graph.nodes if read_all_reduce(node) is not None]
    return [
        Site(index, layer_of(node), "all_reduce", decision, reason, None, None, detail, node.name)
        for index, node in enumerate(nodes)
    ]


def _decide(index: int, entry: FoundSite, config: Config, gate: Gate, tokens: TokenRange | None) -> Site:
    all_reduce = entry.all_reduce
    size = all_reduce.bytes()
    verdict: Verdict | None = None

    def site(
        decision: Decision,
        reason: str,
        form: str,
        transport: str | None = None,
        detail: str = "",
        producer: Producer = "other",
    ) -> Site:
        decided = Site(
            index, all_reduce.layer, form, decision, reason, size, transport, detail, all_reduce.node.name, producer
        )
        if isinstance(entry, FusionSite) and entry.quantisation is not None:
            left = entry.quantisation if isinstance(entry.quantisation, QuantRefused) else None
            note = None if left is None else f"not quantised: {left.detail}"
            decided = replace(
                decided,
                quantisation=_quantised_to(entry) if left is None else left.reason,
                detail="; ".join(filter(None, (detail, note))),
            )
        if verdict is None:
            return decided
        return replace(decided, backend=str(verdict.backend), entry=verdict.entry, source=verdict.source)

    if isinstance(entry, RefusedSite):
        return site("refused", entry.refused.reason, "all_reduce", detail=entry.refused.detail)
    if isinstance(entry, MergedSite):
        target = _decide(index, entry.into, config, gate, tokens)
        detail = f"travels with {entry.into.all_reduce.node.name}" if target.decision == "fused" else target.detail
        merged = site(target.decision, target.reason, f"merged into {target.form}", target.transport, detail)
        return replace(
            merged,
            backend=target.backend,
            entry=target.entry,
            source=target.source,
            wire=target.wire,
            wire_refusal=target.wire_refusal,
            feeds=target.feeds,
        )
    if not config.fuse:
        return site("gated", GATED_OFF, entry.form, detail="tw_compile.fuse is False")
    partial = value(all_reduce.partial)
    assert partial is not None
    rows = _row_counts(partial, tokens)
    smallest, largest = (None if count is None else count * _row_bytes(partial) for count in rows)
    if largest is not None and largest < config.fuse_min_bytes:
        return site("gated", GATED_BELOW, entry.form, detail=f"{largest} < {config.fuse_min_bytes} bytes")
    if config.fuse_max_bytes is not None and smallest is not None and smallest > config.fuse_max_bytes:
        return site("gated", GATED_ABOVE, entry.form, detail=f"{smallest} > {config.fuse_max_bytes} bytes")
    facts = group_facts(all_reduce.group_name, partial.device.type)
    if facts.device_type == "cuda" and config.transport == "auto":
        verdict = _verdict(partial, facts, gate, rows)
        if not verdict.fused:
            return site("gated", GATED_FASTER_UNFUSED, entry.form, detail=verdict.reason)
    choice = _transport(partial, facts, config, verdict)
    if choice.name is None:
        by_size = choice.limited_by == "hidden_size"
        reason = Refusal.HIDDEN_SIZE_NOT_SUPPORTED if by_size else Refusal.TRANSPORT_NOT_AVAILABLE
        return site("refused", reason, entry.form, detail=choice.reason)
    producer: Producer = "mm" if _absorbs_gemm(entry, choice.name, config) else "other"
    travels = decide_wire(entry, config, gate, facts.world_size, choice.name, partial, rows)
    detail = "; ".join(filter(None, (choice.reason, travels.detail)))
    decided = site("fused", "", entry.form, choice.name, detail, producer)
    refusal = "" if travels.refused is None else travels.refused.reason
    return replace(decided, wire=travels.wire, wire_refusal=refusal, feeds=travels.feeds)


def _quantised_to(site: FusionSite) -> str:
    per = "" if site.quantised is None else site.quantised.scales_per
    return f"{FLOAT8}_per_{per}" if per else FLOAT8


def _absorbs_gemm(site: FusionSite, transport: str, config: Config) -> bool:
    """Whether the fused operator computes the site's GEMM, too.

    This saves a copy. With ``auto``, a GEMM that Inductor tunes stays outside: tuning gains more than the copy costs.
    """
    if config.absorb_mm == "auto" and (not TRANSPORTS[transport].message_buffers or compat.tunes_gemms()):
        return False
    return config.absorb_mm != "never" and site.gemm is not None


def _row_bytes(partial: torch.Tensor) -> int:
    return int(partial.shape[-1]) * partial.dtype.itemsize


def _row_counts(partial: torch.Tensor, tokens: TokenRange | None) -> TokenRange:
    """How many rows the message may have: by its shape, or by the host's range where its first dim is a symbol by itself."""
    rows = partial.shape[0]
    if tokens is not None and partial.dim() == 2 and compat.is_symbol(rows):
        return tokens
    low, high = compat.size_bounds(partial.numel())
    hidden_size = int(partial.shape[-1])
    return low // hidden_size, None if high is None else high // hidden_size


def _verdict(partial: torch.Tensor, facts: GroupFacts, gate: Gate, rows: TokenRange) -> Verdict:
    """The gate's verdict, by the bytes of the message, or by their bounds where the token count is symbolic."""
    row_bytes = _row_bytes(partial)
    dtype = str(partial.dtype).removeprefix("torch.")
    if rows[0] == rows[1]:
        nbytes = rows[0] * row_bytes
        return gate.decide(nbytes, world_size=facts.world_size, dtype=dtype, hosts=facts.hosts)
    return gate.decide_range(rows, row_bytes, world_size=facts.world_size, dtype=dtype, hosts=facts.hosts)


def _transport(partial: torch.Tensor, facts: GroupFacts, config: Config, verdict: Verdict | None) -> Choice:
    """The transport that the table names, if it was asked and the transport can serve the message; else the option's."""
    hidden_size, element_bytes = int(partial.shape[-1]), partial.dtype.itemsize
    if verdict is not None and verdict.transport is not None:
        return prefer_transport(facts, hidden_size, element_bytes, verdict.transport)
    return choose_transport(facts, hidden_size, element_bytes, config.transport)
