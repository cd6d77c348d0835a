"""What the passes decided, as plain data: one :class:`Site` per all_reduce, one :class:`GraphReport` per graph.

The passes publish a report for every graph that they see. ``collect_reports()`` gives these reports to code that compiles a
model and shows what happened.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from tw_compile.kernels.collective.wires import EXACT
from tw_compile.planning.plan import Plan

SCHEMA_VERSION = 1

Decision = Literal["fused", "refused", "gated"]
Producer = Literal["mm", "other"]
Consumer = Literal["fed", "other"]


@dataclass(frozen=True)
class Site:
    """One all_reduce of a graph and what was decided about it.

    ``bytes`` is the message of the unfused all_reduce (tokens x hidden x element size), ``None`` when the token count is
    symbolic. ``transport`` is set when the site was fused. ``reason`` is empty when it was fused, else the name of the refusal
    (:class:`tw_compile.passes.reasons.Refusal`) or of the gate. ``producer`` is what makes the message of the fused operator:
    the operator's own ``mm``, or another operator, whose result it is given. Where thresholds were asked, ``backend`` is what
    the unfused all_reduce would use, ``entry`` the range of the table that decided, and ``source`` where that range comes from.
    ``quantisation`` says what happened to a quantisation of the norm's result: it is ``float8_e4m3fn`` where the quantisation
    is part of the form, with ``_per_token``, ``_per_group64`` or ``_per_group128`` appended if scales are made of the result;
    the name of a :class:`tw_compile.passes.reasons.QuantRefusal` where the quantisation stays behind the norm; empty where
    there is none.
    ``wire`` is how the rows of the fused operator travel. Where another wire was asked for, ``wire_refusal`` is the name of a
    :class:`tw_compile.passes.reasons.WireRefusal`. ``feeds`` is what makes the sum: ``attention``, ``mlp``, ``attention+mlp``
    where both do, or empty where nobody has asked or neither makes it. ``consumer`` is what reads the norm's result: GEMMs that
    are ``fed`` its rows as they arrive, or another operator, which waits for all rows. Where GEMMs might be fed and are not,
    ``feed_refusal`` is the name of a :class:`tw_compile.passes.reasons.FeedRefusal`, and ``feed_detail`` explains it for this
    site.
    """

    index: int
    layer: int | None
    form: str
    decision: Decision
    reason: str
    bytes: int | None
    transport: str | None
    detail: str = ""
    node: str = ""
    producer: Producer = "other"
    backend: str = ""
    entry: str = ""
    source: str = ""
    quantisation: str = ""
    wire: str = EXACT
    wire_refusal: str = ""
    feeds: str = ""
    consumer: Consumer = "other"
    feed_refusal: str = ""
    feed_detail: str = ""


SplitMode = Literal["off", "split", "join"]


@dataclass(frozen=True)
class OverlapWindow:
    """Operators that run one after another while the same calls are in flight.

    Attributes:
        kind: ``prologue``, ``attention``, ``qkv``, ``join``, ``o_proj``, ``mlp`` or ``epilogue``.
        computes: The half that computes, 1 or 2; or ``joined`` or ``shared``.
        beside: The calls in flight as ``(site, half)``; the site is None for a collective.
        operators: How many operators compute something.
        overlap_sms: SMs of the calls of the other half that are hidden here.
        gemms_leaving_sms: GEMMs, by the planner's names, and the SMs that they leave to the calls.
        compute_us, communication_us, us: The predicted times of compute, of communication, and of both beside each other; None
            where the plan has no such window.
    """

    kind: str
    computes: int | str
    beside: tuple[tuple[int | None, int | str], ...]
    operators: int
    overlap_sms: int = 0
    gemms_leaving_sms: tuple[tuple[str, int], ...] = ()
    compute_us: float | None = None
    communication_us: float | None = None
    us: float | None = None


@dataclass(frozen=True)
class Overlap:
    """How the halves of a split graph hide each other's communication.

    Attributes:
        calls: The number of calls.
        exposed: The number of calls beside which nothing of the other half computes, by reason.
        windows: The windows in the order in which they run.
        loose: Operators that belong behind a call, but that the compiler may move in front of it.
        in_slot: The number of calls whose results stay in the slot's memory, where peers write them. All readers of these
            results are done by the next call.
        refused: Why the operators are not in the order of the weave; empty where they are.
    """

    calls: int = 0
    windows: tuple[OverlapWindow, ...] = ()
    exposed: dict[str, int] = field(default_factory=dict)
    loose: tuple[str, ...] = ()
    refused: str = ""
    in_slot: int = 0


@dataclass(frozen=True)
class Split:
    """What became of the tokens of one graph, where option ``split`` is not ``off``.

    Attributes:
        asked: The value of the option.
        mode: ``off``; ``split``: each half has its own attention; ``join``: attention of all tokens between split projections.
        reason: Why the tokens are not split, when the mode is ``off``: a name of
            :class:`tw_compile.passes.reasons.SplitRefusal` or :class:`tw_compile.planning.Off`. ``detail`` says it in words.
        unit: What is counted: ``token`` or ``request``.
        sizes: The sizes of both halves in that unit; expressions where the token count is symbolic.
        duplicated, shared, joined, slices, cats: See :class:`tw_compile.passes.split.SplitReport`.
        joins: How many operators join the halves, by reason; ``join_details`` names them.
        plan: What was predicted. Where the token count is symbolic, the plan is for one of several token counts.
            ``device_profile`` is the profile that the plan is for.
        overlap: How the halves are ordered; None when the mode is ``off``.
    """

    asked: str
    mode: SplitMode
    reason: str = ""
    detail: str = ""
    unit: str = ""
    sizes: tuple[int | str, ...] = ()
    duplicated: int = 0
    shared: int = 0
    joined: int = 0
    slices: int = 0
    cats: int = 0
    joins: dict[str, int] = field(default_factory=dict)
    join_details: tuple[str, ...] = ()
    device_profile: str = ""
    plan: Plan | None = None
    overlap: Overlap | None = None

    def as_dict(self) -> dict[str, Any]:
        result = asdict(self)
        if self.plan is not None:
            result["plan"] |= {"us": self.plan.us, "gain": self.plan.gain}
        return result


PassOutcome = Literal["changed", "unchanged", "refused", "failed", "undone", "off", "not_run"]


@dataclass(frozen=True)
class PassReport:
    """What became of one pass on one graph.

    Attributes:
        name: The name of the pass, as ``tw_compile.disable_passes`` takes it.
        outcome: ``changed`` or ``unchanged``: the pass ran, and did or did not change the graph. ``refused``: the pass does not
            handle this graph. ``failed``: the pass raised. ``undone``: the pass had changed the graph when another pass of its
            transaction raised. ``off``: switched off. ``not_run``: a pass that it needs did not run or was
            refused, or an earlier pass failed.
        seconds: The time of the pass, including the copy of the graph from which it would be undone; 0.0 if it did not run.
        counts: What the pass counts, by name.
        detail: Why the pass was refused, failed or did not run.
    """

    name: str
    outcome: PassOutcome
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    detail: str = ""


@dataclass
class GraphReport:
    """What the pipeline did to one graph.

    ``seconds`` is the time of all passes together; ``passes`` has a report of each pass, in order. ``split`` is None where that
    option is off, or where ``auto`` finds no all_reduce. ``tokens`` is the range of token counts (inclusive) that the host
    compiles the graph for, if the host gives one. ``fused_by_host`` counts fused operators of the host's own, whose all_reduces
    are not among ``sites``. ``from_cache``: the graph came out of Inductor's cache, and this is the report from when the graph
    was rewritten.
    """

    sites: list[Site] = field(default_factory=list)
    split: Split | None = None
    seconds: float = 0.0
    warning: str = ""
    tokens: tuple[int, int | None] | None = None
    fused_by_host: int = 0
    passes: list[PassReport] = field(default_factory=list)
    from_cache: bool = False

    @property
    def summary(self) -> str:
        """One line: ``from cache: 4 of 5 all_reduces fused, {'no_rms_norm': 1}``."""
        counts = self.counts
        origin = "from cache: " if self.from_cache else ""
        refusals = f", {self.refusals}" if self.refusals else ""
        return f"{origin}{counts['fused']} of {counts['all_reduce']} all_reduces fused{refusals}"

    @property
    def counts(self) -> dict[str, int]:
        decisions = Counter(site.decision for site in self.sites)
        return {
            "all_reduce": len(self.sites),
            "fused": decisions["fused"],
            "refused": decisions["refused"],
            "gated": decisions["gated"],
        }

    @property
    def refusals(self) -> dict[str, int]:
        """How often each reason was given, most frequent first."""
        return dict(Counter(str(site.reason) for site in self.sites if site.reason).most_common())

    @property
    def quantisations(self) -> dict[str, int]:
        """How often each :attr:`Site.quantisation` came, most frequent first."""
        return dict(Counter(site.quantisation for site in self.sites if site.quantisation).most_common())

    @property
    def wires(self) -> dict[str, int]:
        """How many fused sites have each wire but ``exact``, and how often each :attr:`Site.wire_refusal` came."""
        names = [site.wire for site in self.sites if site.decision == "fused" and site.wire != EXACT]
        return dict(Counter([*names, *(site.wire_refusal for site in self.sites if site.wire_refusal)]).most_common())

    @property
    def fed(self) -> dict[str, int]:
        """How many fused sites have GEMMs that are ``fed``, and how often each :attr:`Site.feed_refusal` came."""
        names = [site.consumer for site in self.sites if site.decision == "fused" and site.consumer == "fed"]
        return dict(Counter([*names, *(site.feed_refusal for site in self.sites if site.feed_refusal)]).most_common())

    def as_dict(self) -> dict[str, Any]:
        return {
            "sites": [asdict(site) for site in self.sites],
            "counts": self.counts,
            "quantisations": self.quantisations,
            "wires": self.wires,
            "fed": self.fed,
            "split": None if self.split is None else self.split.as_dict(),
            "seconds": self.seconds,
            "tokens": self.tokens,
            "fused_by_host": self.fused_by_host,
            "from_cache": self.from_cache,
            "passes": [asdict(report) for report in self.passes],
        }


_collectors: list[list[GraphReport]] = []
_lock = threading.Lock()


def publish(report: GraphReport) -> None:
    """Hand a finished report to every open :func:`collect_reports`."""
    with _lock:
        for collector in _collectors:
            collector.append(report)


@contextlib.contextmanager
def collect_reports() -> Iterator[list[GraphReport]]:
    """Collect the report of every graph that is compiled inside the ``with`` block, in order.

    For a graph that comes out of Inductor's cache, the backend ``tw_compile`` publishes the report from when the graph was
    rewritten, marked ``from_cache``. The graph has no report where none was kept, or with the bare
    :class:`tw_compile.TWCompilePass`.
    """
    collected: list[GraphReport] = []
    with _lock:
        _collectors.append(collected)
    try:
        yield collected
    finally:
        with _lock:
            # Not by remove(), which takes the first list that is equal: nested blocks may have collected the same.
            _collectors[:] = [collector for collector in _collectors if collector is not collected]
