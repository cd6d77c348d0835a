"""The order of a split graph: a valid one, in which each half computes beside the other's communication."""

from __future__ import annotations

import functools
import itertools
import operator
import random

import pytest
import torch
import torch.fx as fx
from graph_builder import GraphBuilder, aten, copy_of
from hypothesis import given, settings
from hypothesis import strategies as st
from split_graphs import UNFUSED, WORLD_SIZE, family_graph, random_values, run_alone

from tw_compile import compat
from tw_compile.kernels.collective import ops
from tw_compile.passes.reasons import SplitRefusal, SplitRefused
from tw_compile.passes.split import SplitReport, find_token_axis, split_tokens
from tw_compile.passes.split.analysis.token_axis import Unit
from tw_compile.passes.split.schedule.dependences import find_calls, predecessors
from tw_compile.passes.split.schedule.lock import has_own_kernel, is_copied_by_readers, lock_order
from tw_compile.passes.split.schedule.windows import Exposure, Schedule, ScheduledWindow, computes, half_of, schedule
from tw_compile.testing.capture import fake_process_group
from tw_compile.testing.graphs import annotation, assert_order, find_ops

FORMS = [("llama", True), ("llama", False), ("gemma2", True), ("mixtral", True)]


@functools.cache
def fused_graph(family: str, fuse: bool, batch: int = 3) -> fx.Graph:
    with fake_process_group(WORLD_SIZE):
        return family_graph(family, batch, 63 // batch, **({} if fuse else {"config": UNFUSED}))


def split_graph(family: str, unit: Unit, fuse: bool = True, batch: int = 3, **options: bool) -> fx.Graph:
    graph = copy_of(fused_graph(family, fuse, batch))
    with fake_process_group(WORLD_SIZE):
        assert isinstance(split_tokens(graph, 1 if unit == "request" else 32, unit=unit, **options), SplitReport)
    return graph


def scheduled(family: str, unit: Unit, fuse: bool = True, batch: int = 3, **options: bool) -> tuple[fx.Graph, Schedule]:
    graph = split_graph(family, unit, fuse, batch, **options)
    result = schedule(graph)
    assert isinstance(result, Schedule)
    graph.lint()
    return graph, result


def assert_respects(order: fx.Graph, before: dict[fx.Node, list[fx.Node]]) -> None:
    place = {node: index for index, node in enumerate(order.nodes)}
    assert place.keys() == before.keys()
    for node, earlier in before.items():
        assert all(place[one] < place[node] for one in earlier), node.name


@pytest.mark.full
@pytest.mark.parametrize("unit", ["token", "request"])
@pytest.mark.parametrize(("family", "fuse"), FORMS)
def test_order_is_valid_and_computes_the_same(family: str, unit: Unit, fuse: bool) -> None:
    graph = split_graph(family, unit, fuse)
    calls = find_calls(graph)
    assert isinstance(calls, list)
    before = predecessors(graph, calls)
    values = random_values(graph)
    expected = run_alone(graph, values)
    names = [node.name for node in graph.nodes]
    assert isinstance(schedule(graph), Schedule)
    graph.lint()
    assert_respects(graph, before)
    assert [node.name for node in graph.nodes] != names
    for one, other in zip(expected, run_alone(graph, values), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("family", "fuse"), FORMS)
def test_every_call_flies_over_a_part_of_the_other_half(family: str, fuse: bool) -> None:
    graph, result = scheduled(family, "request", fuse)
    place = {node: index for index, node in enumerate(graph.nodes)}
    nodes = list(graph.nodes)
    calls = find_calls(graph)
    assert isinstance(calls, list)
    assert [half_of(call.start) for call in calls] == [1, 2] * (len(calls) // 2)
    for index, call in enumerate(calls[:-2]):
        between = nodes[place[call.start] + 1 : place[call.wait]]
        halves = {half_of(node) for node in between if computes(node) and node not in {one.wait for one in calls}}
        other = 3 - half_of(call.start)
        assert other in halves and calls[index + 1].start in between
        assert calls[index + 2].start not in between
    assert set(result.exposures) <= {Exposure.NOTHING_LEFT}


@pytest.mark.parametrize(("unit", "batch"), [("request", 3), ("token", 1), ("token", 3)])
def test_windows_of_a_llama(unit: Unit, batch: int) -> None:
    """Four a layer, between requests as inside of one, whose second half reads keys and values of the first."""
    _, result = scheduled("llama", unit, batch=batch)
    halves = [(window.computes, window.beside) for window in result.windows]
    assert halves == [
        (1, ()),
        (2, ((0, 1),)),
        *[(half, ((site + (half == 2), 3 - half),)) for site in range(4) for half in (1, 2)],
        ("joined", ()),
    ]
    assert result.calls == 10
    assert result.exposures == {"nothing_left": 1}
    (last,) = result.exposed
    assert (last.site, last.half) == (4, 2)


def test_keys_of_half_1_are_joined_with_those_of_half_2_in_its_window() -> None:
    graph, _ = scheduled("llama", "token", batch=1)
    joined = [node for node in graph.nodes if node.target is aten.cat.default and half_of(node) == 2]
    joined = [node for node in joined if (annotation(node) or {}).get("role") == "cat"]
    attention = [node for node in graph.nodes if "flash_attention" in str(node.target)]
    assert [half_of(node) for node in attention] == [1, 2, 1, 2] and len(joined) == 4
    for first, second in zip(attention[::2], attention[1::2], strict=True):
        windows = [annotation(one)["window"] for one in (first, second)]  # type: ignore[index]
        assert windows[1] == windows[0] + 1
        used = [one for one in joined if one in second.all_input_nodes]
        assert len(used) == 2 and all(annotation(one)["window"] == windows[1] for one in used)  # type: ignore[index]


def test_windows_of_a_llama_whose_attention_joins() -> None:
    """Of a layer's five windows one, with attention, hides nothing."""
    _, result = scheduled("llama", "token", join_attention=True)
    assert [window.computes for window in result.windows][3:8] == ["joined", 2, 1, 2, 1]
    assert [window.beside for window in result.windows][3:8] == [(), ((1, 1),), ((1, 2),), ((2, 1),), ((2, 2),)]
    assert result.exposures == {"nothing_left": 1}


def test_a_wait_comes_when_nothing_else_can_run_and_a_start_before_what_does_not_need_it() -> None:
    graph, _ = scheduled("mixtral", "token")
    calls = find_calls(graph)
    assert isinstance(calls, list)
    before = predecessors(graph, calls)
    waits = {call.wait for call in calls}
    needed: set[fx.Node] = set()
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    for call in calls:
        pending = [call.start]
        while pending:
            node = pending.pop()
            if node not in needed:
                needed.add(node)
                pending += before[node]
        place = {node: index for index, node in enumerate(nodes)}
        part = [node for node in nodes[: place[call.start]] if node not in needed and operator.getitem != node.target]
        assert all(node not in waits and not has_own_kernel(node) for node in part)
    for wait, following in itertools.pairwise(nodes):
        if wait in waits and following not in waits and needed & {wait}:
            assert wait in before[following] or set(before[following]) & set(wait.all_input_nodes), wait.name


def test_every_operator_says_when_it_runs_and_where() -> None:
    graph, result = scheduled("gemma2", "token")
    last = 0
    for node in find_all(graph):
        noted = annotation(node)
        assert noted is not None and "split" in noted
        assert noted["stream"] == ("communication" if node.target in (ops.start, ops.wait_) else "compute")
        assert last <= noted["window"] < len(result.windows)
        last = noted["window"]
    start = find_ops(graph, "all_reduce_rms_norm_start")[0]
    noted = annotation(start)
    assert noted is not None and noted["role"] == "start" and noted["site"] == 0


def find_all(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


def test_schedule_is_the_same_every_time_and_stays() -> None:
    names = []
    for _ in range(2):
        graph, _ = scheduled("mixtral", "token")
        names.append([node.name for node in graph.nodes])
    assert names[0] == names[1]
    schedule(graph)
    assert [node.name for node in graph.nodes] == names[0]


class Pairs(GraphBuilder):
    """Fused calls written by hand, without a residual."""

    def start(self, x: fx.Node, slot: int, split: object) -> fx.Node:
        rest = (None, None, None, 1e-6, 0.0, None, torch.float32, torch.float32, False, "none", "0", "gloo", slot)
        start = self.call(ops.start, x, *rest)
        start.meta["tw_compile"] = {"split": split, "site": 0}
        self.items = [self.call(operator.getitem, start, index) for index in (0, 1)]
        return start

    def finish_call(self, items: list[fx.Node], keep: list[fx.Node], slot: int) -> fx.Node:
        wait = self.graph.call_function(ops.wait_, (*items, keep, "0", slot))
        wait.meta["val"] = None
        return wait


@pytest.fixture
def pairs(two_ranks: None) -> Pairs:
    return Pairs()


def test_two_calls_in_one_slot_are_refused(pairs: Pairs) -> None:
    x, y = pairs.input(4, 8), pairs.input(4, 8)
    pairs.start(x, 0, 1)
    first = pairs.items
    pairs.start(y, 0, 1)
    second = pairs.items
    pairs.finish_call(first, [x], 0)
    pairs.finish_call(second, [y], 0)
    graph = pairs.finish(first[0], second[0])
    refused = schedule(graph)
    assert isinstance(refused, SplitRefused)
    assert refused.reason is SplitRefusal.SLOT_IN_FLIGHT_TWICE


def test_calls_without_a_start_or_a_wait_are_refused(pairs: Pairs) -> None:
    x = pairs.input(4, 8)
    pairs.start(x, 0, 1)
    refused = schedule(pairs.finish(pairs.items[0]))
    assert isinstance(refused, SplitRefused) and refused.reason is SplitRefusal.CALL_WITHOUT_START
    other = Pairs()
    x, y = other.input(4, 8), other.input(4, 8)
    other.finish_call([x, y], [], 0)
    refused = schedule(other.finish(x))
    assert isinstance(refused, SplitRefused) and refused.reason is SplitRefusal.CALL_WITHOUT_START


def test_nothing_to_hide_is_refused() -> None:
    b = GraphBuilder()
    refused = schedule(b.finish(b.call(aten.neg.default, b.input(4, 8))))
    assert isinstance(refused, SplitRefused) and refused.reason is SplitRefusal.NO_COMMUNICATION


def test_writes_stay_between_their_readers(pairs: Pairs) -> None:
    """A cache is read, written through a view, and read again; no data says so."""
    cache, x = pairs.input(4, 8), pairs.input(4, 8)
    old = pairs.call(aten.neg.default, cache)
    row = pairs.call(aten.select.int, cache, 0, 1)
    value = pairs.call(aten.select.int, x, 0, 0)
    write = pairs.call(aten.copy_.default, row, value)
    new = pairs.call(aten.neg.default, cache)
    pairs.start(pairs.call(aten.mm.default, new, pairs.input(8, 8)), 0, 1)
    pairs.finish_call(pairs.items, [], 0)
    late = pairs.call(aten.copy_.default, x, old)
    graph = pairs.finish(pairs.items[0], old)
    assert isinstance(schedule(graph), Schedule)
    assert_order(graph, old, write)
    assert_order(graph, write, new)
    assert_order(graph, ops.start, late)


def test_a_call_that_nothing_hides_gets_all_the_sms() -> None:
    graph = split_graph("llama", "request")
    asked: list[ScheduledWindow] = []

    def sms(window: ScheduledWindow) -> int:
        asked.append(window)
        return 8 + window.index

    result = schedule(graph, sms)
    assert isinstance(result, Schedule)
    assert len(asked) == result.calls - len(result.exposed)
    assert all(window in result.windows and window.beside for window in asked)
    given = [node.kwargs["overlap_sms"] for node in find_ops(graph, "all_reduce_rms_norm_start")]
    assert given == [8 + window.index for window in asked] + [0]


def test_calls_may_be_given_no_sms_of_their_own() -> None:
    graph = split_graph("llama", "request")
    assert isinstance(schedule(graph, 0), Schedule)
    assert {node.kwargs["overlap_sms"] for node in find_ops(graph, "all_reduce_rms_norm_start")} == {0}


def test_calls_share_the_sms_that_all_may_have_and_operators_have_windows() -> None:
    graph = split_graph("llama", "request")
    result = schedule(graph, 8, 8)
    assert isinstance(result, Schedule)
    given = [node.kwargs["overlap_sms"] for node in find_ops(graph, "all_reduce_rms_norm_start")]
    assert given == [4] * (result.calls - 1) + [0], "two are in flight at once, and nothing hides the last"
    windows = {annotation(node).get("window") for node in graph.nodes if node.op == "call_function"}
    assert windows == set(range(len(result.windows)))


def test_negative_sms_are_an_error() -> None:
    with pytest.raises(ValueError, match="overlap_sms: expected 0 or more, got -1"):
        schedule(fx.Graph(), -1)


def test_lock_keeps_what_a_wait_follows_and_changes_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, _ = scheduled("llama", "request")
    values = random_values(graph)
    expected = run_alone(graph, values)
    ordered: dict[fx.Node, list[fx.Node]] = {}
    monkeypatch.setattr(compat, "order_after", lambda graph, after: ordered.update(after))
    locked = fx.GraphModule(torch.nn.Module(), graph).graph
    result = lock_order(locked)
    locked.lint()
    starts = find_ops(locked, "all_reduce_rms_norm_start")
    waits = find_ops(locked, "all_reduce_rms_norm_wait_")
    assert result.kept == len(waits) - 1, "all but the last, which follows its own start"
    assert {node: [one.args[0] for one in after] for node, after in ordered.items()} == {starts[1]: [starts[0]]}
    assert not any(has_own_kernel(node) for node in locked.nodes if node.name in result.loose)
    for wait in waits:
        hidden, _, keep, *_ = wait.args
        assert set(hidden.all_input_nodes[0].all_input_nodes) <= set(keep)  # type: ignore[union-attr, arg-type]
    for one, other in zip(expected, run_alone(locked, values), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("stretched", "copied"), [(False, False), (True, True)])
def test_operands_that_inductor_would_lay_out_otherwise_are_cloned(stretched: bool, copied: bool) -> None:
    graph = fx.Graph()
    values = graph.placeholder("values")
    computed = graph.call_function(aten.neg.default, (values,))
    turned = graph.call_function(aten.permute.default, (computed, [0, 2, 1]))
    # Eager keeps the layout of what it reads, Inductor's own follows the dims.
    values.meta["val"] = torch.empty(2, 3, 8).transpose(1, 2) if stretched else torch.empty(2, 8, 3)
    computed.meta["val"] = -values.meta["val"]
    turned.meta["val"] = computed.meta["val"].permute(0, 2, 1)
    assert turned.meta["val"].is_contiguous() == stretched
    assert is_copied_by_readers(turned) == is_copied_by_readers(computed) == copied
    assert not is_copied_by_readers(values)


def test_lock_needs_a_module_and_pairs_of_calls(pairs: Pairs) -> None:
    with pytest.raises(ValueError, match="graph: expected one that belongs to a module"):
        lock_order(fx.Graph())
    pairs.start(pairs.input(4, 8), 0, 1)
    with pytest.raises(ValueError, match="graph: expected a scheduled one, got call_without_start"):
        lock_order(pairs.output(pairs.items[0]).graph)


class RandomLayers(Pairs):
    """Layers of row-wise operators, some that read all tokens, fused calls, all_reduces and writes to a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        self.tokens, self.hidden = self.rng.choice((4, 5, 8)), 6
        self.buffer = self.input(self.tokens, self.hidden)
        self.values = [self.input(self.tokens, self.hidden) for _ in range(2)]

    def step(self) -> None:
        x, kind = self.rng.choice(self.values[-3:]), self.rng.randrange(9)
        if kind == 0:
            x = self.call(aten.mm.default, x, self.input(self.hidden, self.hidden))
        elif kind == 1:
            x = self.call(aten.sigmoid.default, self.add(x, self.rng.choice(self.values)))
        elif kind == 2:
            x = self.call(aten._softmax.default, x, self.rng.choice((0, 1)), False)
        elif kind == 3:
            whole = self.call(aten.cumsum.default, x, 0)
            self.call(aten.copy_.default, self.buffer, whole)
            return
        elif kind == 4:
            x = self.add(x, self.call(aten.sum.dim_IntList, self.buffer, [0], True))
        elif kind == 5:
            x = self.all_reduce(self.call(aten.neg.default, x))
        else:
            self.start(x, 0, "shared")
            items = self.items
            self.finish_call(items, [x], 0)
            x = items[0]
        self.values.append(x)

    def make(self) -> fx.Graph:
        for _ in range(self.rng.randint(2, 16)):
            self.step()
        self.all_reduce(self.values[-1])
        self.values.append(self.all_reduce(self.values[-1]))
        return self.finish(*dict.fromkeys([*self.rng.choices(self.values, k=2), self.values[-1]]))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 32))
def test_random_schedules_are_valid_and_equal(seed: int) -> None:
    with fake_process_group(WORLD_SIZE):
        maker = RandomLayers(seed)
        graph = maker.make()
        values = random_values(graph)
        unsplit = run_alone(graph, values)
        axis = find_token_axis(graph)
        report = None if isinstance(axis, SplitRefused) else split_tokens(graph, 2, axis=axis)
        calls = find_calls(graph)
        assert isinstance(calls, list)
        before = predecessors(graph, calls)
        expected = run_alone(graph, values)
        result = schedule(graph)
        assert isinstance(result, Schedule)
        graph.lint()
        assert_respects(graph, before)
        for one, two, three in zip(unsplit, expected, run_alone(graph, values), strict=True):
            torch.testing.assert_close(two, one, rtol=2e-4, atol=1e-5)
            assert torch.equal(two, three)
        if isinstance(report, SplitReport):
            assert sum(window.nodes for window in result.windows) > 0
