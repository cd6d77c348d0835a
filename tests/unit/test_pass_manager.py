"""The order of the project's own passes: what is switched off with what, what is undone, what is computed once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.fx as fx
from split_graphs import WORLD_SIZE, family_graph

from tw_compile import Config, TWCompilePass, collect_reports, pipeline
from tw_compile.current import current_gate
from tw_compile.graph.copy import copy_of
from tw_compile.graph.snapshot import snapshot
from tw_compile.passes import join, manager
from tw_compile.passes.contract import Context, InductorNeed, Outcome, Pass
from tw_compile.passes.nodes import Inserter, annotate, annotation
from tw_compile.passes.split import SPLIT, summarise
from tw_compile.passes.split.analysis import token_axis
from tw_compile.passes.split.schedule.dependences import find_calls
from tw_compile.planning import load_profile
from tw_compile.report import GraphReport
from tw_compile.testing import fake_process_group

H200 = load_profile("H200")
NAMES = (
    "fuse_all_reduce_rms_norm",
    "choose_split",
    "split_tokens",
    "mend_seams",
    "use_small_groups",
    "narrow_expert_keys",
    "schedule",
    "narrow_residuals",
    "leave_results_in_slots",
    "reserve_sms",
    "lock_order",
    "feed_gemms",
    "join_gemms",
    "prefetch_weights",
)
SPLIT_NAMES = NAMES[1:-3]
INDISPENSABLE = ("choose_split", "split_tokens", "mend_seams", "schedule", "lock_order")


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with fake_process_group(WORLD_SIZE):
        yield


@pytest.fixture(scope="module")
def fused() -> fx.Graph:
    with fake_process_group(WORLD_SIZE):
        return family_graph("mixtral", 1, 64, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def unfused() -> fx.Graph:
    config = Config(strict=True, split="off", disable_passes="fuse_all_reduce_rms_norm")
    with fake_process_group(WORLD_SIZE):
        return family_graph("llama", 1, 64, config=config, dtype=torch.bfloat16)


def copied(graph: fx.Graph) -> fx.Graph:
    return fx.GraphModule(torch.nn.Module(), copy_of(graph)).graph


def split_run(graph: fx.Graph, passes: tuple[Pass, ...] = SPLIT, **options: Any) -> tuple[manager.Run, Context]:
    config = Config(split="32", device_profile="H200", strict=True, **options)
    context = Context(config, current_gate(config), H200)
    return manager.run(graph, context, passes), context


def outcomes(run: manager.Run) -> dict[str, str]:
    return {done.name: done.outcome for done in run.reports}


def rewritten(graph: fx.Graph, **options: Any) -> GraphReport:
    with collect_reports() as reports:
        TWCompilePass(Config(transport="gloo", split="32", **options))(graph)
    return reports[0]


def test_the_order_is_data() -> None:
    assert tuple(each.name for each in manager.ORDER) == NAMES and manager.order() == manager.ORDER


def test_all_passes_of_a_split_run_and_say_what_they_did(fused: fx.Graph) -> None:
    run, _ = split_run(copied(fused))
    assert set(outcomes(run).values()) <= {"changed", "unchanged"} and tuple(outcomes(run)) == SPLIT_NAMES
    counts = {done.name: done.counts for done in run.reports}
    assert (
        counts["split_tokens"]["duplicated"] > 0
        and counts["schedule"]["calls"] > 0
        and counts["lock_order"]["kept"] > 0
    )
    assert counts["narrow_expert_keys"]["sorts"] > 0 and counts["narrow_residuals"]["calls"] > 0
    assert run.inductor == set(InductorNeed)


@pytest.mark.parametrize("name", SPLIT_NAMES)
def test_each_pass_of_the_split_can_be_switched_off_or_takes_all_of_it_off(fused: fx.Graph, name: str) -> None:
    graph = copied(fused)
    run, context = split_run(graph, disable_passes=(name,))
    done = outcomes(run)
    if name in INDISPENSABLE:
        assert set(done.values()) == {"off"} and snapshot(graph) == snapshot(fused) and not run.inductor
        others = {done.detail for done in run.reports if done.name != name}
        assert len(others) == 1 and others.pop().startswith(f"tw_compile.disable_passes names {name}, without which ")
        return
    assert [other for other, outcome in done.items() if outcome == "off"] == [name]
    assert set(done.values()) <= {"changed", "unchanged", "off"}
    split = summarise(context)
    assert split is not None and split.mode == "split" and split.overlap is not None and split.overlap.windows
    graph.lint()


def test_a_split_that_is_switched_off_is_reported_with_its_reason(unfused: fx.Graph) -> None:
    report = rewritten(copied(unfused), disable_passes="lock_order")
    assert report.counts["fused"] == report.counts["all_reduce"] > 0
    assert report.split is not None and (report.split.mode, report.split.reason) == ("off", "switched_off")
    assert report.split.detail.startswith(
        "tw_compile.disable_passes names lock_order, without which Inductor would undo"
    )


def test_fusion_that_is_switched_off_leaves_and_lists_every_all_reduce(unfused: fx.Graph) -> None:
    graph = copied(unfused)
    report = rewritten(graph, disable_passes=["fuse_all_reduce_rms_norm", "choose_split"])
    assert snapshot(graph) == snapshot(unfused)
    assert report.counts["gated"] == report.counts["all_reduce"] > 0 and report.refusals == {
        "fusion_off": report.counts["all_reduce"]
    }


def test_switched_off_passes_are_another_configuration() -> None:
    one, other = Config(disable_passes="reserve_sms,narrow_residuals"), Config(disable_passes=["reserve_sms"])
    assert one.disable_passes == ("reserve_sms", "narrow_residuals") and other.disable_passes == ("reserve_sms",)
    assert TWCompilePass(one).uuid() != TWCompilePass(other).uuid()


@pytest.mark.parametrize("name", [each for each in SPLIT_NAMES if each != "choose_split"])
def test_a_pass_that_fails_is_undone_with_all_of_the_split(
    fused: fx.Graph, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(graph: fx.Graph, *_: object, **__: object) -> None:
        graph.output_node().args = ((),)  # half done
        raise RuntimeError("on purpose")

    monkeypatch.setattr(f"tw_compile.passes.split.steps.{name}", fail)
    graph = copied(fused)
    config = Config(split="32", device_profile="H200", strict=False)
    run = manager.run(graph, Context(config, current_gate(config), H200), SPLIT)
    assert snapshot(graph) == snapshot(fused) and not run.inductor and run.warning == "RuntimeError: on purpose"
    done = outcomes(run)
    assert done[name] == "failed" and "changed" not in done.values()
    behind = SPLIT_NAMES[SPLIT_NAMES.index(name) + 1 :]
    assert {done[other] for other in behind} <= {"not_run"}
    assert (done["split_tokens"] == "undone") is (name != "split_tokens")


def test_what_inductor_must_do_is_told_only_for_a_graph_that_is_split(
    unfused: fx.Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[InductorNeed] = []
    for need in InductorNeed:
        monkeypatch.setitem(pipeline._TELL_INDUCTOR, need, lambda need=need: told.append(need))
    rewritten(copied(unfused), disable_passes="split_tokens")
    assert told == []
    assert rewritten(copied(unfused)).split is not None and set(told) == set(InductorNeed)


def test_the_pipeline_can_tell_inductor_all_that_passes_may_need() -> None:
    assert set(pipeline._TELL_INDUCTOR) == set(InductorNeed)


def counting(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, log: list[str]) -> None:
    original: Callable[..., Any] = getattr(module, name)

    def counted(*given: Any, **options: Any) -> Any:
        log.append(name)
        return original(*given, **options)

    monkeypatch.setattr(module, name, counted)


def test_tokens_are_followed_once_and_calls_are_found_once(fused: fx.Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    from tw_compile.passes.split.schedule import dependences

    log: list[str] = []
    counting(monkeypatch, token_axis, "_parts", log)
    counting(monkeypatch, token_axis, "_pass", log)
    counting(monkeypatch, dependences, "_successive", log)
    split_run(copied(fused))
    assert log.count("_pass") == 1, "the analysis of the choice is that of the rewrite"
    # Once to find calls, once each for the dependences of the schedule and of the lock.
    assert log.count("_successive") == 3


def test_analyses_that_a_pass_keeps_are_right_behind_it(fused: fx.Graph) -> None:
    kept: list[str] = []

    def checked(each: Pass) -> Pass:
        def run(graph: fx.Graph, context: Context) -> Outcome:
            known = context.analysis(find_calls, graph) if find_calls in each.keeps else None
            outcome = each.run(graph, context)
            if known is not None:
                assert known == find_calls(graph), each.name
                kept.append(each.name)
            return outcome

        return Pass(each.name, run, each.transaction, each.needs, keeps=each.keeps)

    split_run(copied(fused), tuple(map(checked, SPLIT)))
    assert kept == ["schedule", "narrow_residuals", "leave_results_in_slots", "reserve_sms"]


def test_an_analysis_is_forgotten_when_the_graph_changes() -> None:
    log: list[str] = []

    def analyse(graph: fx.Graph, *, deep: bool = False) -> int:
        log.append("deep" if deep else "flat")
        return len(graph.nodes)

    def look(graph: fx.Graph, context: Context) -> Outcome:
        context.analysis(analyse, graph)
        context.analysis(analyse, graph, deep=True)
        return Outcome(changed=False)

    def change(graph: fx.Graph, context: Context) -> Outcome:
        graph.placeholder("x")
        return Outcome(changed=True)

    passes = [Pass("a", look), Pass("b", look), Pass("c", change, keeps=(analyse,)), Pass("d", look)]
    passes += [Pass("e", change), Pass("f", look)]
    config = Config(strict=True)
    manager.run(fx.Graph(), Context(config, current_gate(config)), passes)
    assert log == ["flat", "deep", "flat", "deep"]


def test_a_graph_is_copied_again_only_if_it_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(graph: fx.Graph, context: Context) -> Outcome:
        return Outcome(changed=False)

    def change(graph: fx.Graph, context: Context) -> Outcome:
        graph.placeholder("x")
        return Outcome(changed=True)

    def fail(graph: fx.Graph, context: Context) -> Outcome:
        graph.placeholder("half_done")
        raise RuntimeError("on purpose")

    log: list[str] = []
    counting(monkeypatch, manager, "copy_of", log)
    graph, config = fx.Graph(), Config(strict=False)
    passes = [Pass("a", look), Pass("b", look), Pass("c", change), Pass("d", look), Pass("e", look), Pass("f", fail)]
    run = manager.run(graph, Context(config, current_gate(config)), passes)
    assert run.failed is passes[-1] and len(graph.nodes) == 1
    assert log == ["copy_of", "copy_of"]


def test_a_graph_that_is_only_looked_at_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(graph: fx.Graph, context: Context) -> Outcome:
        graph.placeholder("x")
        return Outcome(changed=True, counts={"inputs": 1})

    def nothing(graph: fx.Graph, context: Context) -> Outcome:
        return Outcome(changed=False, counts={"inputs": len(graph.nodes)}, refused="there is an input")

    def anything(graph: fx.Graph, context: Context) -> None:
        log.append("look")

    log: list[str] = []
    counting(monkeypatch, manager, "copy_of", log)
    graph, config = fx.Graph(), Config(strict=True)
    run = manager.run(graph, Context(config, current_gate(config)), [Pass("a", change, look=nothing)])
    assert log == [] and not graph.nodes and [done.detail for done in run.reports] == ["there is an input"]
    assert outcomes(run) == {"a": "refused"} and run.reports[0].counts == {"inputs": 0}
    run = manager.run(graph, Context(config, current_gate(config)), [Pass("a", change, look=anything)])
    assert log == ["look", "copy_of"] and outcomes(run) == {"a": "changed"} and len(graph.nodes) == 1


def test_what_looks_is_part_of_what_identifies_a_registered_pass() -> None:
    known = []
    for look in (None, find_calls):
        manager.register(Pass("mine", summarise, look=look), after="lock_order")  # type: ignore[arg-type]
        known.append(manager.identity())
        manager.unregister("mine")
    assert known[0] != known[1]


def test_a_pass_that_fails_as_it_looks_is_undone_with_its_transaction() -> None:
    def change(graph: fx.Graph, context: Context) -> Outcome:
        graph.placeholder("x")
        return Outcome(changed=True)

    def fail(graph: fx.Graph, context: Context) -> None:
        raise RuntimeError("on purpose")

    graph, config = fx.Graph(), Config(strict=False)
    passes = [Pass("a", change, "t"), Pass("b", change, "t", look=fail), Pass("c", change)]
    run = manager.run(graph, Context(config, current_gate(config)), passes)
    assert outcomes(run) == {"a": "undone", "b": "failed", "c": "not_run"} and not graph.nodes
    assert run.warning == "RuntimeError: on purpose"


def test_passes_only_look_where_they_say_so(unfused: fx.Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is looked at is as it was, and where nothing is to do the graph of a model is not copied once."""
    looked: dict[str, bool] = {}

    def checked(each: Pass) -> Pass:
        def look(graph: fx.Graph, context: Context) -> Outcome | None:
            assert each.look is not None
            before, users = snapshot(graph), [list(node.users) for node in graph.nodes]
            outcome = each.look(graph, context)
            assert snapshot(graph) == before and [list(node.users) for node in graph.nodes] == users, each.name
            looked[each.name] = outcome is None
            return outcome

        return each if each.look is None else replace(each, look=look)

    log: list[str] = []
    counting(monkeypatch, manager, "copy_of", log)
    passes = tuple(map(checked, manager.ORDER))
    config = Config(strict=True, transport="gloo")
    context = Context(config, current_gate(config), H200)
    assert outcomes(manager.run(copied(unfused), context, passes))["fuse_all_reduce_rms_norm"] == "changed"
    assert looked == {"feed_gemms": False, "join_gemms": False, "prefetch_weights": False} and log == []

    monkeypatch.setattr(join, "measured_turns", lambda *_: (0,))
    manager.run(copied(unfused), Context(config, current_gate(config), H200), passes)
    assert looked == {"feed_gemms": False, "join_gemms": True, "prefetch_weights": False} and log == ["copy_of"]


def test_what_no_pass_has_kept_is_missed_in_words() -> None:
    config = Config()
    context = Context(config, current_gate(config))
    assert context.kept(Outcome) is None and context.tokens is None
    with pytest.raises(LookupError, match="context: expected a Outcome from an earlier pass, got none"):
        context.needed(Outcome)


def test_annotations_have_declared_fields_and_copies_of_a_node_their_own() -> None:
    graph = fx.Graph()
    node = graph.placeholder("x")
    assert annotation(node) == {}
    annotate(node, role="start", site=3)
    other = copy_of(graph).find_nodes(op="placeholder")[0]
    annotate(other, role="wait")
    assert annotation(node) == {"role": "start", "site": 3} and annotation(other) == {"role": "wait", "site": 3}
    with pytest.raises(TypeError, match=r"annotate: expected fields of Annotation \(reason, role, .*\), got rule"):
        annotate(node, rule="start")  # type: ignore[call-arg]


def test_what_was_inserted_can_be_taken_out() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta = {"val": torch.empty(2, 3, device="meta"), "stack_trace": "here", "other": 1}
    graph.output(x)
    before = snapshot(graph)
    inserter = Inserter(graph)
    with graph.inserting_before(graph.output_node()):
        node = inserter.call(torch.ops.aten.t.default, (x,), like=x, noted={"role": "view"})
        given = inserter.call(torch.ops.aten.t.default, (node,), result=None)
    assert node.meta["val"].shape == (3, 2) and node.meta["stack_trace"] == "here" and "other" not in node.meta
    assert annotation(node) == {"role": "view"} and annotation(given) == {} and given.meta["val"] is None
    inserter.roll_back()
    assert snapshot(graph) == before and inserter.new == []


def test_unknown_passes_are_refused_and_the_nearest_is_suggested() -> None:
    with pytest.raises(
        ValueError, match=f"disable_passes: expected passes, of {', '.join(NAMES)}; got 'lock_ordr'; did you"
    ):
        TWCompilePass(Config(disable_passes=("lock_ordr",)))
