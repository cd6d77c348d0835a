"""GEMMs of one input in halves: which are computed as one, what that leaves of the graph, and that it computes the same."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.fx as fx
from joint_graphs import BF16, call, operands, products, swiglu
from split_graphs import WORLD_SIZE, family_graph, random_values, run_alone, split_and_planned, woven
from torch._subclasses.fake_tensor import FakeTensorMode

from tw_compile import Config, compat
from tw_compile.autotune.measured_reserve import Operand, Reserve
from tw_compile.graph.predicates import aten, value
from tw_compile.kernels.gemm.mm_leaving_sms import gated_mm_leaving_sms, joint_mm_leaving_sms
from tw_compile.passes.joint import beside, join
from tw_compile.passes.nodes import annotation
from tw_compile.passes.split.peephole.in_slot import leave_results_in_slots
from tw_compile.passes.split.rules import attention as rules_attention
from tw_compile.passes.split.schedule import budgets as budgets_module
from tw_compile.passes.split.schedule.budgets import Budgets, joint_mm_of, reserve_sms
from tw_compile.passes.split.schedule.lock import lock_order
from tw_compile.planning import load_profile
from tw_compile.planning.communication import elementwise_us
from tw_compile.testing import fake_process_group
from tw_compile.testing.graphs import find_ops

H200 = load_profile("H200")
CPU = torch.device("cpu")
FAMILY = {"hidden_size": 64, "intermediate_size": 128}


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with fake_process_group(WORLD_SIZE):
        yield


def planned(family: str = "llama", **fields: Any) -> tuple[fx.Graph, Budgets]:
    """Halves of requests of a model that our kernel takes, and a plan that says that it is used."""
    graph, budgets = split_and_planned(family, 21, H200, **{**FAMILY, **fields})
    return graph, all_joint(budgets)


def all_joint(budgets: Budgets) -> Budgets:
    assert budgets.plan is not None
    windows = []
    for window in budgets.plan.windows:
        gemms = {gemm.name: gemm for gemm in window.gemms}
        joint = {"qkv": 3, "gate_up": 2}
        gemms = {name: dataclasses.replace(gemm, joint=joint.get(name, 0)) for name, gemm in gemms.items()}
        windows.append(dataclasses.replace(window, gemms=tuple(gemms.values()), ctas=8))
    return dataclasses.replace(budgets, plan=dataclasses.replace(budgets.plan, windows=tuple(windows)))


def none_joint(budgets: Budgets) -> Budgets:
    assert budgets.plan is not None
    windows = tuple(
        dataclasses.replace(window, gemms=tuple(dataclasses.replace(gemm, joint=0) for gemm in window.gemms))
        for window in budgets.plan.windows
    )
    return dataclasses.replace(budgets, plan=dataclasses.replace(budgets.plan, windows=windows))


def targets(graph: fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def test_queries_keys_and_values_are_one_gemm_and_gate_and_up_another_that_gates() -> None:
    graph, budgets = planned()
    reserve_sms(graph, woven(graph, budgets), budgets)
    graph.lint()
    joint, gated = find_ops(graph, "joint_mm_leaving_sms"), find_ops(graph, "gated_mm_leaving_sms")
    # Two layers, two halves; the first half's attention of the first layer has no call beside it.
    assert len(gated) == 4 and len(joint) in (3, 4)
    assert {len(node.args[1]) for node in joint} == {3}
    assert not find_ops(graph, "aten.exp")
    assert all("window" in annotation(node) for node in (*joint, *gated))
    for node in joint:
        results = [one.args[1] for one in node.users]
        assert sorted(results) == [0, 1, 2] and all(one.target is operator.getitem for one in node.users)
        shapes = [tuple(one.meta["val"].shape) for one in node.users]
        assert shapes == [tuple(node.meta["val"][index].shape) for index in results]


def test_what_is_joint_computes_the_same() -> None:
    graph, budgets = planned()
    values = random_values(graph)
    expected = run_alone(graph, values)
    reserve_sms(graph, woven(graph, budgets), budgets)
    for one, other in zip(expected, run_alone(graph, values), strict=True):
        assert torch.equal(one, other)


@pytest.mark.full
@pytest.mark.parametrize(("family", "biases"), [("qwen3", 0), ("mistral", 0), ("mixtral", 0), ("qwen2", 3)])
def test_other_families_compute_the_same(family: str, biases: int) -> None:
    graph, budgets = planned(family)
    values = random_values(graph)
    expected = run_alone(graph, values)
    reserve_sms(graph, woven(graph, budgets), budgets)
    assert {len(node.args[2]) for node in find_ops(graph, "joint_mm_leaving_sms")} == {biases}
    for one, other in zip(expected, run_alone(graph, values), strict=True):
        assert torch.equal(one, other)


def test_another_activation_is_not_taken_for_silu() -> None:
    graph, budgets = planned(hidden_act="gelu")
    values = random_values(graph)
    expected = run_alone(graph, values)
    reserve_sms(graph, woven(graph, budgets), budgets)
    assert not find_ops(graph, "gated_mm_leaving_sms")
    assert {len(node.args[1]) for node in find_ops(graph, "joint_mm_leaving_sms")} == {3}  # the plan knows of silu only
    for one, other in zip(expected, run_alone(graph, values), strict=True):
        assert torch.equal(one, other)


def test_it_leaves_sms_as_one_gemm_and_is_named_once() -> None:
    graph, budgets = planned()
    result = woven(graph, budgets)
    done = reserve_sms(graph, result, budgets, lambda node, sms, busy_us, tokens: Reserve(sms + 4, 1.0))
    assert {name for leaving in done.values() for name, _ in leaving} == {"qkv", "o_proj", "gate_up", "down"}
    assert all(len(leaving) == len({name for name, _ in leaving}) for leaving in done.values())
    given = {node.args[-1] for node in graph.nodes if node.target in (joint_mm_leaving_sms, gated_mm_leaving_sms)}
    assert given == {12}


def slower_as_one(node: fx.Node, sms: int, busy_us: float, tokens: int) -> Reserve:
    return Reserve(sms, 31.0 if node.target in (joint_mm_leaving_sms, gated_mm_leaving_sms) else 10.0)


def test_gemms_stay_that_are_measured_to_be_slower_as_one() -> None:
    graph, budgets = planned()
    result = woven(graph, budgets)
    values = random_values(graph)
    expected = run_alone(graph, values)
    done = reserve_sms(graph, result, budgets, slower_as_one)
    graph.lint()
    assert not find_ops(graph, "joint_mm_leaving_sms") and not find_ops(graph, "gated_mm_leaving_sms")
    assert {leaving for leaving in done.values() if "qkv" in dict(leaving)} == {(("qkv", 8),) * 3 + (("o_proj", 8),)}
    for one, other in zip(expected, run_alone(graph, values), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("slower", "gates"), [(0.9, True), (1.1, False)])
def test_a_gemm_that_stores_silu_may_be_slower_by_what_that_takes(slower: float, gates: bool) -> None:
    graph, budgets = planned()
    slow = dataclasses.replace(H200, memory_gb_per_s=0.1)  # so that all is in the bytes
    budgets = dataclasses.replace(budgets, profile=slow)
    saved = {tokens: elementwise_us(slow, 3.0 * tokens * 128 / WORLD_SIZE) for tokens in (21, 42)}

    def measure(node: fx.Node, sms: int, busy_us: float, tokens: int) -> Reserve:
        us = {gated_mm_leaving_sms: 20.0 + slower * saved[tokens], joint_mm_leaving_sms: 30.1}
        return Reserve(sms, us.get(node.target, 10.0))

    reserve_sms(graph, woven(graph, budgets), budgets, measure)
    assert len(find_ops(graph, "gated_mm_leaving_sms")) == 4 * gates
    assert not find_ops(graph, "joint_mm_leaving_sms"), "that stores no more than its GEMMs"


def test_what_is_measured_decides_and_not_the_plan() -> None:
    graph, budgets = planned()
    budgets = none_joint(budgets)

    def measure(node: fx.Node, sms: int, busy_us: float, tokens: int) -> Reserve:
        return Reserve(sms, 10.0)  # one of three, or all three

    reserve_sms(graph, woven(graph, budgets), budgets, measure)
    assert find_ops(graph, "joint_mm_leaving_sms") and find_ops(graph, "gated_mm_leaving_sms")


def test_what_cannot_be_measured_is_as_planned() -> None:
    graph, budgets = planned()
    budgets = none_joint(budgets)

    def measure(node: fx.Node, sms: int, busy_us: float, tokens: int) -> Reserve | None:
        return Reserve(sms, 10.0) if node.target is aten.mm.default else None

    reserve_sms(graph, woven(graph, budgets), budgets, measure)
    assert not find_ops(graph, "joint_mm_leaving_sms") and not find_ops(graph, "gated_mm_leaving_sms")


def test_where_one_cannot_be_measured_the_plan_decides() -> None:
    """Joint in the plan, and slower by what was measured, which is not all."""
    graph, budgets = planned()
    result = woven(graph, budgets)
    names = [node.name for node in graph.nodes if result.parts.gemm_of(node) == "qkv"][::3]

    def measure(node: fx.Node, sms: int, busy_us: float, tokens: int) -> Reserve | None:
        return None if node.name in names else slower_as_one(node, sms, busy_us, tokens)

    reserve_sms(graph, result, budgets, measure)
    assert find_ops(graph, "joint_mm_leaving_sms") and not find_ops(graph, "gated_mm_leaving_sms")


def test_a_plan_for_another_number_of_gemms_says_nothing_of_these() -> None:
    graph, budgets = planned()
    assert budgets.plan is not None
    windows = tuple(
        dataclasses.replace(one, gemms=tuple(dataclasses.replace(gemm, joint=1) for gemm in one.gemms))
        for one in budgets.plan.windows
    )
    budgets = dataclasses.replace(budgets, plan=dataclasses.replace(budgets.plan, windows=windows))
    reserve_sms(graph, woven(graph, budgets), budgets)
    assert {len(node.args[1]) for node in find_ops(graph, "joint_mm_leaving_sms")} <= {1}
    assert not find_ops(graph, "gated_mm_leaving_sms")


@pytest.mark.full
def test_the_sum_has_travelled_as_long_as_the_joint_gemm_takes() -> None:
    graph, budgets = planned()
    result = woven(graph, budgets)
    asked: list[tuple[str, float]] = []

    def measure(node: fx.Node, sms: int, busy_us: float, tokens: int) -> Reserve:
        asked.append((str(node.target), busy_us))
        return Reserve(sms, 2.0 if node.target is joint_mm_leaving_sms else 1.0)

    assert budgets.plan is not None
    windows = tuple(dataclasses.replace(one, communication_us=9.0) for one in budgets.plan.windows)
    budgets = dataclasses.replace(budgets, plan=dataclasses.replace(budgets.plan, windows=windows))
    reserve_sms(graph, result, budgets, measure)
    first = asked.index(("tw_compile.joint_mm_leaving_sms.default", 9.0))
    assert [us for _, us in asked[first - 3 : first + 2]] == [9.0, 8.0, 7.0, 9.0, 7.0]


def test_a_profile_of_a_device_without_our_kernel_joins_nothing() -> None:
    graph, budgets = planned()
    other = dataclasses.replace(H200, gemm=dataclasses.replace(H200.gemm, own_gemms=False))
    budgets = dataclasses.replace(budgets, profile=other)
    reserve_sms(graph, woven(graph, budgets), budgets)
    assert not find_ops(graph, "joint_mm_leaving_sms")


def test_gemms_that_inductor_tunes_are_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, budgets = planned()
    monkeypatch.setattr(compat, "tunes_gemms", lambda: True)
    reserve_sms(graph, woven(graph, budgets), budgets)
    assert not find_ops(graph, "joint_mm_leaving_sms")


@pytest.mark.full
def test_results_stay_in_the_slots_that_joint_gemms_read() -> None:
    kept = []
    for joins in (False, True):
        graph, budgets = planned(config=Config(strict=True, transport="gloo", absorb_mm="always"))
        result = woven(graph, budgets)
        if joins:
            reserve_sms(graph, result, budgets)
        assert bool(find_ops(graph, "joint_mm_leaving_sms")) == joins
        kept.append(leave_results_in_slots(graph))
    assert kept[0] == kept[1] > 0


def test_a_wait_behind_a_joint_gemm_comes_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where attention runs once, queries, keys and values of half 1 are computed before half 2's sum is waited for."""
    monkeypatch.setattr(rules_attention, "suffix_of", lambda call: None)
    graph, budgets = split_and_planned("llama", 32, H200, **FAMILY)
    budgets = all_joint(budgets)
    reserve_sms(graph, woven(graph, budgets), budgets)
    locked = fx.GraphModule(torch.nn.Module(), graph).graph
    lock_order(locked)
    locked.lint()
    kept = [one for wait in find_ops(locked, "all_reduce_rms_norm_wait_") for one in wait.args[2]]
    makers = [one.args[0].target for one in kept if one.target is operator.getitem]
    assert joint_mm_leaving_sms in makers


def test_it_is_measured_with_all_of_its_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(budgets_module, "measured_reserve", lambda *asked: seen.append(asked))
    graph, (a, *matrices) = operands((64, 128, 8))
    joint = graph.call_function(joint_mm_leaving_sms, (a, matrices, [], 0))
    with a.meta["val"].fake_mode:
        bias = graph.placeholder("bias")
        bias.meta["val"] = torch.empty(64, dtype=BF16)
    biased = graph.call_function(joint_mm_leaving_sms, (a, matrices[:1], [bias], 0))
    gated = graph.call_function(gated_mm_leaving_sms, (a, *matrices[:2], 0))
    rows = Operand((32, 64), (64, 1), BF16)
    each = [Operand((64, columns), (1, 64), BF16) for columns in (64, 128, 8)]
    budgets_module.measure_reserve(joint, 8, 50.0, 32)
    budgets_module.measure_reserve(biased, 8, 50.0, 32)
    budgets_module.measure_reserve(gated, 8, 50.0, 32)
    assert seen == [
        (joint_mm_of, (rows, *each), CPU, 8, 50.0),
        (joint_mm_of, (rows, each[0], Operand((64,), (1,), BF16)), CPU, 8, 50.0),
        (gated_mm_leaving_sms, (rows, *each[:2]), CPU, 8, 50.0),
    ]
    a, x, y, b, c = (torch.randn(size) for size in ((3, 4), (4, 5), (4, 6), (5,), (6,)))
    assert all(map(torch.equal, joint_mm_of(a, x, y, 8), (a @ x, a @ y)))
    assert all(map(torch.equal, joint_mm_of(a, x, y, b, c, 8), (torch.addmm(b, a, x), torch.addmm(c, a, y))))


# ---------------------------------------------------------------------------------------------------------------------
# What can be joined


def test_up_to_three_gemms_of_one_input_are_joined() -> None:
    _, _, nodes = products((64, 128, 8, 16))
    assert beside(nodes[0], nodes[1:]) == nodes[:3]
    assert beside(nodes[0], []) == nodes[:1]


@pytest.mark.parametrize(("columns", "dtype"), [((64, 12), BF16), ((64, 64), torch.float32), ((64, 64), torch.float16)])
def test_gemms_stay_that_the_kernel_does_not_take(columns: tuple[int, ...], dtype: torch.dtype) -> None:
    _, _, nodes = products(columns, dtype)
    assert nodes[1] not in beside(nodes[0], nodes[1:])
    assert beside(nodes[1], nodes[:1]) == ([] if dtype != BF16 or columns[1] == 12 else nodes)


def test_gemms_of_other_rows_are_not_joined_and_those_of_views_of_the_same_are() -> None:
    graph, mode, (first, second) = products((64, 64))
    whole = call(graph, mode, aten.view.default, first.args[0], [1, 32, 64])
    again = call(graph, mode, aten.view.default, whole, [32, 64])
    other = call(graph, mode, aten.neg.default, first.args[0])
    same, of_other = (call(graph, mode, aten.mm.default, one, second.args[1]) for one in (again, other))
    assert beside(first, [same, of_other]) == [first, same]


def test_gemms_of_the_same_elements_in_other_rows_are_not_joined() -> None:
    graph, mode, (first,) = products((64,))
    weight = graph.placeholder("longer")
    with mode:
        weight.meta["val"] = torch.empty(64, 128, dtype=BF16)
    wider = call(graph, mode, aten.view.default, first.args[0], [16, 128])
    second = call(graph, mode, aten.mm.default, wider, call(graph, mode, aten.permute.default, weight, [1, 0]))
    assert beside(first, [second]) == [first] and beside(second, [first]) == [second]


def test_a_matrix_that_the_graph_computes_is_not_joined() -> None:
    graph, mode, (first, second) = products((64, 64))
    made = call(graph, mode, aten.neg.default, second.args[1])
    computed = call(graph, mode, aten.mm.default, first.args[0], made)
    assert beside(first, [computed]) == [first] and beside(computed, [first]) == []


def test_matrices_whose_views_come_later_are_taken_before_the_first_gemm() -> None:
    graph, mode, (first, _) = products((64, 64))
    weight = graph.find_nodes(op="placeholder")[-1]
    later = call(graph, mode, aten.permute.default, weight, [1, 0])
    second = call(graph, mode, aten.mm.default, first.args[0], later)
    constant = graph.create_node("get_attr", "constant")
    constant.meta = weight.meta
    third = call(graph, mode, aten.mm.default, first.args[0], call(graph, mode, aten.permute.default, constant, [1, 0]))
    graph.output((first, second, third))
    join([first, second, third]).adopt()
    graph.lint()
    assert targets(graph).count("aten.mm.default") == 1, "the one that was not asked for"


# ---------------------------------------------------------------------------------------------------------------------
# silu(gate) * up


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("gate", [0, 1])
def test_gate_and_up_are_found_in_any_order(gate: int, order: int) -> None:
    graph, mode, nodes = products((64, 64))
    graph.output(swiglu(graph, mode, nodes[gate], nodes[1 - gate], order))
    wanted = nodes[gate].args[1], nodes[1 - gate].args[1]
    node = join(nodes).adopt()
    graph.lint()
    assert node.target is gated_mm_leaving_sms and node.args[1:] == (*wanted, 0)
    assert [one for one in targets(graph) if "permute" not in one] == ["tw_compile.gated_mm_leaving_sms.default"]


@pytest.mark.parametrize("gate", [0, 1])
def test_halves_of_the_columns_of_one_gemm_are_gate_and_up(gate: int) -> None:
    graph, mode, (merged,) = products((128,))
    halves = [call(graph, mode, aten.slice.Tensor, merged, 1, *ends) for ends in ((0, 64), (64, 9223372036854775807))]
    graph.output(swiglu(graph, mode, halves[gate], halves[1 - gate]))
    node = join([merged]).adopt()
    graph.lint()
    assert node.target is gated_mm_leaving_sms
    left, right = node.args[1 + gate], node.args[2 - gate]
    assert [one.args[1:] for one in (left, right)] == [(1, 0, 64), (1, 64, 9223372036854775807)]
    assert value(right).stride() == (1, 64) and value(right).storage_offset() == 64 * 64


def test_slices_that_are_not_the_halves_are_no_gate() -> None:
    for ends in (((0, 64), (0, 64)), ((0, 32), (32, 128)), ((0, 64), (64, 120))):
        graph, mode, (merged,) = products((128,))
        first, second = (call(graph, mode, aten.slice.Tensor, merged, 1, *one) for one in ends)
        graph.output((first, second))
        assert join([merged]).node.target is joint_mm_leaving_sms


def reads_the_gate(graph: fx.Graph, mode: FakeTensorMode, gate: fx.Node, up: fx.Node) -> Any:
    return swiglu(graph, mode, gate, up), gate


def reads_the_other(graph: fx.Graph, mode: FakeTensorMode, gate: fx.Node, up: fx.Node) -> Any:
    return swiglu(graph, mode, gate, up), up


def reads_the_silu(graph: fx.Graph, mode: FakeTensorMode, gate: fx.Node, up: fx.Node) -> Any:
    product = swiglu(graph, mode, gate, up)
    return product, product.args[0]


def reads_the_exponential(graph: fx.Graph, mode: FakeTensorMode, gate: fx.Node, up: fx.Node) -> Any:
    product = swiglu(graph, mode, gate, up)
    return product, graph.find_nodes(op="call_function", target=aten.exp.default)[0]


def gates_itself(graph: fx.Graph, mode: FakeTensorMode, gate: fx.Node, up: fx.Node) -> Any:
    return swiglu(graph, mode, gate, gate), up


def adds_two(graph: fx.Graph, mode: FakeTensorMode, gate: fx.Node, up: fx.Node) -> Any:
    product = swiglu(graph, mode, gate, up)
    (addition,) = graph.find_nodes(op="call_function", target=aten.add.Tensor)
    addition.args = (addition.args[0], 2)
    return product


def divides_the_other_way(graph: fx.Graph, mode: FakeTensorMode, gate: fx.Node, up: fx.Node) -> Any:
    product = swiglu(graph, mode, gate, up)
    (division,) = graph.find_nodes(op="call_function", target=aten.div.Tensor)
    division.args = division.args[::-1]
    return product


def no_minus(graph: fx.Graph, mode: FakeTensorMode, gate: fx.Node, up: fx.Node) -> Any:
    product = swiglu(graph, mode, gate, up)
    (negated,) = graph.find_nodes(op="call_function", target=aten.neg.default)
    negated.target = aten.abs.default
    return product


def exponential_of_another(graph: fx.Graph, mode: FakeTensorMode, gate: fx.Node, up: fx.Node) -> Any:
    product = swiglu(graph, mode, gate, up)
    (negated,) = graph.find_nodes(op="call_function", target=aten.neg.default)
    negated.args = (call(graph, mode, aten.abs.default, gate),)
    return product


@pytest.mark.parametrize(
    "build",
    [
        reads_the_gate,
        reads_the_other,
        reads_the_silu,
        reads_the_exponential,
        gates_itself,
        adds_two,
        divides_the_other_way,
        no_minus,
        exponential_of_another,
    ],
    ids=lambda build: build.__name__,
)
def test_what_is_no_gate_or_is_read_by_others_is_only_joined(build: Any) -> None:
    graph, mode, nodes = products((64, 64))
    graph.output(build(graph, mode, *nodes))
    joint = join(nodes)
    assert joint.node.target is joint_mm_leaving_sms and joint.results == tuple(nodes)


def test_a_joint_gemm_that_is_not_adopted_leaves_the_graph_as_it_was() -> None:
    for columns, merged in (((64, 64), False), ((128,), True)):
        graph, mode, nodes = products(columns)
        halves = nodes
        if merged:
            halves = [call(graph, mode, aten.slice.Tensor, nodes[0], 1, *ends) for ends in ((0, 64), (64, 128))]
        graph.output(swiglu(graph, mode, *halves))
        before = [(node.name, node.args) for node in graph.nodes]
        join(nodes).discard()
        graph.lint()
        assert [(node.name, node.args) for node in graph.nodes] == before


def test_a_graph_of_float32_has_nothing_to_join() -> None:
    graph = family_graph("llama", 3, 21, **FAMILY)
    for node in find_ops(graph, "aten.mm"):
        assert beside(node, []) == []
