"""A contender that runs what the gate chooses. Its row shows what a wrong table costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import torch

from tw_compile.benchmark.contender import Contender, ContenderCall
from tw_compile.benchmark.labels import NCCL, SYMM_ONE_SHOT, SYMM_TWO_SHOT
from tw_compile.benchmark.ours import Operator
from tw_compile.benchmark.peers import SymmetricMemory, UnfusedAllReduce
from tw_compile.benchmark.results import Row, rows_of
from tw_compile.benchmark.spec import MessageSize
from tw_compile.benchmark.variants import OURS, OURS_ON_CPU
from tw_compile.config import Config
from tw_compile.current import current_gate
from tw_compile.gating.facts import Backend
from tw_compile.gating.gate import Verdict
from tw_compile.harness.problems import Problem
from tw_compile.harness.ranks import Ranks
from tw_compile.harness.rows import csv_of
from tw_compile.kernels.collective.transport import node_facts
from tw_compile.kernels.collective.transports import prefer_transport
from tw_compile.kernels.transports.selection import step_for, steps_for

LABEL = "gated"
GOOD_REGRET = 0.02


class Gated(Contender):
    """Runs what the gate decides for a size: the unfused way of its backend, or the operator by its transport.

    The P2P transport chooses the kernel as it does in a model, by the device's table. The residual has the form that
    is natural to the table's step for the size: whole for one-shot, sharded for the others.
    """

    label = LABEL
    kind = "ours"

    def __init__(self) -> None:
        self._chosen: dict[str, Contender] = {}
        self.current: Contender | None = None
        self._why = ""

    def obstacle(self, size: MessageSize, world_size: int) -> str | None:
        self.current = None
        cuda = torch.cuda.is_initialized()
        verdict = current_gate(Config()).decide(size.nbytes, world_size=world_size, dtype=size.dtype)
        way = unfused_way(verdict) if cuda and not verdict.fused else fused_way(verdict, size, world_size, cuda)
        if isinstance(way, str):
            return way
        # All sizes with the same choice share one contender, so its symmetric memory is made once.
        self.current = self._chosen.setdefault(way.label, way)
        self.residual_sharded, self.residual_narrow = self.current.residual_sharded, self.current.residual_narrow
        self._why = verdict.entry
        return self.current.obstacle(size, world_size)

    def num_sms(self, size: MessageSize, world_size: int) -> int | None:
        return None if self.current is None else self.current.num_sms(size, world_size)

    def prepare(self, ranks: Ranks, problem: Problem) -> ContenderCall:
        assert self.current is not None, "obstacle chooses"
        return self.current.prepare(ranks, problem)

    def deviation(self, ranks: Ranks) -> str | None:
        assert self.current is not None, "obstacle chooses"
        return self.current.deviation(ranks)

    def choice(self) -> str | None:
        if self.current is None:
            return None
        kernel = self.current.kernel_name() if isinstance(self.current, Operator) else None
        return f"{self.current.label}{'' if kernel is None else f' ({kernel})'} by {self._why}"


def fused_way(verdict: Verdict, size: MessageSize, world_size: int, cuda: bool) -> Contender | str:
    """The operator by the transport that the verdict asks for, or why this benchmark does not run it."""
    facts = node_facts("cuda" if cuda else "cpu", world_size)
    choice = prefer_transport(facts, size.hidden, size.element_bytes, verdict.transport or "auto")
    known = {variant.label: variant for variant in (OURS if cuda else OURS_ON_CPU)}
    label = f"tw-{choice.name}"
    if choice.name == "p2p":
        step = step_for(steps_for(torch.cuda.get_device_name(), world_size), size.nbytes)
        label = "tw-p2p-replicated" if step is not None and step.algorithm == "push_one_shot" else "tw-p2p"
    if label not in known:
        return f"fused by {choice.name} ({choice.reason}), which this benchmark does not run"
    return Operator(known[label])


def unfused_way(verdict: Verdict) -> Contender | str:
    """The all_reduce of the verdict's backend and a norm, or why this benchmark does not run them."""
    if verdict.backend is Backend.NCCL:
        return UnfusedAllReduce(NCCL)
    if verdict.backend is Backend.SYMM_MEM_ONE_SHOT:
        return SymmetricMemory(SYMM_ONE_SHOT, one_shot=True)
    if verdict.backend is Backend.SYMM_MEM_TWO_SHOT:
        return SymmetricMemory(SYMM_TWO_SHOT, one_shot=False)
    return f"left to {verdict.backend}, which this benchmark does not run"


def set_regret(rows: Iterable[Row]) -> None:
    """Set the regret of one size's gated row: the share by which it took longer than the fastest row with the same work."""
    timed = [
        row
        for row in rows
        if row.kind in ("ours", "peer")
        and row.numerics == "ok"
        and row.p50_us is not None
        and row.gives_what_peers_give
    ]
    best = min(timed, key=lambda row: row.p50_us or 0.0, default=None)
    for row in timed:
        if row.label == LABEL and row.p50_us is not None and best is not None and best.p50_us is not None:
            row.regret, row.best = row.p50_us / best.p50_us - 1.0, best.label


@dataclass(frozen=True)
class Regret:
    """One line of the regret table: the gated row of a size, and the best of that run."""

    world_size: int
    tokens: int
    hidden: int
    nbytes: int
    chosen: str | None
    outcome: str
    gated_us: float | None
    best: str | None
    best_us: float | None
    regret: float | None


def regrets(report: dict[str, Any]) -> list[Regret]:
    """One :class:`Regret` for each size, in the report's order."""
    points = []
    for _, group in groupby(rows_of(report), key=lambda row: (row.hidden, row.tokens)):
        by_label = {row.label: row for row in group}
        if LABEL in by_label:
            row = by_label[LABEL]
            best_us = by_label[row.best].p50_us if row.best is not None else None
            size = (report["world_size"], row.tokens, row.hidden, row.nbytes)
            points.append(Regret(*size, row.chosen, row.outcome, row.p50_us, row.best, best_us, row.regret))
    return points


def regret_line(report: dict[str, Any]) -> str:
    """One line that sums up the regrets of a report."""
    known = [point.regret for point in regrets(report) if point.regret is not None]
    if not known:
        return "gated: no regret, as nothing was measured that says something about speed"
    good = sum(regret <= GOOD_REGRET for regret in known)
    sizes = len(regrets(report))
    missing = "" if len(known) == sizes else f" ({sizes - len(known)} of {sizes} sizes have no gated time)"
    return f"gated: within {GOOD_REGRET:.0%} at {good} of {len(known)} points, worst {max(known):.1%}{missing}"


def regret_csv(report: dict[str, Any]) -> str:
    """CSV with one line for each size. Each line says on what it was measured."""
    names = ("machine", "device", "device_name", "dtype", "repeats")
    return csv_of(report, names, [asdict(regret) for regret in regrets(report)])
