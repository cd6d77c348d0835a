"""The order of all passes, and the function that runs, times and dumps them, skips those that are off, and undoes failures."""

from __future__ import annotations

import difflib
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch.fx as fx

from tw_compile import compat
from tw_compile.graph.copy import copy_of, restore
from tw_compile.graph.snapshot import snapshot
from tw_compile.passes.contract import Context, InductorNeed, Pass
from tw_compile.passes.feed import FEED
from tw_compile.passes.fusion.fuse import FUSE
from tw_compile.passes.join import JOIN
from tw_compile.passes.prefetch import PREFETCH
from tw_compile.passes.split.steps import SPLIT
from tw_compile.report import PassOutcome, PassReport
from tw_compile.sources import source_of

logger = logging.getLogger("tw_compile")

ORDER: tuple[Pass, ...] = (FUSE, *SPLIT, FEED, JOIN, PREFETCH)
"""The project's own passes."""

_DISABLE = "tw_compile.disable_passes"
_RAN = ("changed", "unchanged")

_order: list[Pass] = list(ORDER)
_sources: dict[str, str] = {}
"""What identifies the source of each registered pass, by the pass's name."""


def order() -> tuple[Pass, ...]:
    """All passes in the order in which they run, registered ones included."""
    return tuple(_order)


def register(new: Pass, *, after: str | None = None, before: str | None = None) -> None:
    """Put a pass of your own right behind, or right before, another one, for all graphs compiled from now on.

    The pass's source file is part of the key of Inductor's caches. A pass behind ``lock_order`` finds operators in subgraphs.

    Raises:
        ValueError: The name is taken, the neighbour is unknown, or the place is inside another transaction than the pass's.
    """
    if (after is None) == (before is None):
        raise ValueError(f"register: expected one of after= and before=, got after={after!r}, before={before!r}")
    neighbour = after if before is None else before
    assert neighbour is not None
    names = [each.name for each in _order]
    if new.name in names:
        raise ValueError(f"register: expected a new name, got {new.name!r}, which is a pass already")
    _check_names("register", (neighbour, *new.needs))
    place = names.index(neighbour) + (before is None)
    around = {each.transaction for each in _order[max(place - 1, 0) : place + 1]}
    if 0 < place < len(_order) and len(around) == 1 and "" not in around and new.transaction not in around:
        raise ValueError(
            f"register: expected a pass of the transaction {around.pop()!r}, inside of which its place is, "
            f"got {new.name!r} of {new.transaction!r}"
        )
    _order.insert(place, new)
    _sources[new.name] = " ".join(source_of(step) for step in (new.run, new.look) if step is not None)


def unregister(name: str) -> None:
    """Remove a pass that :func:`register` has added.

    Raises:
        ValueError: No registered pass has this name.
    """
    if name not in _sources:
        raise ValueError(f"unregister: expected one of {', '.join(_sources) or 'no'} registered passes, got {name!r}")
    del _sources[name]
    _order[:] = [each for each in _order if each.name != name]


def identity() -> str:
    """What identifies the registered passes and their places. Empty without any: the project's sources cover its own passes."""
    return repr([(each.name, _sources.get(each.name, "")) for each in _order]) if _sources else ""


def check_names(names: Iterable[str]) -> None:
    """Refuse names that no pass has.

    Raises:
        ValueError: A name is unknown. The message lists all passes, and suggests the nearest name.
    """
    _check_names(_DISABLE, names)


def _check_names(what: str, names: Iterable[str]) -> None:
    known = [each.name for each in _order]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{what}: expected passes, of {', '.join(known)}; got {name!r}{hint}")


@dataclass
class Run:
    """What became of one graph: a report for each pass, in order.

    ``failed`` is the pass that raised ``error``, if one did; the graph is then as it was before its transaction. ``inductor``
    is what Inductor must do with the graph now.
    """

    reports: list[PassReport] = field(default_factory=list)
    failed: Pass | None = None
    error: Exception | None = None
    inductor: set[InductorNeed] = field(default_factory=set)

    @property
    def warning(self) -> str:
        return "" if self.error is None else f"{type(self.error).__name__}: {self.error}"

    def report_of(self, name: str) -> PassReport | None:
        return next((each for each in self.reports if each.name == name), None)


def run(graph: fx.Graph, context: Context, passes: Sequence[Pass] | None = None) -> Run:
    """Run ``passes`` (None: all passes) over ``graph``, and change ``graph`` in place.

    If a pass raises, the pass and its transaction are undone, no later pass runs, and one warning is logged. With
    ``config.strict`` the exception is raised again once the changes are undone.
    """
    passes = order() if passes is None else passes
    off = _switched_off(context.config.disable_passes, passes)
    result = Run()
    before: fx.Graph | None = None
    is_older = False  # whether a pass has changed the graph since ``before`` was copied

    def text() -> str:
        return snapshot(graph)

    for place, current in enumerate(passes):
        if place and not _same_transaction(passes[place - 1], current) and is_older:
            before, is_older = None, False  # otherwise reuse the copy: copying takes as long as many a pass
        outcome, why = _left_out(current, off, result)
        if outcome is not None:
            result.reports.append(PassReport(current.name, outcome, detail=why))
            continue
        compat.trace_artifact(f"tw_compile_{current.name}_before", text)
        begin = time.perf_counter()
        try:
            done = None if current.look is None else current.look(graph, context)
            if done is None:
                if before is None and current.edits and not current.rolls_back:
                    before = copy_of(graph)
                done = current.run(graph, context)
        except Exception as error:
            if before is not None:
                restore(graph, before)
            _note_failure(result, current, error, time.perf_counter() - begin, passes)
            if context.config.strict:
                raise
            message = "tw_compile: %s failed and left a graph as it was: %s"
            logger.warning(message, current.name, result.warning, exc_info=True)
            continue
        seconds = time.perf_counter() - begin
        if done.changed:
            is_older = True
            context.forget(but=current.keeps)
        compat.trace_artifact(f"tw_compile_{current.name}_after", text)
        outcome = "refused" if done.refused else "changed" if done.changed else "unchanged"
        result.reports.append(PassReport(current.name, outcome, seconds, dict(done.counts), done.refused))
    changed = {each.name for each in result.reports if each.outcome == "changed"}
    result.inductor = {need for each in passes if each.name in changed for need in each.inductor}
    return result


def _same_transaction(earlier: Pass, later: Pass) -> bool:
    return bool(later.transaction) and earlier.transaction == later.transaction


def _switched_off(names: tuple[str, ...], passes: Sequence[Pass]) -> dict[str, str]:
    """The passes that are switched off, each with the reason.

    A pass is off if ``names`` has it, or if ``names`` has a pass that is indispensable for its transaction.
    """
    off = {name: f"{_DISABLE} names {name}" for name in names}
    for missing in passes:
        if missing.name in names and missing.indispensable:
            why = f"{_DISABLE} names {missing.name}, without which {missing.indispensable}"
            for other in passes:
                if _same_transaction(missing, other):
                    off.setdefault(other.name, why)
    return off


def _left_out(current: Pass, off: dict[str, str], result: Run) -> tuple[PassOutcome | None, str]:
    """The outcome that the report shows for a pass that does not run, and the reason; None if the pass runs."""
    if current.name in off:
        return "off", off[current.name]
    if result.failed is not None:
        return "not_run", f"{result.failed.name} has failed"
    for name in current.needs:
        needed = result.report_of(name)
        if needed is not None and needed.outcome not in _RAN:
            return "not_run", f"it needs {name}: {needed.outcome}"
    return None, ""


def _note_failure(result: Run, failed: Pass, error: Exception, seconds: float, passes: Sequence[Pass]) -> None:
    result.failed, result.error = failed, error
    undone = set()
    for each in reversed(passes[: passes.index(failed)]):
        if not _same_transaction(failed, each):
            break  # passes of a transaction elsewhere in the order are undone by themselves, or stay
        undone.add(each.name)
    result.reports = [
        replace(each, outcome="undone") if each.name in undone and each.outcome == "changed" else each
        for each in result.reports
    ]
    result.reports.append(PassReport(failed.name, "failed", seconds, detail=result.warning))
