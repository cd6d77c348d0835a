"""What the planner's windows are made of: SMs of the steps, CTAs of the kernel beside them, rows that stay in the slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tw_compile.models.config import load_config, tensor_parallel_plan
from tw_compile.planning import Gemm, LayerShape, PlannedWindow, layer_shape, load_profile, plan_layer
from tw_compile.planning import plan as plan_module
from tw_compile.planning.windows import SLACK, Computation, Costs, weave, weave_joined

H200 = load_profile("H200")
STREAM = H200.fused["stream"]
TOKENS = 2048


def layer_of(name: str, world_size: int, merged: bool = True) -> LayerShape:
    config = load_config(name)
    return layer_shape(config, tensor_parallel_plan(config), world_size, merged)


LLAMA, MIXTRAL = layer_of("llama-3.3-70b", 4), layer_of("mixtral-8x22b", 8)
COSTS = Costs(H200, LLAMA, STREAM, (2 * TOKENS,))


def window(*steps: Computation, ctas: int = 8) -> PlannedWindow:
    return COSTS._window("mlp", 1, steps, TOKENS, ctas, True)


def test_what_begins_when_the_sum_has_just_arrived_leaves_its_sms() -> None:
    travels = window().communication_us
    seen: list[int] = []

    def behind(share: float) -> int:
        """SMs of what begins after ``share`` of the time that the sum travels; beside it all takes longer."""
        before = travels * (share - 1.0 + 1.0 / H200.contention)
        window(lambda sms: before, lambda sms: seen.append(sms) or 1.0)  # type: ignore[func-returns-value]
        return seen[-1]

    assert 1.05 < SLACK < 1.15
    assert [behind(share) for share in (1.0, 1.05, 1.15)] == [H200.sms - 8, H200.sms - 8, H200.sms]


def test_what_computes_takes_longer_while_the_sum_travels_and_no_longer() -> None:
    travels = window().communication_us
    short, long = travels / 4, travels * 4
    assert window(lambda sms: short).compute_us == pytest.approx(short * H200.contention)
    alone = travels / H200.contention
    assert window(lambda sms: long).compute_us == pytest.approx(travels + long - alone)


def test_of_windows_about_as_long_the_one_with_the_fewest_ctas_is_taken() -> None:
    assert COSTS.window("mlp", 1, [lambda sms: 1e5], TOKENS).ctas == STREAM.ctas[0]
    assert COSTS.window("mlp", 1, [lambda sms: 1.0], TOKENS).ctas > STREAM.ctas[0]


def test_gemms_that_are_told_nothing_leave_no_sms_and_some_of_their_ctas_come_late() -> None:
    """Experts' as plain ones: each CTA has its share of the tiles."""
    told, untold = (Costs(H200, MIXTRAL, STREAM, (TOKENS,), gemms_leave_sms=leave) for leave in (True, False))
    plain, grouped = Gemm("o_proj", 6144, 6144), MIXTRAL.mlp[0]
    assert grouped.experts > 1
    for gemm in (plain, grouped):
        (left, left_us), (taken, taken_us) = (costs.beside(gemm, TOKENS, 8, 100.0) for costs in (told, untold))
        assert (left.sms, taken.sms) == (H200.sms - 8, H200.sms)
        assert left_us == left.us and taken_us == pytest.approx(taken.us + min(taken.us, 100.0))


class Noting(Costs):
    """Which windows read what travels in them where peers write it."""

    def __init__(self, layer: LayerShape) -> None:
        super().__init__(H200, layer, STREAM, (2 * TOKENS,))
        self.in_slot: list[bool | None] = []

    def window(
        self,
        computes: str,
        half: int,
        steps: Sequence[Computation],
        message_tokens: int = 0,
        in_slot: bool = False,
        summed: str = "attention",
    ) -> PlannedWindow:
        self.in_slot.append(in_slot if message_tokens else None)
        return super().window(computes, half, steps, message_tokens, in_slot, summed)


@pytest.mark.parametrize(
    ("layer", "cut", "joined"),
    [
        (LLAMA, [True] * 4, [True, None, True, True, True]),
        (MIXTRAL, [True, False, False, True], [True, None, False, False, True]),
    ],
    ids=["dense", "experts"],
)
def test_what_experts_gather_is_copied_out_of_the_slot(layer: LayerShape, cut: list[Any], joined: list[Any]) -> None:
    for way, expected in ((weave, cut), (weave_joined, joined)):
        costs = Noting(layer)
        way(costs, TOKENS, 2 * TOKENS)
        assert costs.in_slot == expected


def test_waves_of_projections_of_their_own_are_added_up_by_half() -> None:
    plan = plan_layer(H200, layer_of("llama-3.3-70b", 4, merged=False), 2 * TOKENS, first=1024, min_gain=0.0)
    (found,) = (one for one in plan.waves if one.name == "qkv")
    halves = [sum(gemm.waves for gemm in one.gemms if gemm.name == "qkv") for one in plan.windows[:2]]
    assert [found.first, found.second] == halves and halves[0] < halves[1]


def test_sequences_begin_half_2_only_where_ranks_can_share_half_1() -> None:
    found = plan_module.candidate_sizes(COSTS, 4096, [1000, 1008, 2000], 16)
    assert 1008 in found and all(size % 16 == 0 for size in found)
