"""The margin of estimated profiles: two H100 and four are taken for unknown, and their calibrations meet measured layers."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest

from tw_compile.benchmark.results import Row
from tw_compile.gating.table import Source
from tw_compile.planning import DeviceProfile, Evidence, Link, Mode, Plan, evidence, load_profile, plan_layer
from tw_compile.planning.evidence import ESTIMATED_MARGIN, ESTIMATES, MeasuredLayer, measured_layers
from tw_compile.planning.links import shipped_link
from tw_compile.tuning.estimate import estimated_profile, measured_link
from tw_compile.tuning.measured import KernelRun

H100 = "NVIDIA H100 80GB HBM3"
SMS = 132
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FILES = {2: "2026-11-25-2xh100-calibrated-choices.json", 4: "2026-11-26-4xh100-calibrated-tp4.json"}
NODES = {"stream": "NVLink", "host": "peer access unused"}


pytestmark = pytest.mark.usefixtures("tiled_as_then")


@cache
def calibrated(ranks: int, kernel: str) -> tuple[DeviceProfile, Link | None]:
    """What the calibration of so many H100 gives to the planner, by today's rules."""
    found = json.loads((RESULTS / FILES[ranks]).read_text())["runs"][NODES[kernel]]["calibration"]
    made_by = Source("calibration", "measured", ("4x", "torch", "2026-11-26", "tw_compile.calibrate"))
    run = KernelRun(ranks, H100, made_by, tuple(Row(**row) for row in found["rows"]))
    profile = estimated_profile("Unknown GPU", "sm90", SMS, run)
    assert profile is not None
    return profile, measured_link(shipped_link(), run)


def planned(layer: MeasuredLayer, kernel: str, first: int | None, min_gain: float | None) -> Plan:
    profile, link = calibrated(layer.world_size, kernel)
    asked = {"kernel": kernel, "link": link, "first": first, "joins_gemms": layer.joined, "min_gain": min_gain}
    return plan_layer(profile, layer.shape, layer.tokens, **asked)  # type: ignore[arg-type]


def layers(kernel: str) -> list[MeasuredLayer]:
    link = "" if kernel == "stream" else shipped_link().name
    return [layer for layer in measured_layers(H100, kernel, link) if layer.group]


@pytest.mark.parametrize(("device_class", "kernel", "link"), ESTIMATES)
def test_the_margin_of_estimates_is_what_the_files_say(device_class: str, kernel: str, link: str) -> None:
    errors = []
    for layer in layers(kernel):
        predicted = planned(layer, kernel, layer.first, 0.0).predicted
        assert predicted.split_us is not None
        errors.append(layer.ratio * vars(predicted)[layer.unsplit] / predicted.split_us - 1.0)
    kept = ESTIMATES[device_class, kernel, link]
    assert kept.layers == len(errors)
    assert kept.margin == pytest.approx(fmean(max(error, 0.0) for error in errors), abs=0.0006)
    assert kept.mean == pytest.approx(fmean(errors), abs=0.0006)
    assert kept.worst == pytest.approx(max(errors, key=abs), abs=0.0006)


def test_the_margin_without_a_check_is_above_the_largest_error_of_the_estimates_that_were_checked() -> None:
    assert max(estimate.worst for estimate in ESTIMATES.values()) < ESTIMATED_MARGIN


@pytest.mark.parametrize("layer", layers("stream"), ids=lambda one: f"{one.model}-tp{one.world_size}-{one.tokens}")
def test_by_an_estimate_no_layer_takes_one_percent_longer_than_the_other_way(layer: MeasuredLayer) -> None:
    """Of equal halves, as others were measured than the plan would take."""
    plan = planned(layer, "stream", None, None)
    assert plan.margin == ESTIMATES["sm90", "stream", ""].margin
    assert layer.fused_us is not None
    if 2 * layer.first == layer.tokens:
        chosen = layer.fused_us if plan.off else layer.split_us
        assert chosen <= 1.01 * min(layer.fused_us, layer.split_us), plan.reason


def test_by_an_estimate_all_layers_are_split_that_were_measured_faster_split() -> None:
    """Of a difference of half a percent both ways are as good."""
    faster = [layer for layer in layers("stream") if 2 * layer.first == layer.tokens and layer.ratio < 0.99]
    split = [
        sum(planned(layer, "stream", None, margin).mode is not Mode.OFF for layer in faster)
        for margin in (None, ESTIMATED_MARGIN)
    ]
    assert (len(faster), split) == (11, [11, 4])


@pytest.mark.parametrize(
    ("changes", "kernel", "link", "margin"),
    [
        ({}, None, None, 0.014),
        ({}, "host", shipped_link(), 0.0),
        ({}, "push", None, ESTIMATED_MARGIN),
        ({}, "nccl", shipped_link(), ESTIMATED_MARGIN),
        ({"device_class": "generic"}, None, None, ESTIMATED_MARGIN),
        ({"device_class": None}, None, None, ESTIMATED_MARGIN),
    ],
    ids=["checked", "host memory", "other kernel", "nccl", "other capability", "not known"],
)
def test_an_estimate_has_the_margin_of_its_kind(
    changes: dict[str, str | None], kernel: str | None, link: Link | None, margin: float
) -> None:
    known = evidence(replace(calibrated(2, "stream")[0], **changes), kernel, link)  # type: ignore[arg-type]
    assert known == Evidence((), True, known.checked) and known.margin == margin
    assert ("calls, a GEMM and a norm was measured" in str(known)) is (margin == ESTIMATED_MARGIN)
    assert ("taken for unknown" in str(known)) is (margin != ESTIMATED_MARGIN)


def test_a_shipped_profile_has_its_own_evidence() -> None:
    assert evidence(load_profile("H100")).checked is None
