"""Profiles and links whose calls take all SMs: they are accepted, so a layer can be planned with them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tw_compile.planning import load_profile, plan_layer
from tw_compile.planning.device import parse_profile
from tw_compile.planning.links import shipped_link
from tw_compile.planning.presets import preset_layer
from tw_compile.planning.tables import toml_of

H200 = load_profile("H200")
LAYER, _ = preset_layer("llama-3.1-8b", 2)  # type: ignore[misc]


@pytest.mark.parametrize("ctas", [130, 131])
def test_a_profile_that_is_accepted_can_be_planned_with(ctas: int) -> None:
    own = replace(H200, fused={"two_shot": replace(H200.fused["two_shot"], ctas=(ctas,))}, kernel="two_shot")
    plan = plan_layer(parse_profile(toml_of(own), "mine.toml"), LAYER, 8192)
    assert all(gemm.sms > 0 and gemm.us > 0 for window in plan.windows for gemm in window.gemms)
    assert plan.windows and all(window.compute_us > 0 for window in plan.windows)


@pytest.mark.parametrize("sms", [132, 140])
def test_a_link_whose_calls_take_all_sms_can_be_planned_with(sms: int) -> None:
    link = shipped_link()
    link = replace(link, transports={"nccl": replace(link.transports["nccl"], sms=sms)})
    plan = plan_layer(H200, LAYER, 8192, kernel="nccl", link=link)
    assert plan.windows and all(window.compute_us > 0 for window in plan.windows)
