"""Measured halves of FFNs in a device profile: what is read, and what the planner uses them for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tw_compile.planning import load_profile, plan_layer
from tw_compile.planning.device import parse_profile
from tw_compile.planning.ffn import merged, plan_ffn
from tw_compile.planning.measured_halves import MeasuredHalves, with_measured
from tw_compile.planning.presets import preset_layer
from tw_compile.planning.tables import toml_of

H100 = load_profile("H100")
ENTRY = MeasuredHalves(8192, 7168, "bfloat16", 2048, 1152, 1126.7, 1153.2, "2026-11-26, a GPU")


def layer(tp: int = 4, model: str = "llama-3.3-70b"):  # type: ignore[no-untyped-def]
    found = preset_layer(model, tp)
    assert found is not None
    return found[0]


def test_a_profile_with_halves_is_read_as_it_was_written() -> None:
    profile = replace(H100, halves=(ENTRY, replace(ENTRY, tokens=4096)))
    text = toml_of(profile, lambda name: "measured")
    assert text.count("[[halves]]") == 2 and parse_profile(text, "mine") == profile
    assert "halves" not in toml_of(H100) and H100.halves == ()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (replace(ENTRY, first=2048), r"mine: halves\[1\]: first: expected fewer than the 2048 tokens, got 2048"),
        (replace(ENTRY, first=0), r"mine: halves\[1\]: first: expected a positive int, got 0"),
        (replace(ENTRY, dtype="int8"), r"mine: halves\[1\]: dtype: expected one of bfloat16, float16, got 'int8'"),
        (ENTRY, r"mine: halves\[1\]: expected one entry for each FFN, got a second one of \(8192, 7168"),
    ],
    ids=["as many as all", "none", "dtype", "twice"],
)
def test_wrong_halves_are_refused_with_the_key(wrong: MeasuredHalves, message: str) -> None:
    text = toml_of(replace(H100, halves=(ENTRY, wrong)))
    with pytest.raises(ValueError, match=message):
        parse_profile(text, "mine")


def test_an_ffn_is_planned_by_what_was_measured_of_it() -> None:
    known, ffn = replace(H100, halves=(ENTRY,)), merged(layer())
    plan, model = plan_ffn(known, ffn, 2048), plan_ffn(H100, ffn, 2048)
    assert (plan.first, plan.measured) == (1152, ENTRY)
    assert (model.first, model.measured) == (model.modelled, None) and model.first == plan.modelled != 1152
    assert plan.us[1152] > plan.us[plan.modelled]  # what the model thinks of both stays


@pytest.mark.parametrize(
    ("tp", "tokens", "dtype", "gate_up_apart"),
    [
        (8, 2048, "bfloat16", False),
        (4, 2064, "bfloat16", False),
        (4, 2048, "float16", False),
        (4, 2048, "bfloat16", True),
    ],
    ids=["other shapes", "other tokens", "other dtype", "gate and up apart"],
)
def test_another_ffn_is_planned_by_the_model(tp: int, tokens: int, dtype: str, gate_up_apart: bool) -> None:
    known = replace(H100, halves=(ENTRY,))
    ffn = layer(tp) if gate_up_apart else merged(layer(tp))
    plan = plan_ffn(known, ffn, tokens, dtype=dtype)
    assert plan.measured is None and plan == plan_ffn(H100, ffn, tokens, dtype=dtype)


def test_a_layer_is_not_planned_by_halves_of_an_ffn_alone() -> None:
    known = replace(H100, halves=(ENTRY,))
    for shape in (layer(), merged(layer())):
        assert plan_layer(known, shape, 2048) == plan_layer(H100, shape, 2048)


def test_a_new_measurement_replaces_the_one_of_the_same_ffn_and_no_other() -> None:
    other, newer = replace(ENTRY, tokens=1024, first=640), replace(ENTRY, first=896)
    assert with_measured((ENTRY, other), (newer,)) == (other, newer)
