"""Waves, windows and plans: the arithmetic, and what holds for every plan."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tw_compile.model_file import preset_names
from tw_compile.models.config import load_config, tensor_parallel_plan
from tw_compile.planning import (
    Attention,
    Gemm,
    LayerShape,
    Mode,
    Off,
    Plan,
    PlannedWindow,
    layer_shape,
    load_profile,
    plan_layer,
)
from tw_compile.planning import plan as plan_module
from tw_compile.planning import windows as windows_module
from tw_compile.planning.communication import all_reduce_us, fastest_alone, fused_us, sm_us, traffic_bytes
from tw_compile.planning.device import AllReduceTimes, AttentionRates, DeviceProfile, GemmRates, Tile
from tw_compile.planning.gemm import full_wave_tokens, gemm_time, waves

H200 = load_profile("H200")
ONE_COLUMN = Gemm("gate_up", columns=128, depth=65536)
TILE = Tile(128, 128)
ONE_TILE = GemmRates(
    tflops_per_sm=6.0,
    edge=1e-9,
    tile_us=1e-9,
    split_us=1.0,
    most_parts=1,
    long_us=1.0,
    long_factor=1.0,
    grouped_efficiency=1.0,
    grouped_short_efficiency=1.0,
    grouped_tile_us=1e-9,
    grouped_us=1e-9,
    own_gemms=False,
    memory_gb_per_s=1e9,
    short_sides=(128,),
    long_sides=(128,),
)


def model_layer(name: str, world_size: int, merged: bool = True) -> LayerShape:
    """With an attention kernel that computes suffixes itself."""
    config = load_config(name)
    layer = layer_shape(config, tensor_parallel_plan(config), world_size, merged)
    return dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, kernel="flash"))


def dense(hidden: int, width: int, heads: int, kv_heads: int, world_size: int = 4) -> LayerShape:
    return LayerShape(
        world_size,
        hidden,
        (Gemm("qkv", (heads + 2 * kv_heads) * 128, hidden),),
        Attention(heads, kv_heads, 128, kernel="flash"),
        Gemm("o_proj", hidden, heads * 128),
        (Gemm("gate_up", 2 * width, hidden), Gemm("down", hidden, width)),
    )


LLAMA = model_layer("llama-3.3-70b", 4)


@st.composite
def layers(draw: st.DrawFn) -> LayerShape:
    hidden = 128 * draw(st.integers(1, 64))
    layer = dense(
        hidden,
        64 * draw(st.integers(1, 128)),
        draw(st.integers(1, 32)),
        draw(st.integers(1, 8)),
        draw(st.integers(2, 8)),
    )
    experts = draw(st.sampled_from([1, 8, 64]))
    per_token = min(experts, draw(st.integers(1, 4)))
    gate_up, down = (dataclasses.replace(gemm, experts=experts, experts_per_token=per_token) for gemm in layer.mlp)
    window = draw(st.sampled_from([None, 128, 4096]))
    return dataclasses.replace(
        layer,
        mlp=(gate_up, down),
        attention=dataclasses.replace(layer.attention, windows=(None, window)),
        attention_summed=draw(st.booleans()),
        mlp_summed=draw(st.booleans()),
    )


# The textbook case: TokenWeave (Gond et al., 2025), section 3.1.1.


def test_300_ctas_on_132_sms_are_three_waves_and_so_are_132_and_168() -> None:
    assert waves(300, 132) == 3
    assert waves(150, 132) + waves(150, 132) == 4
    assert waves(132, 132) + waves(168, 132) == 3


def test_full_waves_next_to_the_middle_of_300_ctas_are_132_and_264() -> None:
    assert full_wave_tokens(ONE_COLUMN, TILE, 132, 150 * 128) == (132 * 128, 264 * 128)


def test_a_gemm_of_300_ctas_is_split_as_132_and_168(monkeypatch: pytest.MonkeyPatch) -> None:
    """By waves alone. 132 SMs in pairs are left of 140 by the only CTA count that the kernel has."""
    monkeypatch.setattr(plan_module, "UNEVEN", 0.0)
    only = dataclasses.replace(H200.fused["two_shot"], ctas=(4,), cta_gb_per_s=124.0, row_us=1e-3)
    profile = dataclasses.replace(
        H200,
        sms=140,
        gemm=ONE_TILE,
        attention={"flash": AttentionRates(300.0, 300.0, 1.0, 128)},
        kernel="two_shot",
        fused={"two_shot": only},
    )
    layer = LayerShape(
        4,
        128,
        (Gemm("qkv", 128, 16),),
        Attention(1, 1, 16),
        Gemm("o_proj", 128, 16),
        (ONE_COLUMN, Gemm("down", 128, 16)),
    )
    plan = plan_layer(profile, layer, 300 * 128, min_gain=0.0)
    assert plan.sizes == (132 * 128, 168 * 128)
    (gate_up,) = (gemm for gemm in plan.waves if gemm.name == "gate_up")
    assert (gate_up.whole, gate_up.first, gate_up.second) == (3, 1, 2)
    assert [gemm.sms for window in plan.windows for gemm in window.gemms if gemm.name == "gate_up"] == [132, 132]


# GEMMs


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 10**6), st.integers(1, 148))
def test_more_tiles_never_take_fewer_waves_and_more_sms_never_more(tiles: int, sms: int) -> None:
    assert waves(tiles, sms) <= waves(tiles + 1, sms) <= waves(tiles, sms) + 1
    assert waves(tiles, sms + 1) <= waves(tiles, sms)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 65536),
    st.integers(1, 20000),
    st.integers(16, 20000),
    st.integers(2, 132),
    st.sampled_from([1, 8, 128]),
)
def test_gemm_time_grows_with_tokens_and_shrinks_with_sms(
    tokens: int, columns: int, depth: int, sms: int, experts: int
) -> None:
    """But for the one token with which experts get taller tiles, whatever those take."""
    gemm = Gemm("g", columns, depth, experts, 1 if experts == 1 else 2)
    time = gemm_time(H200, gemm, tokens, sms)
    more = gemm_time(H200, gemm, tokens + 1, sms)
    taller = experts > 1 and more.tile.rows > time.tile.rows
    assert time.us <= more.us or (taller and tokens * 2 // experts == 128)
    assert time.us <= gemm_time(H200, gemm, tokens, sms - 1).us


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 65536),
    st.integers(1, 20000),
    st.integers(1, 148),
    st.sampled_from([(1, 1), (8, 8), (8, 2), (128, 4)]),
)
def test_full_waves_are_full(tokens: int, columns: int, sms: int, experts: tuple[int, int]) -> None:
    gemm = Gemm("g", columns, 1024, *experts)
    profile = dataclasses.replace(H200, gemm=ONE_TILE)
    tile = gemm_time(profile, gemm, tokens, sms).tile
    for count in full_wave_tokens(gemm, tile, sms, tokens):
        last, next_one = (gemm_time(profile, gemm, rows, sms) for rows in (count, count + 1))
        assert count >= tile.rows or experts[0] > experts[1]
        if last.tile == next_one.tile == tile:
            assert last.waves < next_one.waves


def test_few_tokens_read_the_weights_of_the_experts_that_they_reach() -> None:
    mixture, plain = Gemm("g", 65536, 6144, 8, 2), Gemm("g", 65536, 6144)
    assert mixture.groups(1) == (pytest.approx(2.0), pytest.approx(1.0))
    assert mixture.groups(10**4) == (pytest.approx(8.0), pytest.approx(2500.0))
    profile = dataclasses.replace(H200, gemm=dataclasses.replace(H200.gemm, tflops_per_sm=1e3))
    one = gemm_time(profile, plain, 1, 132).us - H200.launch_us
    two = gemm_time(profile, mixture, 1, 132).us - H200.launch_us - H200.gemm.grouped_us
    assert two == pytest.approx(2 * one, rel=0.01)


# Communication and attention


def test_traffic_is_that_of_the_algorithms() -> None:
    assert traffic_bytes("two_shot", 1000, 4) == 1500
    assert traffic_bytes("two_shot", 1000, 2) == 1000
    assert traffic_bytes("multicast", 1000, 4) == 1250


def test_more_ctas_are_faster_until_the_links_are_full() -> None:
    kernel = H200.fused["stream"]
    times = [fused_us(kernel, 4096, 8192, 4, ctas) for ctas in (1, 2, 4, 8, 64, 128)]
    assert times == sorted(times, reverse=True)
    bound = kernel.latency_us + traffic_bytes("two_shot", 2**26, 4) / (kernel.link_gb_per_s * 1e3)
    assert times[-1] == pytest.approx(bound, rel=0.001)
    assert times[0] == pytest.approx(kernel.latency_us + sm_us(kernel, 4096, 8192, 4), rel=0.001)
    assert fastest_alone(H200, False, 4096, 8192, 4) == (128, fused_us(H200.fused["push"], 4096, 8192, 4, 128))


def test_a_rank_s_sms_move_its_rows_and_those_that_peers_have_finished() -> None:
    """At two ranks a row of 16 KiB: two parts, a float32 residual and a peer's row in; two copies, residual and row out."""
    kernel = dataclasses.replace(H200.fused["stream"], row_us=1e-9)
    rows = 2048 * 10 * 16384 / (kernel.cta_gb_per_s * 1e3)
    assert sm_us(kernel, 4096, 8192, 2) == pytest.approx(rows)
    assert sm_us(kernel, 4096, 8192, 2, staged=True) == pytest.approx(1.2 * rows)
    assert sm_us(kernel, 4096, 8192, 4) == pytest.approx(rows / 2 * 1.8)
    alone = dataclasses.replace(kernel, row_us=1.0)
    assert sm_us(alone, 4096, 8192, 2) - rows == pytest.approx(2048 * 1.5)


@pytest.mark.parametrize(
    ("ctas", "sms"), [(0, 132), (2, 128), (4, 124), (8, 116), (12, 116), (16, 116), (17, 114), (32, 100)]
)
def test_a_cta_takes_a_pair_of_sms_until_each_group_has_one_unless_ctas_stay_together(ctas: int, sms: int) -> None:
    stream = H200.fused["stream"]
    assert H200.sms_beside(dataclasses.replace(stream, cluster=1), ctas) == sms
    assert H200.sms_beside(dataclasses.replace(stream, cluster=8), ctas) == H200.sms - ctas


# Layers


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_has_a_layer_and_a_plan(name: str) -> None:
    plan = plan_layer(H200, model_layer(name, 4), 4096)
    assert sum(plan.sizes) == 4096 and plan.predicted.unfused_us > plan.predicted.no_communication_us > 0


def test_a_layer_has_the_shapes_of_its_rank() -> None:
    layer = model_layer("llama-3.3-70b", 8)
    assert [(gemm.columns, gemm.depth) for gemm in layer.gemms] == [
        (1280, 8192),
        (8192, 1024),
        (7168, 8192),
        (8192, 3584),
    ]
    assert layer.message_bytes(1024) == 16 * 2**20
    assert (layer.attention_summed, layer.mlp_summed, layer.gathered_columns) == (True, True, 0)


def test_projections_are_gemms_of_their_own_unless_merged() -> None:
    layer = model_layer("llama-3.1-8b", 2, merged=False)
    assert [(gemm.name, gemm.columns) for gemm in layer.gemms] == [
        ("qkv", 2048),
        ("qkv", 512),
        ("qkv", 512),
        ("o_proj", 4096),
        ("gate_up", 7168),
        ("gate_up", 7168),
        ("down", 4096),
    ]
    plan = plan_layer(H200, layer, 4096)
    assert [gemm.name for gemm in plan.waves] == ["qkv", "o_proj", "gate_up", "down"]
    check(plan, 4096, 16)
    separate = plan_layer(H200, layer, 4096).predicted.no_communication_us
    assert separate > plan_layer(H200, model_layer("llama-3.1-8b", 2), 4096).predicted.no_communication_us


def test_gemms_that_are_not_told_wait_for_sms() -> None:
    gemm = Gemm("gate_up", 8192, 8192)
    told, untold = (windows_module.Costs(H200, LLAMA, H200.fused["stream"], (4096,), leave) for leave in (True, False))
    time, us = told.beside(gemm, 2048, 4, 1000.0)
    assert (time.sms, us) == (128, time.us)
    time, us = untold.beside(gemm, 2048, 4, 1000.0)
    assert (time.sms, us) == (132, 2 * time.us)
    assert untold.beside(gemm, 2048, 4, 10.0)[1] == time.us + 10.0
    small = Gemm("o_proj", 1024, 8192)
    assert untold.beside(small, 128, 4, 10.0)[1] == untold.gemm(small, 128, 132).us
    slower = plan_layer(H200, LLAMA, 4096, first=2048, gemms_leave_sms=False, min_gain=0.0).predicted
    faster = plan_layer(H200, LLAMA, 4096, first=2048, min_gain=0.0).predicted
    assert slower.split_us is not None and faster.split_us is not None and slower.split_us > faster.split_us


def test_experts_are_sharded_and_counted() -> None:
    gate_up, down = model_layer("mixtral-8x22b", 8).mlp
    assert gate_up == Gemm("gate_up", 4096, 6144, 8, 2)
    assert down == Gemm("down", 6144, 2048, 8, 2)
    assert model_layer("qwen3-30b-a3b", 4).mlp[0] == Gemm("gate_up", 384, 2048, 128, 8)


def test_what_the_plan_of_a_model_leaves_whole_is_not_summed() -> None:
    layer = model_layer("gpt-oss-20b", 4)
    assert (layer.attention_summed, layer.mlp_summed) == (True, False)
    assert layer.mlp[0].columns == 2 * 2880
    assert set(layer.attention.windows) == {128, None}
    plan = plan_layer(H200, layer, 8192)
    assert [window.travels for window in plan.windows] == [None, 1, 2, None]


def test_gathered_queries_and_keys_are_waited_for() -> None:
    layer = model_layer("olmo-2-7b", 4)
    assert layer.gathered_columns == 3 * 4096
    without = dataclasses.replace(layer, gathered_columns=0)
    assert plan_layer(H200, layer, 4096).predicted.fused_us > plan_layer(H200, without, 4096).predicted.fused_us


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_key_value_heads": 6}, "config.num_key_value_heads: expected a multiple of the world size 4, got 6"),
        ({"intermediate_size": 1023}, "config.intermediate_size: expected a multiple of the world size 4, got 1023"),
        ({"kv_lora_rank": 512}, "config.kv_lora_rank: expected none, as plans do not know it, got 512"),
        ({"mlp_only_layers": [0]}, "config.mlp_only_layers: expected layers of one kind"),
        ({"layer_types": ["mamba"]}, "config.layer_types: expected some of full_attention, sliding_attention"),
        ({"hidden_size": None}, "config.hidden_size: expected a number, got None"),
    ],
)
def test_what_is_not_described_is_refused(changed: dict[str, Any], message: str) -> None:
    values = {
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 1024,
    } | changed
    plan = {"layers.*.self_attn.o_proj": "rowwise", "layers.*.mlp.down_proj": "rowwise"}
    with pytest.raises(ValueError) as error:
        layer_shape(SimpleNamespace(**values), plan, 4)
    assert message in str(error.value)


# Plans


def check(plan: Plan, tokens: int, multiple: int) -> None:
    """What holds for every plan."""
    assert sum(plan.sizes) == tokens and min(plan.sizes) > 0
    assert (plan.mode is Mode.OFF) == (plan.off is not None) == (len(plan.sizes) == 1)
    predicted = plan.predicted
    assert predicted.no_communication_us <= predicted.unfused_us
    if plan.mode is Mode.OFF:
        assert plan.us == predicted.fused_us
        return
    assert predicted.split_us is not None and plan.us == predicted.split_us
    assert plan.us <= predicted.fused_us and plan.us <= predicted.unfused_us
    assert plan.sizes[0] % multiple == 0
    assert sum(window.us for window in plan.windows) <= plan.us * (1.0 + 1e-9)
    for window in plan.windows:
        assert window.us >= max(window.compute_us, window.communication_us)
        beside = {H200.sms_beside(kernel, window.ctas) for kernel in H200.fused.values()}
        assert all(gemm.sms in {H200.sms, *beside} and gemm.tokens in plan.sizes for gemm in window.gemms)
    for gemm in plan.waves:
        computed = [part.tokens for window in plan.windows for part in window.gemms if part.name == gemm.name]
        assert sorted(computed) == sorted(plan.sizes * (len(computed) // 2))


@settings(max_examples=60, deadline=None)
@given(layers(), st.integers(1, 70000), st.sampled_from([1, 16, 128]), st.sampled_from(["two_shot", "push", "stream"]))
def test_every_plan_keeps_all_tokens_and_splits_only_where_that_is_faster(
    layer: LayerShape, tokens: int, multiple: int, kernel: str
) -> None:
    plan = plan_layer(H200, layer, tokens, row_multiple=multiple, kernel=kernel)
    check(plan, tokens, math.lcm(multiple, layer.world_size))
    assert plan == plan_layer(H200, layer, tokens, row_multiple=multiple, kernel=kernel)


def test_split_that_is_settled_is_the_only_one_compared() -> None:
    plan = plan_layer(H200, LLAMA, 4096, first=1000)
    assert plan.candidates == 1 and {window.message_bytes for window in plan.windows if window.half == 2} == {
        LLAMA.message_bytes(1000)
    }
    best = plan_layer(H200, LLAMA, 4096)
    assert plan_layer(H200, LLAMA, 4096, first=best.sizes[0]).windows == best.windows
    for first in (0, 4096):
        with pytest.raises(ValueError, match=f"first: expected 1 to 4095 tokens, got {first}"):
            plan_layer(H200, LLAMA, 4096, first=first)


@settings(max_examples=40, deadline=None)
@given(layers(), st.lists(st.integers(1, 5000), min_size=1, max_size=12), st.sampled_from(["auto", "split", "join"]))
def test_sequences_stay_whole_where_they_may_not_be_cut(layer: LayerShape, batch: list[int], attention: str) -> None:
    plan = plan_layer(H200, layer, sum(batch), sequences=batch, cut_sequences=False, attention=attention)
    check(plan, sum(batch), 1)
    assert not plan.cuts_sequence
    if plan.mode is not Mode.OFF:
        assert plan.sizes[0] in {sum(batch[:count]) for count in range(1, len(batch))}
        assert attention in ("auto", plan.mode)


def test_prefill_of_a_large_model_is_split_in_four_windows() -> None:
    plan = plan_layer(H200, LLAMA, 4096)
    assert plan.mode is Mode.SPLIT and plan.off is None and plan.cuts_sequence
    order = [(window.computes, window.half, window.travels) for window in plan.windows]
    assert order == [("attention", 1, 2), ("attention", 2, 1), ("mlp", 1, 2), ("mlp", 2, 1)]
    assert [len(window.gemms) for window in plan.windows] == [2, 2, 2, 2]
    for window in plan.windows:
        assert window.ctas in H200.fused[H200.kernel].ctas
        assert window.travels is not None
        assert window.message_bytes == LLAMA.message_bytes(plan.sizes[window.travels - 1])
        assert window.gemms[0].sms == H200.sms - window.ctas
    assert plan.gain > 1.1


def test_gemms_that_begin_long_after_the_sum_has_arrived_get_all_sms() -> None:
    plan = plan_layer(H200, LLAMA, 2048)
    gate_up, down = plan.windows[2].gemms
    assert plan.windows[2].communication_us < gate_up.us / 1.2
    assert (gate_up.sms, down.sms) == (H200.sms - plan.windows[2].ctas, H200.sms)


@pytest.mark.parametrize("layer", [LLAMA, model_layer("mixtral-8x22b", 8)], ids=["dense", "experts"])
def test_each_window_has_the_best_of_the_cta_counts_even_if_the_sum_is_late(layer: LayerShape) -> None:
    def late(window: PlannedWindow) -> float:
        return max(window.compute_us, windows_module.SLACK * window.communication_us)

    plan = plan_layer(H200, layer, 4096)
    kernel = H200.fused["two_shot"]
    for ctas in kernel.ctas:
        costs = windows_module.Costs(H200, layer, dataclasses.replace(kernel, ctas=(ctas,)), (4096,))
        for best, other in zip(plan.windows, windows_module.weave(costs, plan.sizes[0], 4096), strict=True):
            assert (late(best), best.ctas) <= (late(other), other.ctas)


def test_the_size_is_as_good_as_the_best_of_a_sweep() -> None:
    for tokens in (1024, 1000, 4096):
        costs = windows_module.Costs(H200, LLAMA, H200.fused["two_shot"], (tokens,))
        sweep = min(
            sum(window.us for window in windows_module.weave(costs, first, tokens)) for first in range(16, tokens, 16)
        )
        planned = plan_layer(H200, LLAMA, tokens).predicted.split_us
        assert planned is not None and planned <= 1.02 * sweep


def test_predictions_that_are_nearly_equal_are_decided_by_equal_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    h100, layer = load_profile("H100"), model_layer("llama-3.3-70b", 8)
    plan = plan_layer(h100, layer, 16384, kernel="multimem")
    assert plan.sizes == (8192, 8192)
    monkeypatch.setattr(plan_module, "RESOLUTION", 0.0)
    fastest = plan_layer(h100, layer, 16384, kernel="multimem")
    assert fastest.sizes != plan.sizes and fastest.us < plan.us < 1.01 * fastest.us


@pytest.mark.parametrize("attention", ["split", "join"])
def test_each_window_carries_the_other_half_s_message(attention: str) -> None:
    plan = plan_layer(H200, LLAMA, 4096, sequences=(1792, 2304), cut_sequences=False, attention=attention, min_gain=0.0)
    assert plan.sizes == (1792, 2304)
    for window in plan.windows:
        expected = 0 if window.travels is None else LLAMA.message_bytes(plan.sizes[window.travels - 1])
        assert window.travels in (None, 3 - window.half) and window.message_bytes == expected


def test_a_norm_that_no_sum_brings_along_is_computed() -> None:
    alone = dataclasses.replace(LLAMA, mlp_summed=False, attention_summed=False)
    summed, whole = (windows_module.Costs(H200, layer, H200.fused["two_shot"], (512,)) for layer in (LLAMA, alone))
    norm = whole.norm_us(512)
    assert whole.alone_us(whole.mlp_part(512)) == pytest.approx(summed.alone_us(summed.mlp_part(512)) + norm)
    assert whole.alone_us(whole.o_proj(512)) == pytest.approx(summed.alone_us(summed.o_proj(512)) + norm)


def test_rows_that_go_to_experts_are_moved() -> None:
    gate_up, down = (dataclasses.replace(gemm, experts=2, experts_per_token=1) for gemm in LLAMA.mlp)
    plain, mixture = (
        windows_module.Costs(H200, layer, H200.fused["two_shot"], (4096,))
        for layer in (LLAMA, dataclasses.replace(LLAMA, mlp=(gate_up, down)))
    )
    moved = 0.0
    for sign, costs in ((1, mixture), (-1, plain)):
        gemms = sum(costs.gemm(gemm, 4096, H200.sms).us for gemm in costs.layer.mlp)
        moved += sign * (costs.alone_us(costs.mlp_part(4096)) - gemms)
    assert moved >= 2 * 2 * LLAMA.message_bytes(4096) / (H200.memory_gb_per_s * 1e3)


def test_multicast_collectives_take_part_only_where_there_is_multicast() -> None:
    h100 = load_profile("H100")
    assert all_reduce_us(h100, 2**26, 8, multicast=True) < all_reduce_us(h100, 2**26, 8, multicast=False)


def test_whole_sequences_are_not_cut_by_a_split_between_them() -> None:
    assert not plan_layer(H200, LLAMA, 4096, sequences=(2048, 2048), cut_sequences=False).cuts_sequence
    assert not plan_layer(H200, LLAMA, 4096, sequences=(2048, 2048)).cuts_sequence


def test_joined_attention_runs_once_between_split_projections() -> None:
    plan = plan_layer(H200, LLAMA, 8192, attention="join")
    assert plan.mode is Mode.JOIN
    check(plan, 8192, 16)
    order = [(window.computes, window.half, window.travels) for window in plan.windows]
    assert order == [("qkv", 1, 2), ("join", 2, None), ("o_proj", 2, 1), ("mlp", 1, 2), ("mlp", 2, 1)]
    assert [[gemm.name for gemm in window.gemms] for window in plan.windows] == [
        ["qkv"],
        ["qkv", "o_proj"],
        ["o_proj"],
        ["gate_up", "down"],
        ["gate_up", "down"],
    ]
    assert plan_layer(H200, LLAMA, 8192).us < plan.us


def test_attention_is_joined_where_cutting_it_is_predicted_slower() -> None:
    """One head: a block of the last queries takes as long as all of attention, and both halves would have one."""
    layer = dataclasses.replace(dense(512, 8192, 1, 1), o_proj=Gemm("o_proj", 512, 128))
    slow = dataclasses.replace(H200, attention={"flash": AttentionRates(20.0, 20.0, 2.0, 4096)})
    links = {"nccl": AllReduceTimes("two_shot", 15.0, 50.0)}
    stream = dataclasses.replace(H200.fused["stream"], ctas=(4, 16), row_us=0.4)
    slow = dataclasses.replace(slow, fused={"stream": stream}, all_reduce=links)
    plan = plan_layer(slow, layer, 8192, min_gain=0.0)
    assert plan.mode is Mode.JOIN
    halves = (4096, 4096)
    assert plan_layer(slow, layer, 8192, sequences=halves, cut_sequences=False, min_gain=0.0).mode is not Mode.JOIN


@pytest.mark.parametrize(
    ("plan", "off"),
    [
        (plan_layer(H200, model_layer("llama-3.1-8b", 1), 4096), Off.NO_COMMUNICATION),
        (plan_layer(H200, LLAMA, 16), Off.TOO_FEW_TOKENS),
        (plan_layer(H200, LLAMA, 1), Off.TOO_FEW_TOKENS),
        (plan_layer(H200, LLAMA, 4096, cut_sequences=False), Off.ONE_SEQUENCE),
        (plan_layer(H200, LLAMA, 64), Off.NOT_FASTER),
        (plan_layer(H200, LLAMA, 4096, min_gain=0.5), Off.NOT_FASTER),
    ],
)
def test_the_split_is_off_with_a_reason(plan: Plan, off: Off) -> None:
    assert (plan.mode, plan.off, plan.sizes) == (Mode.OFF, off, (plan.tokens,))
    assert plan.reason
    assert plan.us == plan.predicted.fused_us


def test_a_split_that_saves_less_than_asked_for_is_off_and_one_that_saves_more_is_on() -> None:
    predicted = plan_layer(H200, LLAMA, 2048).predicted
    assert predicted.split_us is not None
    saved = 1.0 - predicted.split_us / min(predicted.fused_us, predicted.unfused_us)
    assert plan_layer(H200, LLAMA, 2048, min_gain=saved - 1e-6).mode is Mode.SPLIT
    assert plan_layer(H200, LLAMA, 2048, min_gain=saved + 1e-6).off is Off.NOT_FASTER


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 0}, "tokens: expected a positive number, got 0"),
        ({"sequences": (10, 20)}, "sequences: expected positive lengths that add up to 64"),
        ({"sequences": (64, 0)}, "sequences: expected positive lengths that add up to 64"),
        ({"attention": "both"}, "attention: expected auto, split or join, got 'both'"),
        ({"row_multiple": 0}, "row_multiple: expected a positive number, got 0"),
        ({"min_gain": 1.0}, "min_gain: expected a share from 0 to 1, got 1.0"),
        ({"kernel": "beam"}, "kernel: expected one of two_shot, push, stream"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        plan_layer(H200, LLAMA, **({"tokens": 64} | options))
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["llama-3.3-70b", "mixtral-8x22b"])
@pytest.mark.parametrize("kernel", ["two_shot", "stream"])
def test_a_plan_takes_few_gemm_times_however_many_tokens(
    name: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def counted(profile: DeviceProfile, gemm: Gemm, tokens: int, sms: int) -> Any:
        nonlocal calls
        calls += 1
        return gemm_time(profile, gemm, tokens, sms)

    monkeypatch.setattr(windows_module, "gemm_time", counted)
    layer = model_layer(name, 8 if name.startswith("mixtral") else 4)
    for tokens in (512, 1025, 8192, 65536, 10**6):
        calls = 0
        plan_layer(H200, layer, tokens, kernel=kernel)
        assert 0 < calls < 2000


def test_planning_imports_no_torch() -> None:
    code = "import sys, tw_compile.planning; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd="/").returncode == 0
