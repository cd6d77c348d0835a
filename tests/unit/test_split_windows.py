"""What runs in the windows of a scheduled graph: their kinds, SMs of calls, and GEMMs that leave them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.fx as fx
from split_graphs import WORLD_SIZE, family_graph, random_values, run_alone, split_and_planned, split_graph, woven
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tw_compile import Config, compat
from tw_compile.autotune.measured_reserve import Operand, Reserve
from tw_compile.kernels.collective import ops
from tw_compile.kernels.collective.spec import MAX_OVERLAP_SMS
from tw_compile.kernels.gemm.mm_leaving_sms import addmm_leaving_sms, grouped_mm_leaving_sms, mm_leaving_sms
from tw_compile.models.config import load_config
from tw_compile.models.decoder import build_decoder
from tw_compile.passes.split import ScheduledWindow, SplitReport, find_token_axis, split_tokens
from tw_compile.passes.split.analysis.token_axis import TokenAxis
from tw_compile.passes.split.peephole.grouped import use_small_groups
from tw_compile.passes.split.peephole.residual import narrow_residuals
from tw_compile.passes.split.rules import attention as rules_attention
from tw_compile.passes.split.schedule import budgets as budgets_module
from tw_compile.passes.split.schedule.budgets import Budgets, reserve_sms
from tw_compile.passes.split.schedule.dependences import argument
from tw_compile.passes.split.schedule.windows import DEFAULT_OVERLAP_SMS, schedule
from tw_compile.planning import load_profile
from tw_compile.report import OverlapWindow, Split
from tw_compile.testing import fake_cuda, fake_process_group, rewrite
from tw_compile.testing.graphs import find_ops

H200 = load_profile("H200")
PROFILE = dataclasses.replace(H200, gemm=dataclasses.replace(H200.gemm, own_gemms=False))
FP32, CPU = torch.float32, torch.device("cpu")


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with fake_process_group(WORLD_SIZE):
        yield


def planned(
    family: str = "llama", tokens: int = 21, config: Config | None = None, **fields: Any
) -> tuple[fx.Graph, Budgets]:
    """A graph in halves, and the plan for them where each GEMM is cuBLAS's."""
    return split_and_planned(family, tokens, PROFILE, config, **fields)


@pytest.mark.full
@pytest.mark.parametrize("tokens", [21, 32])
def test_windows_between_requests_and_within_one_are_those_of_the_plan(tokens: int) -> None:
    graph, budgets = planned(tokens=tokens)
    result = woven(graph, budgets)
    kinds = [(window.kind, window.computes) for window in result.windows]
    layer = [("attention", 1), ("attention", 2), ("mlp", 1), ("mlp", 2)]
    assert kinds == [("prologue", 1), ("prologue", 2), *layer, *layer, ("epilogue", "joined")]
    assert budgets.plan is not None
    assert [budgets.planned(window) for window in result.windows[2:6]] == list(budgets.plan.windows)


def test_windows_of_joined_attention_are_those_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules_attention, "suffix_of", lambda call: None)
    graph, budgets = planned(tokens=32)
    result = woven(graph, budgets)
    kinds = [(window.kind, window.computes) for window in result.windows]
    layer = [("qkv", 1), ("join", "joined"), ("o_proj", 2), ("mlp", 1), ("mlp", 2)]
    assert kinds == [("prologue", 1), ("prologue", 2), *layer, *layer, ("epilogue", "joined")]
    assert budgets.plan is not None
    assert [budgets.planned(window) for window in result.windows[2:7]] == list(budgets.plan.windows)


def test_gemms_are_named_as_the_planner_does() -> None:
    graph, budgets = planned(config=Config(strict=True, transport="gloo", absorb_mm="always"))
    result = woven(graph, budgets)
    names = [name for node in graph.nodes if (name := result.parts.gemm_of(node)) is not None]
    attention, mlp = ["qkv"] * 3 + ["o_proj"], ["gate_up"] * 2 + ["down"]
    assert names == (attention * 2 + mlp * 2) * 2


def test_gemms_beside_grouped_ones_have_no_name() -> None:
    graph, budgets = planned("mixtral")
    result = woven(graph, budgets)
    names = [name for node in graph.nodes if (name := result.parts.gemm_of(node)) is not None]
    assert names == ((["qkv"] * 3 + ["o_proj"]) * 2 + ["gate_up", "down"] * 2) * 2, "as is the router's"
    assert {window.kind for window in result.windows} == {"prologue", "attention", "mlp", "epilogue"}


def with_windows(budgets: Budgets, **kinds: dict[str, Any]) -> Budgets:
    """The same plan with other windows, by what they compute."""
    assert budgets.plan is not None
    windows = tuple(dataclasses.replace(one, **kinds.get(one.computes, {})) for one in budgets.plan.windows)
    return dataclasses.replace(budgets, plan=dataclasses.replace(budgets.plan, windows=windows))


def test_each_call_gets_the_ctas_of_the_window_that_it_travels_in() -> None:
    graph, budgets = planned()
    budgets = with_windows(budgets, attention={"ctas": 8}, mlp={"ctas": 24})
    result = woven(graph, budgets)
    starts = find_ops(graph, "all_reduce_rms_norm_start")
    # Site 0 and the sums behind MLPs travel beside attention; the last call of half 2 beside nothing.
    given = [node.kwargs["overlap_sms"] for node in starts]
    assert given == [24, 8, 8, 24, 24, 8, 8, 24, 24, 0]
    assert result.reserved == (0, 24, 8, 8, 24, 24, 8, 8, 24, 24, 0)


def test_calls_in_flight_have_half_of_the_sms_together() -> None:
    graph, budgets = planned()
    budgets = with_windows(budgets, attention={"ctas": 64}, mlp={"ctas": 64})
    woven(graph, budgets)
    starts = find_ops(graph, "all_reduce_rms_norm_start")
    assert {node.kwargs["overlap_sms"] for node in starts} == {0, MAX_OVERLAP_SMS}
    small = dataclasses.replace(budgets, profile=dataclasses.replace(H200, sms=60))
    woven(graph, small)
    assert {node.kwargs["overlap_sms"] for node in starts} == {0, 15}


def test_without_a_plan_calls_get_a_number_and_gemms_stay() -> None:
    graph, _ = planned()
    budgets = Budgets()
    result = woven(graph, budgets)
    starts = find_ops(graph, "all_reduce_rms_norm_start")
    assert {node.kwargs["overlap_sms"] for node in starts} == {0, DEFAULT_OVERLAP_SMS}
    assert reserve_sms(graph, result, budgets) == {}
    assert not find_ops(graph, "mm_leaving_sms")


def budgeted(budgets: Budgets, *names: str) -> Budgets:
    """The same plan, in which the GEMMs of these names begin before the sum arrives, and no others."""
    assert budgets.plan is not None
    windows = []
    for window in budgets.plan.windows:
        gemms = tuple(
            dataclasses.replace(gemm, sms=H200.sms - (window.ctas if gemm.name in names else 0))
            for gemm in window.gemms
        )
        windows.append(dataclasses.replace(window, gemms=gemms))
    return dataclasses.replace(budgets, plan=dataclasses.replace(budgets.plan, windows=tuple(windows)))


def test_gemms_that_begin_before_the_sum_arrives_leave_its_sms_and_compute_the_same() -> None:
    graph, budgets = planned()
    budgets = budgeted(with_windows(budgets, attention={"ctas": 8}, mlp={"ctas": 24}), "qkv", "gate_up")
    values = random_values(graph)
    expected = run_alone(graph, values)
    result = woven(graph, budgets)
    done = reserve_sms(graph, result, budgets)
    graph.lint()
    attention, mlp = (("qkv", 8),) * 3, (("gate_up", 24),) * 2
    assert done == {2: attention, 3: attention, 4: mlp, 5: mlp, 6: attention, 7: attention, 8: mlp, 9: mlp}
    given = [node.args[2] for node in graph.nodes if node.target is mm_leaving_sms]
    assert given == ([8] * 6 + [24] * 4) * 2
    for one, other in zip(expected, run_alone(graph, values), strict=True):
        assert torch.equal(one, other)


def test_gemms_leave_what_is_measured_to_be_best_beside_what_is_left_of_the_sum() -> None:
    graph, budgets = planned()
    budgets = with_windows(budgets, attention={"ctas": 8, "communication_us": 50.0}, mlp={"ctas": 24})
    result = woven(graph, budgets)
    asked: list[tuple[str | None, int, float]] = []

    def measure(node: fx.Node, sms: int, busy_us: float, tokens: int) -> Reserve:
        assert tokens == node.meta["val"].shape[0]
        asked.append((result.parts.gemm_of(node), sms, busy_us))
        return Reserve(0 if sms == 24 else sms + 4, 30.0)

    done = reserve_sms(graph, result, budgets, measure)
    attention = (("qkv", 12),) * 3 + (("o_proj", 12),)
    assert {index: leaving for index, leaving in done.items() if index in (2, 3)} == {2: attention, 3: attention}
    assert asked[:4] == [("qkv", 8, 50.0), ("qkv", 8, 20.0), ("qkv", 8, 0.0), ("o_proj", 8, 0.0)]
    assert {name for name, sms, _ in asked if sms == 24} <= {"gate_up", "down"}


def test_gemms_that_are_not_measured_stay_where_those_before_them_outlast_the_sum() -> None:
    graph, budgets = planned()
    budgets = budgeted(with_windows(budgets, attention={"ctas": 8, "communication_us": 50.0}), "qkv", "o_proj")
    result = woven(graph, budgets)

    def measure(node: fx.Node, sms: int, busy_us: float, tokens: int) -> Reserve | None:
        return Reserve(sms, 60.0) if result.parts.gemm_of(node) == "qkv" else None

    assert reserve_sms(graph, result, budgets, measure)[2] == (("qkv", 8),) * 3


def test_sizes_that_are_not_known_are_measured_for_the_tokens_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(budgets_module, "measured_reserve", lambda *asked: seen.append(asked))
    environment = ShapeEnv()
    graph = fx.Graph()
    left, right = graph.placeholder("left"), graph.placeholder("right")
    with FakeTensorMode(shape_env=environment):
        left.meta["val"] = torch.empty(environment.create_unbacked_symint(), 32)
        right.meta["val"] = torch.empty(32, 48)
    product = graph.call_function(torch.ops.aten.mm.default, (left, right))
    assert budgets_module.measure_reserve(product, 8, 50.0, 1024) is None
    operands = Operand((1024, 32), (32, 1), FP32), Operand((32, 48), (48, 1), FP32)
    assert seen == [(mm_leaving_sms, operands, CPU, 8, 50.0)]
    assert budgets_module.measure_reserve(product, 8, 50.0, 0) is None and len(seen) == 1
    right.meta["val"] = None
    assert budgets_module.measure_reserve(product, 8, 50.0, 1024) is None and len(seen) == 1


def test_entries_for_experts_are_measured_for_those_of_the_plans_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many to a token as are known; tokens of the other half are a difference."""
    seen = []
    monkeypatch.setattr(budgets_module, "measured_reserve", lambda *asked: seen.append(asked))
    environment = ShapeEnv()
    whole, half = (environment.create_unbacked_symint() for _ in range(2))
    for tokens in (half, whole - half):
        graph = fx.Graph()
        nodes = [graph.placeholder(name) for name in ("rows", "weights", "ends")]
        with FakeTensorMode(shape_env=environment):
            made = torch.empty(2 * tokens, 32), torch.empty(8, 32, 48), torch.empty(8, dtype=torch.int32)
        for node, one in zip(nodes, made, strict=True):
            node.meta["val"] = one
        budgets_module.measure_reserve(graph.call_function(grouped_mm_leaving_sms, (*nodes, 0)), 8, 50.0, 1024)
    operands = Operand((2048, 32), (32, 1), FP32), Operand((8, 32, 48), (1536, 48, 1), FP32)
    assert seen == [(grouped_mm_leaving_sms, (*operands, Operand((8,), (1,), torch.int32)), CPU, 8, 50.0)] * 2


def test_grouped_gemms_leave_sms_and_compute_the_same() -> None:
    graph, budgets = planned("mixtral")
    budgets = budgeted(with_windows(budgets, attention={"ctas": 8}, mlp={"ctas": 24}), "gate_up", "down")
    grouped = find_ops(graph, "_grouped_mm")
    values = random_values(graph)
    expected = run_alone(graph, values)
    use_small_groups(graph)
    result = woven(graph, budgets)
    done = reserve_sms(graph, result, budgets)
    graph.lint()
    assert done == dict.fromkeys((4, 5, 8, 9), (("gate_up", 24), ("down", 24)))
    assert [node.target for node in grouped] == [grouped_mm_leaving_sms] * 8
    assert {node.args[3] for node in grouped} == {24}
    for one, other in zip(expected, run_alone(graph, values), strict=True):
        assert torch.equal(one, other)


@pytest.mark.full
def test_grouped_gemms_stay_that_add_a_bias_or_that_inductor_tunes(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, budgets = planned("mixtral")
    budgets = budgeted(with_windows(budgets, mlp={"ctas": 24}), "gate_up", "down")
    grouped = find_ops(graph, "_grouped_mm")
    with monkeypatch.context() as patch:
        patch.setattr(compat, "tunes_gemms", lambda: True)
        use_small_groups(graph)
    assert {node.target for node in grouped} == {torch.ops.aten._grouped_mm.default}
    for node, more in zip(grouped, [{"bias": None}, {"out_dtype": None}] * 4, strict=True):
        node.kwargs = more
    use_small_groups(graph)
    assert {node.target for node in grouped} == {torch.ops.aten._grouped_mm.default}
    assert reserve_sms(graph, woven(graph, budgets), budgets) == {}


def test_absorbed_gemms_leave_sms_by_an_argument() -> None:
    graph, budgets = planned(config=Config(strict=True, transport="gloo", absorb_mm="always"))
    budgets = budgeted(with_windows(budgets, mlp={"ctas": 24}), "down")
    reserve_sms(graph, woven(graph, budgets), budgets)
    given = [node.kwargs.get("reserved_sms", 0) for node in graph.nodes if node.target is ops.mm_start]
    assert given == [0, 0, 24, 24] * 2
    assert not find_ops(graph, "mm_leaving_sms")


def test_gemms_without_a_call_beside_them_stay() -> None:
    """Whatever the plan says about their window."""
    graph, budgets = planned()
    budgets = budgeted(budgets, "qkv", "o_proj", "gate_up", "down")
    result = woven(graph, budgets)
    result = dataclasses.replace(result, reserved=(0,) * len(result.windows))
    assert reserve_sms(graph, result, budgets) == {}


@pytest.mark.full
def test_gemms_that_inductor_tunes_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, budgets = planned()
    budgets = budgeted(budgets, "qkv")
    monkeypatch.setattr(compat, "tunes_gemms", lambda: True)
    assert reserve_sms(graph, woven(graph, budgets), budgets) == {}


def test_gemms_with_a_bias_leave_sms_unless_they_scale() -> None:
    graph, budgets = planned("qwen2")
    budgets = budgeted(budgets, "qkv")
    result = woven(graph, budgets)
    biased = [node for node in graph.nodes if node.target is torch.ops.aten.addmm.default]
    if biased:
        biased[0].kwargs = {"alpha": 2}
    reserve_sms(graph, result, budgets)
    left = [node for node in graph.nodes if node.target is torch.ops.aten.addmm.default]
    assert biased and left == biased[:1]
    assert all(node.target is addmm_leaving_sms and node.args[3] for node in biased[1:])


def test_operators_that_leave_sms_are_split_like_matmuls() -> None:
    graph = family_graph("llama", 3, 21)
    axis = find_token_axis(graph)
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.mm.default:
            node.target, node.args = mm_leaving_sms, (*node.args, 8)
    assert isinstance(axis, TokenAxis) and find_token_axis(graph) == axis
    report = split_tokens(graph, 1, unit="request")
    assert isinstance(report, SplitReport) and not report.joins
    assert {node.args[2] for node in graph.nodes if node.target is mm_leaving_sms} == {8}


def split_70b(**options: Any) -> Split:
    with fake_cuda():
        decoder = build_decoder(load_config("llama-3.3-70b"), device="cuda", dtype=torch.bfloat16, num_layers=2)
        ids = torch.zeros(2, 2048, dtype=torch.long, device="cuda")
        config = Config(split="2048", device_profile="H200", strict=True, **options)
        seen = rewrite(decoder, (ids,), world_size=WORLD_SIZE, config=config)
    assert seen.report.split is not None
    return seen.report.split


def test_report_has_for_each_window_what_the_plan_gave_it() -> None:
    split = split_70b()
    assert split.plan is not None and split.overlap is not None
    steady = split.overlap.windows[
        -5:-1
    ]  # of the last layer: whether the embedding's sum is fused depends on transformers
    for window, asked in zip(steady, split.plan.windows, strict=True):
        assert (window.kind, window.computes, window.overlap_sms) == (asked.computes, asked.half, asked.ctas)
        assert (window.compute_us, window.communication_us, window.us) == (
            asked.compute_us,
            asked.communication_us,
            asked.us,
        )
        assert {name for name, _ in window.gemms_leaving_sms} == {
            gemm.name for gemm in asked.gemms if gemm.sms < H200.sms
        }
    assert any(window.gemms_leaving_sms for window in steady)
    assert split.overlap.windows[0] == OverlapWindow("prologue", 1, (), split.overlap.windows[0].operators)


def test_budgets_can_be_switched_off() -> None:
    split = split_70b(split_gemm_sms="off")
    assert split.overlap is not None
    assert not any(window.gemms_leaving_sms for window in split.overlap.windows)
    assert any(window.overlap_sms for window in split.overlap.windows)


@pytest.mark.full
def test_a_split_that_an_option_names_is_planned_and_goes_between_requests() -> None:
    for first, unit, sizes in ((42, "request", (2, 1)), (41, "token", (41, 22))):
        graph = family_graph("llama", 3, 21, dtype=torch.bfloat16)
        graph = fx.GraphModule(torch.nn.Module(), graph).graph
        split = split_graph(graph, Config(split=str(first), device_profile="H200"), H200)
        assert (split.unit, split.sizes) == (unit, sizes)
        assert split.plan is not None and split.plan.candidates == 1
        assert {window.half for window in split.plan.windows} == {1, 2}
        messages = {window.message_bytes for window in split.plan.windows if window.travels == 1}
        assert len(messages) == 1 and messages.pop() % first == 0


def test_window_that_the_plan_does_not_have_gets_enough_for_the_shortest() -> None:
    _, budgets = planned()
    budgets = with_windows(budgets, attention={"ctas": 8}, mlp={"ctas": 24})
    assert budgets.overlap_sms(ScheduledWindow(0, "epilogue", 1, ((0, 2),), 3)) == 24


def test_calls_beside_other_work_keep_residuals_in_the_models_dtype() -> None:
    graph, budgets = planned()
    starts = find_ops(graph, "all_reduce_rms_norm_start")
    sharded = [node for node in starts if argument(node, "residual_out") == "sharded"]
    assert sharded and all(argument(node, "residual_dtype") == FP32 for node in sharded)
    schedule(graph, budgets.overlap_sms, budgets.most_sms)
    beside = [node for node in sharded if argument(node, "overlap_sms")]
    assert narrow_residuals(graph) == len(beside) > 0
    for node in sharded:
        dtype = torch.bfloat16 if node in beside else FP32
        kept = next(user for user in node.users if user.args[1] == 1)
        assert argument(node, "residual_dtype") == node.meta["val"][1].dtype == kept.meta["val"].dtype == dtype
    assert narrow_residuals(graph) == 0
