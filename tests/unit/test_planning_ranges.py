"""Where ranges of token counts are cut, and which are split: by plans that are made up, and by the planner's."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tw_compile.models.config import load_config, tensor_parallel_plan
from tw_compile.planning import Mode, Off, Plan, layer_shape, load_profile, plan_layer
from tw_compile.planning.plan import RESOLUTION
from tw_compile.planning.ranges import GRAIN, MOST_CUTS, Ranges

MODEL = load_config("llama-3.3-70b")
LAYER = layer_shape(MODEL, tensor_parallel_plan(MODEL), 4)
H200 = load_profile("H200")
PLAN = plan_layer(H200, LAYER, 4096)
SAVED, LOST, NEARLY = 0.1, -0.1, -RESOLUTION / 2
"""Shares of the unsplit layer's time: what pays, what costs, what can't be told from costing nothing."""


def plan_of(tokens: int, first: int | None, share: float, off: Off = Off.NOT_FASTER) -> Plan:
    us = float(tokens)
    predicted = replace(PLAN.predicted, unfused_us=us, fused_us=us, split_us=us * (1 - share))
    if share > RESOLUTION and off is Off.NOT_FASTER:
        first = first or tokens // 2
        return replace(PLAN, tokens=tokens, predicted=predicted, sizes=(first, tokens - first))
    return replace(PLAN, tokens=tokens, predicted=predicted, mode=Mode.OFF, sizes=(tokens,), off=off)


def made_up(stretches: dict[int, float], **options: object) -> Ranges:
    """By what is saved from each count on."""

    def plan(tokens: int, first: int | None, least: int) -> Plan:
        return plan_of(tokens, first, next(share for low, share in reversed(stretches.items()) if low <= tokens))

    return Ranges(plan, 4, **options)  # type: ignore[arg-type]


def cut(ranges: Ranges, low: int = 513, high: int = 8192, ends: tuple[int, ...] = ()) -> list[tuple[int, int, bool]]:
    return [(part.low, part.high, part.split is not None) for part in ranges.cut(low, high, ends)]


def test_a_range_is_cut_where_splitting_begins_and_ends_to_pay() -> None:
    assert cut(made_up({1: LOST})) == [(513, 8192, False)]
    assert cut(made_up({1: SAVED})) == [(513, 8192, True)]
    assert cut(made_up({1: LOST, 1088: SAVED})) == [(513, 1087, False), (1088, 8192, True)]
    assert cut(made_up({1: SAVED, 3000: LOST})) == [(513, 2944, True), (2945, 8192, False)]  # at multiples of 64
    both = made_up({1: LOST, 1088: SAVED, 2049: LOST})
    assert cut(both) == [(513, 1087, False), (1088, 2048, True), (2049, 8192, False)]
    two = made_up({1: SAVED, 1088: LOST, 4096: SAVED})
    assert cut(two) == [(513, 1024, True), (1025, 4095, False), (4096, 8192, True)]


def test_counts_that_cost_nothing_do_not_part_those_that_pay() -> None:
    assert cut(made_up({1: LOST, 1024: SAVED, 1537: NEARLY, 2560: SAVED})) == [(513, 1023, False), (1024, 8192, True)]
    assert cut(made_up({1: NEARLY, 7168: SAVED})) == [(513, 8192, True)]
    assert cut(made_up({1: NEARLY, 8192: SAVED * 0.12})) == [
        (513, 8192, False)
    ]  # more is lost than saved, and none has one size


def test_of_more_stretches_than_can_be_cut_out_those_that_save_most_are_split() -> None:
    three = made_up({1: LOST, 640: SAVED, 769: LOST, 2048: SAVED, 3073: LOST, 4096: 2 * SAVED, 6145: LOST})
    assert cut(three) == [(513, 4095, False), (4096, 6144, True), (6145, 8192, False)]
    assert cut(three, ends=(4095, 6144)) == [
        (513, 2047, False), (2048, 3072, True), (3073, 4095, False), (4096, 6144, True), (6145, 8192, False),
    ]  # fmt: skip


def test_ranges_that_no_graph_could_be_split_for_stay_whole() -> None:
    gated = made_up({1: SAVED}, may_split=lambda low, high: low > 4095)
    assert cut(gated, ends=(4095,)) == [(513, 4095, False), (4096, 8192, True)]


def test_where_launches_take_longer_no_gain_counts() -> None:
    def plan(tokens: int, first: int | None, least: int) -> Plan:
        return plan_of(
            tokens, first, SAVED if tokens >= 4096 else NEARLY, Off.NOT_FASTER if tokens >= 2048 else Off.HOST_SLOWER
        )

    assert cut(Ranges(plan, 4)) == [(513, 4095, False), (4096, 8192, True)]
    assert Ranges(plan, 4).split(2047, 8192) is None and Ranges(plan, 4).split(2048, 8192) is not None


def test_a_split_that_no_share_is_harmless_for_is_not_planned() -> None:
    """As if halves of 1 to 8 were fast below 2048 tokens, and others from there on: then a range each can be split."""

    def plan(tokens: int, first: int | None, least: int) -> Plan:
        fits = first is None or (first * 3 < tokens) == (tokens < 2048)
        return plan_of(tokens, first, SAVED if fits else LOST)

    ranges = Ranges(plan, 4)
    assert ranges.split(513, 8192) is None and cut(ranges) == [(513, 8192, False)]
    assert cut(ranges, ends=(2047,)) == [(513, 2047, True), (2048, 8192, True)]


STRETCHES = st.dictionaries(st.integers(1, 8192), st.sampled_from([SAVED, LOST, NEARLY]), max_size=8)


@settings(deadline=None, max_examples=60)
@given(STRETCHES, st.sampled_from([1, 513]), st.lists(st.integers(514, 8190), max_size=2))
def test_cuts_are_few_and_nothing_that_costs_is_split(stretches: dict[int, float], low: int, ends: list[int]) -> None:
    shares = dict(sorted({1: LOST, **stretches}.items()))
    ranges = made_up(shares)
    parts = ranges.cut(low, 8192, ends)
    assert parts[0].low == low and parts[-1].high == 8192
    assert all(one.high + 1 == other.low for one, other in itertools.pairwise(parts))
    cuts = [part.high for part in parts[:-1] if part.high not in ends]
    assert set(ends) <= {part.high for part in parts} and len(cuts) <= MOST_CUTS
    assert all(part.low < part.high for part in parts if {part.low - 1, part.high} & set(cuts))
    for part in parts:
        if part.split is not None:
            assert part.split.saved > 0 and all(plan.harmless for plan in part.split.plans)
            assert [plan.tokens for plan in part.split.plans] == ranges.counts(part.low, part.high)


@settings(deadline=None, max_examples=40)
@given(st.integers(520, 8000), st.integers(2 * GRAIN, 7600), st.sampled_from([NEARLY, LOST]))
def test_every_count_that_pays_is_split_where_two_cuts_do(begin: int, length: int, otherwise: float) -> None:
    """But for some near the ends: cuts are at multiples of 64, and plans are made for four counts of each doubling."""
    end = min(begin + length, 8192)
    ranges = made_up({1: LOST, begin: SAVED, end + 1: otherwise})
    seen = [count for count in ranges.counts(513, 8192) if begin <= count <= end]
    split = [part for part in ranges.cut(513, 8192) if part.split is not None]
    if len(seen) == 1 and seen[0] == 8192:
        return
    assert len(split) == bool(seen)
    if seen:
        assert split[0].low < begin + GRAIN and end - GRAIN < split[0].high
        assert split[0].low >= begin and (split[0].high <= end or otherwise == NEARLY)


@pytest.mark.full
@pytest.mark.parametrize(("name", "ranks"), [("llama-3.1-8b", 2), ("llama-3.3-70b", 4)])
def test_long_steps_of_models_are_split_from_some_count_on(name: str, ranks: int) -> None:
    model = load_config(name)
    layer = layer_shape(model, tensor_parallel_plan(model), ranks, merged=True)
    layer = replace(layer, attention=replace(layer.attention, kernel="flash3"))
    plan = functools.cache(lambda tokens, first: plan_layer(H200, layer, tokens, first=first))
    found = Ranges(lambda tokens, first, least: plan(tokens, first), ranks)
    parts = found.cut(65, 8192)
    assert [part.split is not None for part in parts] == [False, True] and parts[1].low < 2048
    assert parts[1].split is not None and str(parts[1].split.first).startswith("s*8//16//")
    earlier = found.split(parts[1].low - GRAIN, 8192)
    assert earlier is None or earlier.saved < 1.01 * parts[1].split.saved


def test_a_range_begins_later_where_its_first_counts_would_decide_about_the_halves_of_all_others() -> None:
    """Of 1024 and 1025 tokens only halves of different sizes are harmless, and these save little of longer steps."""

    def plan(tokens: int, first: int | None, least: int) -> Plan:
        half = tokens // 2 if first is None else first
        even = abs(2 * half - tokens) <= tokens // 8
        if tokens < 1024:
            share = LOST
        elif tokens < 1026:
            share = LOST if even and first is not None else SAVED
        else:
            share = SAVED if even else SAVED / 5
        return plan_of(tokens, first, share)

    ranges = Ranges(plan, 2)
    parts = ranges.cut(513, 8192)
    assert [part.split is not None for part in parts] == [False, True]
    assert 1024 < parts[1].low <= 2048 and parts[0].high == parts[1].low - 1
    assert parts[1].split is not None and parts[1].split.first.numerator == 8  # type: ignore[union-attr]
    kept = ranges.cut(513, 8192, ends=(1023,))
    assert kept[0].high == 1023 and kept[-1].split == parts[1].split and len(kept) == 3


def test_a_range_that_begins_later_leaves_no_size_alone() -> None:
    """Of 1279 tokens only a larger first half is harmless. The next count that plans are made for is 1280."""

    def plan(tokens: int, first: int | None, least: int) -> Plan:
        if first is None or (first > tokens // 2) == (tokens == 1279):
            return plan_of(tokens, first, SAVED)
        return plan_of(tokens, first, LOST if tokens == 1279 else SAVED / 5)

    ranges = Ranges(plan, 2)
    (whole, split) = ranges.cut(1279, 8192)
    assert (whole.low, whole.high, whole.split) == (1279, 1535, None)
    assert (split.low, split.split) == (1536, ranges.split(1536, 8192))
