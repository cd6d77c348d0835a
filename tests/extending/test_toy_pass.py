"""A pass is added by a file of its own and one call: it runs in its place, is reported, timed, dumped, switched off by name."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch.fx as fx
from graph_builder import GraphBuilder, aten
from toy_pass import CANCEL_NEGATIONS

from tw_compile import Config, GraphReport, TWCompilePass, collect_reports
from tw_compile.passes import manager
from tw_compile.passes.contract import Context, Outcome, Pass
from tw_compile.testing import count_ops, fake_process_group, snapshot

H = 16
NAME = CANCEL_NEGATIONS.name
FUSE = "fuse_all_reduce_rms_norm"


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    manager.register(CANCEL_NEGATIONS, before=FUSE)
    try:
        with fake_process_group(2):
            yield
    finally:
        manager.unregister(NAME)


def block() -> fx.Graph:
    """A norm of a sum over ranks of ``-(-x)``, which has nothing to do with either."""
    b = GraphBuilder()
    x, weight, residual = b.input(4, H), b.input(H), b.input(4, H)
    twice = b.call(aten.neg.default, b.call(aten.neg.default, x))
    return b.finish(b.rms_norm(b.add(b.all_reduce(twice), residual), weight))


def rewritten(config: Config | None = None) -> tuple[fx.Graph, GraphReport]:
    graph = block()
    with collect_reports() as reports:
        TWCompilePass(Config(strict=True, transport="gloo") if config is None else config)(graph)
    return graph, reports[0]


def test_it_runs_in_its_place_and_the_report_lists_it() -> None:
    graph, report = rewritten()
    assert count_ops(graph, "neg") == 0 and report.counts["fused"] == 1
    names = [done.name for done in report.passes]
    assert names == [each.name for each in manager.order()] and names[:2] == [NAME, FUSE]
    toy = report.passes[0]
    assert (toy.outcome, toy.counts) == ("changed", {"pairs": 1}) and toy.seconds > 0.0
    assert report.as_dict()["passes"][0] == {
        "name": NAME,
        "outcome": "changed",
        "seconds": toy.seconds,
        "counts": {"pairs": 1},
        "detail": "",
    }
    assert sum(done.seconds for done in report.passes) <= report.seconds


def test_its_own_time_is_what_is_reported() -> None:
    def slow(graph: fx.Graph, context: Context) -> Outcome:
        time.sleep(0.2)
        return Outcome(changed=False)

    manager.register(Pass("slow", slow), after=NAME)
    try:
        _, report = rewritten()
    finally:
        manager.unregister("slow")
    seconds = {done.name: done.seconds for done in report.passes}
    assert seconds["slow"] >= 0.2 > seconds[NAME] + seconds[FUSE]


@pytest.mark.parametrize("names", [NAME, [NAME], (NAME,), f" {NAME} , "])
def test_it_is_switched_off_by_name(names: object) -> None:
    graph, report = rewritten(Config.from_mapping({"disable_passes": names, "transport": "gloo"}))
    assert count_ops(graph, "neg") == 2 and report.counts["fused"] == 1
    assert (report.passes[0].outcome, report.passes[0].seconds) == ("off", 0.0)
    assert report.passes[0].detail == f"tw_compile.disable_passes names {NAME}"


class Trace(logging.Handler):
    """What goes into torch's structured trace: texts by the names of artifacts."""

    def __init__(self) -> None:
        super().__init__()
        self.artifacts: dict[str, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        artifact = record.metadata.get("artifact")  # type: ignore[attr-defined]
        if artifact is not None:
            self.artifacts[artifact["name"]] = record.payload  # type: ignore[attr-defined]


@pytest.fixture
def trace() -> Iterator[Trace]:
    handler = Trace()
    log = logging.getLogger("torch.__trace")
    log.addHandler(handler)
    try:
        yield handler
    finally:
        log.removeHandler(handler)


def test_it_is_dumped_before_and_after(trace: Trace) -> None:
    before = snapshot(block())
    rewritten()
    assert trace.artifacts[f"tw_compile_{NAME}_before"] == before
    after = trace.artifacts[f"tw_compile_{NAME}_after"]
    assert "aten.neg" in before and "aten.neg" not in after
    assert trace.artifacts[f"tw_compile_{FUSE}_before"] == after != trace.artifacts[f"tw_compile_{FUSE}_after"]


def test_nothing_is_written_down_where_nobody_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    log = logging.getLogger("torch.__trace")
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(manager, "snapshot", lambda graph: pytest.fail("a graph was written down"))
    rewritten()


def test_an_exception_undoes_it_and_ends_the_run() -> None:
    def broken(graph: fx.Graph, context: Context) -> Outcome:
        CANCEL_NEGATIONS.run(graph, context)
        raise RuntimeError("on purpose")

    manager.register(Pass("broken", broken), before=NAME)
    try:
        graph, report = rewritten(Config(strict=False, transport="gloo"))
        with pytest.raises(RuntimeError, match="on purpose"):
            rewritten()
    finally:
        manager.unregister("broken")
    assert snapshot(graph) == snapshot(block()) and report.warning == "RuntimeError: on purpose"
    assert [done.outcome for done in report.passes[:3]] == ["failed", "not_run", "not_run"]
    assert report.refusals == {"rewrite_failed": 1}
    assert report.split is not None and report.split.reason == "earlier_pass_failed"


def test_caches_know_registered_passes() -> None:
    with_it = TWCompilePass().uuid()
    manager.unregister(NAME)
    without = TWCompilePass().uuid()
    manager.register(CANCEL_NEGATIONS, after=FUSE)
    elsewhere = TWCompilePass().uuid()
    assert len({with_it, without, elsewhere}) == 3


@pytest.mark.parametrize(
    ("new", "place", "message"),
    [
        (CANCEL_NEGATIONS, {"after": FUSE}, "expected a new name, got 'cancel_negations'"),
        (Pass("more", CANCEL_NEGATIONS.run), {}, "expected one of after= and before="),
        (Pass("more", CANCEL_NEGATIONS.run), {"after": FUSE, "before": FUSE}, "expected one of after= and before="),
        (Pass("more", CANCEL_NEGATIONS.run), {"after": "lock_ordr"}, r"got 'lock_ordr'; did you mean lock_order\?"),
        (Pass("more", CANCEL_NEGATIONS.run, needs=("fuse",)), {"after": FUSE}, "expected passes, of .*; got 'fuse'"),
        (Pass("more", CANCEL_NEGATIONS.run), {"after": "schedule"}, "expected a pass of the transaction 'split'"),
    ],
)
def test_what_cannot_be_registered_is_refused(new: Pass, place: dict[str, str], message: str) -> None:
    before = manager.order()
    with pytest.raises(ValueError, match=message):
        manager.register(new, **place)
    assert manager.order() == before
    with pytest.raises(ValueError, match="expected one of cancel_negations registered passes, got 'more'"):
        manager.unregister("more")


def test_a_pass_of_the_split_may_stand_inside_of_it() -> None:
    counted: list[int] = []

    def count(graph: fx.Graph, context: Context) -> Outcome:
        counted.append(count_ops(graph, "mm"))
        return Outcome(changed=False)

    inside = replace(CANCEL_NEGATIONS, name="count_mm", run=count, transaction="split", needs=("split_tokens",))
    manager.register(inside, after="split_tokens")
    try:
        _, report = rewritten()
    finally:
        manager.unregister("count_mm")
    done = {each.name: each for each in report.passes}
    assert counted == [] and done["count_mm"].detail == "it needs split_tokens: not_run"


def test_bad_passes_are_refused() -> None:
    with pytest.raises(ValueError, match="name: expected an identifier, got 'my pass'"):
        Pass("my pass", CANCEL_NEGATIONS.run)
    with pytest.raises(TypeError, match="run: expected a function of a graph and a context, got 3"):
        Pass("mine", 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rolls_back: expected a pass without a transaction, got one of 'split'"):
        Pass("mine", CANCEL_NEGATIONS.run, "split", rolls_back=True)


def test_torch_has_the_log_that_is_listened_to() -> None:
    from torch._logging import _internal

    assert _internal.trace_log is logging.getLogger("torch.__trace")
