"""The planner's layer, as read off a configuration and its tensor-parallel plan."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tw_compile.planning import Attention, Gemm, LayerShape, layer_shape

ROWWISE = {"layers.*.self_attn.o_proj": "rowwise", "layers.*.mlp.down_proj": "rowwise"}


def shape_of(world_size: int = 4, plan: dict[str, str] | None = None, **fields: Any) -> LayerShape:
    values = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 1024}
    return layer_shape(SimpleNamespace(**values | fields), ROWWISE if plan is None else plan, world_size)


def test_heads_may_be_wider_than_their_share_of_the_hidden_size() -> None:
    layer = shape_of(head_dim=128)
    assert layer.attention == Attention(2, 1, 128)
    assert layer.qkv == tuple(Gemm("qkv", columns, 512) for columns in (256, 128, 128))
    assert layer.o_proj == Gemm("o_proj", 512, 256)
    assert shape_of(head_dim=None).attention.head_dim == shape_of().attention.head_dim == 64


def test_attention_that_the_plan_leaves_whole_is_on_every_rank_and_not_summed() -> None:
    layer = shape_of(plan={"layers.*.mlp.down_proj": "rowwise"}, num_key_value_heads=2)
    assert (layer.attention_summed, layer.mlp_summed) == (False, True)
    assert layer.attention == Attention(8, 2, 64) and layer.o_proj == Gemm("o_proj", 512, 512)


def test_one_rank_sums_and_gathers_nothing() -> None:
    plan = ROWWISE | {"layers.*.self_attn.q_proj": "colwise_gather_output"}
    assert shape_of(plan=plan).gathered_columns == 512 + 2 * 256
    alone = shape_of(1, plan)
    assert (alone.attention_summed, alone.mlp_summed, alone.gathered_columns) == (False, False, 0)


@pytest.mark.parametrize("name", ["num_local_experts", "num_experts"])
def test_experts_are_counted_by_either_name(name: str) -> None:
    plan = {"layers.*.self_attn.o_proj": "rowwise", "layers.*.mlp.experts": "moe_tp_experts"}
    layer = shape_of(plan=plan, num_experts_per_tok=1, **{name: 2})
    assert layer.mlp == (Gemm("gate_up", 512, 512, 2, 1), Gemm("down", 512, 256, 2, 1)) and layer.mlp_summed


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({}, (None,)),
        ({"sliding_window": 100}, (100,)),
        ({"sliding_window": 100, "use_sliding_window": True}, (100,)),
        ({"sliding_window": 100, "use_sliding_window": False}, (None,)),
        ({"sliding_window": 100, "layer_types": ["sliding_attention", "full_attention"]}, (100, None)),
        ({"sliding_window": 100, "layer_types": ["sliding_attention"] * 2}, (100,)),
        ({"sliding_window": 100, "layer_types": ["full_attention"] * 2}, (None,)),
    ],
    ids=str,
)
def test_windows_are_those_of_the_layers_that_have_one(fields: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert shape_of(**fields).attention.windows == windows
