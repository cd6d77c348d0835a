"""Which split of those that could be planned is taken: kernels of transports, ties, ranges of token counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tw_compile.models.config import load_config, tensor_parallel_plan
from tw_compile.passes.reasons import HostAttention, SplitRefusal
from tw_compile.passes.split import SplitChoice
from tw_compile.passes.split.analysis import choose
from tw_compile.passes.split.analysis.choose import Counts, NotSplit, _Planner
from tw_compile.passes.split.analysis.layer import GraphLayer
from tw_compile.passes.split.analysis.token_axis import TokenAxis, Unit
from tw_compile.planning import DeviceProfile, Mode, Off, Plan, layer_shape, load_profile, plan_layer
from tw_compile.planning.halves import MOST_TOKENS, FirstHalf
from tw_compile.planning.plan import RESOLUTION

H100, H200 = load_profile("H100"), load_profile("H200")
MODEL = load_config("llama-3.3-70b")
LAYER = layer_shape(MODEL, tensor_parallel_plan(MODEL), 4)
TOKENS = 4096
PLAN = plan_layer(H200, LAYER, TOKENS)


def planner(unit: Unit = "token", batch: int = 1) -> _Planner:
    axis = TokenAxis(unit, TOKENS, batch, {})
    return _Planner(axis, batch, H200, GraphLayer(LAYER, "p2p"), "stream", "auto", True)


def plan_of(first: int, tokens: int, us: float, off: Off | None = None) -> Plan:
    predicted = replace(PLAN.predicted, split_us=us, fused_us=1000.0, unfused_us=1000.0)
    made = replace(PLAN, tokens=tokens, predicted=predicted)
    if off is not None:
        return replace(made, mode=Mode.OFF, sizes=(tokens,), off=off, reason=f"{us} us")
    return replace(made, sizes=(first, tokens - first))


Script = Callable[[int, int | None, bool], Plan]
"""A plan by the tokens, half 1 where that is settled, and whether sequences may be cut."""
Planned = Callable[[Script], list[int]]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Planned:
    """Makes a script take the planner's place; the token counts that no half was settled for are noted."""

    def use(plan: Script) -> list[int]:
        asked: list[int] = []

        def scripted(profile: DeviceProfile, layer: Any, tokens: int, **options: Any) -> Plan:
            if options["first"] is None:
                asked.append(tokens)
            return plan(tokens, options["first"], options["cut_sequences"])

        monkeypatch.setattr(choose, "plan_layer", scripted)
        return asked

    return use


@pytest.mark.parametrize(
    ("profile", "named", "transport", "kernel"),
    [
        (H100, True, "p2p", "stream"),
        (H100, True, "gloo", "stream"),
        (H100, True, "multimem", "multimem"),
        (H100, False, "p2p", "stream"),
        (replace(H100, kernel="two_shot"), False, "p2p", "two_shot"),
        (H100, False, "multimem", "multimem"),
        (H100, False, "nccl", None),
        (H200, False, "p2p", "stream"),
        (H200, True, "multimem", None),
        (replace(H100, kernel="multimem"), False, "p2p", "two_shot"),
    ],
)
def test_a_transport_has_the_kernel_that_it_runs(
    profile: DeviceProfile, named: bool, transport: str, kernel: str | None
) -> None:
    assert profile.kernel_of_transport(transport, named) == kernel


@pytest.mark.parametrize(("faster", "unit"), [(0.0, "request"), (RESOLUTION / 2, "request"), (2 * RESOLUTION, "token")])
def test_requests_stay_whole_unless_cutting_one_is_faster_than_can_be_told(
    faster: float, unit: str, planned: Planned
) -> None:
    planned(lambda tokens, first, cut: plan_of(2048 + 512 * cut, tokens, 100.0 * (1.0 - faster * cut)))
    choice = choose.choice_for([planner("request", 4), planner("token", 4)], TOKENS)
    assert isinstance(choice, SplitChoice) and choice.axis.unit == unit
    assert choice.first == {"request": 2, "token": 2560}[unit]


def test_a_split_that_pays_is_taken_where_another_does_not(planned: Planned) -> None:
    planned(lambda tokens, first, cut: plan_of(2048, tokens, 100.0, None if cut else Off.NOT_FASTER))
    choice = choose.choice_for([planner("request", 4), planner("token", 4)], TOKENS)
    assert isinstance(choice, SplitChoice) and choice.axis.unit == "token"


def test_of_splits_that_do_not_pay_the_faster_one_says_why(planned: Planned) -> None:
    planned(lambda tokens, first, cut: plan_of(2048, tokens, 90.0 if cut else 100.0, Off.NOT_FASTER))
    refused = choose.choice_for([planner("request", 4), planner("token", 4)], TOKENS)
    assert isinstance(refused, NotSplit) and (refused.reason, refused.detail) == (Off.NOT_FASTER, "90.0 us")


@pytest.mark.parametrize(
    ("attention", "off", "modes"),
    [("auto", None, ["auto"]), ("auto", Off.NOT_FASTER, ["auto", "split"]), ("join", Off.NOT_FASTER, ["join"])],
)
def test_attention_of_settled_halves_is_cut_where_splitting_does_not_pay(
    attention: str, off: Off | None, modes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def plan(*args: Any, **options: Any) -> Plan:
        asked.append(options["attention"])
        return plan_of(options["first"], TOKENS, 100.0, off)

    monkeypatch.setattr(choose, "plan_layer", plan)
    replace(planner(), attention=attention).plan_anyway(TOKENS, 1024)
    assert asked == modes


def test_a_range_that_pays_nowhere_says_why_where_it_comes_closest(planned: Planned) -> None:
    planned(lambda tokens, first, cut: plan_of(2048, tokens, 990.0 + abs(tokens - 2048), Off.NOT_FASTER))
    refused = choose.choice_for_range(planner(), 512, 4096)
    assert isinstance(refused, NotSplit) and (refused.reason, refused.detail) == (Off.NOT_FASTER, "990.0 us")


def from_1024(tokens: int, first: int | None, cut: bool) -> Plan:
    """A tenth is saved from 1024 tokens on, below that a tenth is lost."""
    return plan_of(first or tokens // 2, tokens, *((900.0,) if tokens >= 1024 else (1100.0, Off.NOT_FASTER)))


def test_a_range_that_loses_at_some_counts_names_a_range_that_pays(planned: Planned) -> None:
    planned(from_1024)
    refused = choose.choice_for_range(planner(), 2, 8192)
    assert isinstance(refused, NotSplit) and refused.reason == SplitRefusal.TOKEN_COUNT_UNKNOWN
    assert refused.plan is not None and refused.plan.off == Off.NOT_FASTER
    assert refused.detail.startswith(
        "one graph for 2 to 8192 tokens, and no first half is harmless at all of them: at "
    )
    assert refused.detail.endswith(
        "; 1024 to 8192 would be split: bound it, as by torch._dynamo.mark_dynamic(min=1024, max=8192)"
    )
    assert isinstance(choose.choice_for_range(planner(), 1024, 8192), SplitChoice)
    of_host = choose.choice_for_range(replace(planner(), host=choose.HostGraph((2, 8192))), 2, 8192)
    assert isinstance(of_host, NotSplit) and of_host.detail.endswith("; 1024 to 8192 would be split")


def test_an_unbounded_range_names_bounds_that_pay_if_there_are_some(planned: Planned) -> None:
    planned(from_1024)
    refused = choose.choice_for_range(planner(), 2, None)
    assert isinstance(refused, NotSplit) and refused.reason == SplitRefusal.TOKEN_COUNT_UNKNOWN
    assert refused.detail.endswith(
        "of up to 16384, 1024 to 16384 would be split: bound it, as by torch._dynamo.mark_dynamic(min=1024, max=16384)"
    )
    planned(lambda tokens, first, cut: plan_of(tokens // 2, tokens, 1000.0, Off.NOT_FASTER))
    refused = choose.choice_for_range(planner(), 2, None)
    assert isinstance(refused, NotSplit) and refused.detail.endswith("of up to 16384 none pays")


@pytest.mark.parametrize(
    ("example", "counts", "split"),
    [(64, (2, 1023), False), (1024, (1024, 16384), True), (9000, (1024, 16384), True), (20000, (16385, None), False)],
)
def test_an_unbounded_graph_is_made_for_the_counts_that_are_split_as_its_example_is(
    planned: Planned, example: int, counts: tuple[int, int | None], split: bool
) -> None:
    planned(from_1024)
    tokens: Any = object()
    choice = choose.choice_for_example(planner(), tokens, 2, example)
    assert choice.counts == Counts(tokens, *counts) and isinstance(choice, SplitChoice) is split
    if isinstance(choice, SplitChoice):
        bounded = choose.choice_for_range(planner(), 1024, 16384)
        assert isinstance(bounded, SplitChoice) and choice.first == bounded.first
    else:
        assert f"a graph for {choice.counts} tokens" in choice.detail and "graphs of their own" in choice.detail


def test_an_unbounded_graph_is_for_all_counts_where_none_pays(planned: Planned) -> None:
    planned(lambda tokens, first, cut: plan_of(tokens // 2, tokens, 1000.0, Off.NOT_FASTER))
    choice = choose.choice_for_example(planner(), Any, 2, 4096)  # type: ignore[arg-type]
    assert isinstance(choice, NotSplit) and choice.counts is None and choice.detail.endswith("none pays")


def test_an_unbounded_graph_of_several_requests_is_made_for_whole_requests(planned: Planned) -> None:
    planned(from_1024)
    tokens: Any = object()
    choice = choose.choice_for_example(planner("request", 4), tokens, 8, 4096)
    assert isinstance(choice, SplitChoice) and choice.first == 2
    assert choice.counts is not None and choice.counts.low % 4 == choice.counts.high % 4 == 0  # type: ignore[operator]
    inside_of_one = choose.choice_for_example(planner("token", 4), tokens, 8, 4096)
    assert isinstance(inside_of_one, NotSplit) and inside_of_one.counts is None


def test_bounds_of_several_requests_are_those_of_one(planned: Planned) -> None:
    planned(from_1024)
    refused = choose.choice_for_range(planner("request", 4), 64, 8192)
    assert isinstance(refused, NotSplit)
    assert refused.detail.endswith(
        "1024 to 8192 would be split, 4 requests: bound it, as by torch._dynamo.mark_dynamic(min=256, max=2048) a request"
    )


@pytest.mark.parametrize(("captured", "off"), [(0, Off.HOST_SLOWER), (TOKENS, None)])
def test_a_graph_that_its_host_launches_more_slowly_than_it_runs_stays_whole(captured: int, off: Off | None) -> None:
    us, unsplit = PLAN.predicted.split_us, PLAN.predicted.unsplit_us
    assert us is not None and us < 0.9 * unsplit
    # A host that takes longer than the device is what the layer takes; it may still be faster than unsplit.
    for slower, expected in ((us * 1.5, off), (us * 1.01, None), (us / 2, None)):
        host = choose.HostGraph((TOKENS, TOKENS), HostAttention.HALVES, slower, captured)
        assert replace(planner(), host=host).plan(TOKENS).off == expected
        assert replace(planner(), host=host).plan_anyway(TOKENS, 2048).off is None  # an option asks for it
        chosen = choose.choice_for([replace(planner(), host=host)], TOKENS)
        assert chosen.reason == expected if isinstance(chosen, NotSplit) else expected is None


@pytest.mark.parametrize(
    ("unit", "batch", "high", "splits"),
    [
        ("token", 1, MOST_TOKENS, True),
        ("token", 1, MOST_TOKENS + 1, False),
        ("token", 1, None, False),
        ("token", 2, 4096, False),
        ("request", 2, MOST_TOKENS + 1, True),
        ("request", 2, None, False),
    ],
)
def test_a_range_must_be_bounded_and_of_one_request_where_that_is_cut(
    unit: Unit, batch: int, high: int | None, splits: bool, planned: Planned
) -> None:
    planned(lambda tokens, first, cut: plan_of(first or tokens // 2, tokens, 100.0))
    result = choose.choice_for_range(planner(unit, batch), 4000 if high == 4096 else MOST_TOKENS - 8, high)
    assert isinstance(result, SplitChoice) is splits
    assert isinstance(result, SplitChoice) or result.reason == SplitRefusal.TOKEN_COUNT_UNKNOWN


Shared = Callable[[Callable[[int, float], float]], SplitChoice | NotSplit]


@pytest.fixture
def shared(planned: Planned) -> Shared:
    """The choice for 2048 to 8192 tokens, by the time at each count of each share; unsplit it takes 1000."""

    def choice(us: Callable[[int, float], float]) -> SplitChoice | NotSplit:
        def plan(tokens: int, first: int | None, cut: bool) -> Plan:
            if first is None:
                return plan_of(tokens // 2, tokens, 100.0)
            time = us(tokens, first / tokens)
            return plan_of(first, tokens, time, None if time < 950.0 else Off.NOT_FASTER)

        planned(plan)
        return choose.choice_for_range(planner(), 2048, 8192)

    return choice


def half_of(choice: SplitChoice | NotSplit) -> str:
    assert isinstance(choice, SplitChoice) and isinstance(choice.first, FirstHalf) and choice.plan is not None
    assert (choice.plan.tokens, choice.plan.sizes[0]) == (4096, choice.first(4096))
    return str(choice.first)


def test_shares_that_are_equally_fast_are_decided_by_the_middle_then_by_larger_tiles(shared: Shared) -> None:
    assert half_of(shared(lambda tokens, share: 100.0)) == "s*8//16//256*256"
    assert half_of(shared(lambda tokens, share: 100.9 if share == 0.5 else 100.0)) == "s*8//16//256*256"
    assert half_of(shared(lambda tokens, share: 101.1 if share == 0.5 else 100.0)) == "s*7//16//256*256"


def test_a_share_that_costs_something_at_one_count_is_no_first_half(shared: Shared) -> None:
    assert (
        half_of(shared(lambda tokens, share: 1100.0 if (share, tokens) == (0.5, 2048) else 100.0)) == "s*7//16//256*256"
    )
    refused = shared(lambda tokens, share: 1100.0 if tokens == 8192 else 100.0)
    assert isinstance(refused, NotSplit) and refused.reason == SplitRefusal.TOKEN_COUNT_UNKNOWN
    assert "no first half is harmless at all" in refused.detail


def test_the_share_that_takes_the_least_time_at_all_counts_is_taken(shared: Shared) -> None:
    """Long steps decide, as most counts are theirs."""

    def us(tokens: int, share: float) -> float:
        if share == 0.75:
            return 110.0 if tokens == 2048 else 100.0
        return 100.0 if tokens == 2048 else 105.0

    assert half_of(shared(us)) == "s*12//16//256*256"
