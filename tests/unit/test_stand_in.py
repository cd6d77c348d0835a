"""Stand-ins for calls, on one GPU: what they hold and for how long; timing needs a GPU."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from tw_compile.benchmark.layer import stand_in
from tw_compile.benchmark.layer.spec import LayerSpec
from tw_compile.kernels.collective.spec import NormSpec, Request
from tw_compile.kernels.collective.transport import Started
from tw_compile.planning import communication, load_profile

H200 = load_profile("H200")
ROWS = torch.randn(6 * 16, 8192).bfloat16()
KERNEL = H200.fused[H200.kernel]


def request(slot: int, overlap_sms: int, results_in_slot: bool = False) -> Request:
    norm = NormSpec(1e-5, 0.0, None, torch.bfloat16, torch.bfloat16)
    x = torch.zeros(12, 8192, dtype=torch.bfloat16)
    return Request(x, None, None, None, norm, False, "sharded", "0", slot, None, overlap_sms, results_in_slot)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """``(stream, CTAs, microseconds, CTAs of a cluster)`` of each stand-in, and what was forked for."""
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(stand_in, "hold_sms", lambda *asked: found.append(asked))
    monkeypatch.setattr(stand_in.compat, "current_stream", lambda device: "current")
    monkeypatch.setattr(stand_in, "cluster_size", lambda ctas, device: 4)

    def forked(device: torch.device, group_name: str, slot: int, sms: int, kept: object, launch: Any) -> Started:
        found.append((group_name, slot, sms))
        return launch("side")

    monkeypatch.setattr(stand_in, "fork_and_join", forked)
    return found


@pytest.mark.parametrize("in_slot", [False, True])
def test_a_call_beside_other_work_holds_its_sms_as_long_as_the_planner_says(
    held: list[tuple[Any, ...]], in_slot: bool
) -> None:
    started = stand_in.StandIn(H200, 4, ROWS).start(request(1, 8, in_slot))
    us = communication.fused_us(KERNEL, 12, 8192, 4, 8, narrow=True, in_slot=in_slot) * H200.slower_beside(4)
    assert held == [("0", 1, 8), ("side", 8, us, 4)]
    assert torch.equal(started.hidden, ROWS[16 : 16 + 12]) and started.residual.shape == (3, 8192)


def test_a_call_alone_takes_as_long_as_the_fastest_kernel(held: list[tuple[Any, ...]]) -> None:
    started = stand_in.StandIn(H200, 4, ROWS).start(request(0, 0))
    assert held == [("current", 32, communication.fastest_alone(H200, False, 12, 8192, 4)[1])]
    assert torch.equal(started.hidden, ROWS[:12]) and started.finish is None


def spec_of(sweep_split: bool) -> LayerSpec:
    return LayerSpec("layer", "tiny-llama", 4, "cuda", "bfloat16", (512,), sweep_split=sweep_split)


def test_a_sweep_splits_at_other_places_too() -> None:
    planned = ["no-communication", "fused", "fused-gemms-apart", "fused+split"]
    assert [*stand_in.variants(spec_of(False), 512)] == planned
    swept = stand_in.variants(spec_of(True), 512)
    assert [*swept] == planned + [f"fused+split@{first}" for first in (128, 256, 384)]
    assert swept["fused+split@128"] == {"split": "128"} and swept["fused+split"] == {}


def test_a_place_that_is_not_split_at_is_an_error() -> None:
    for options, sizes in (
        (None, ()),
        ({}, ()),
        ({}, (128, 384)),
        ({"split": "off"}, ()),
        ({"split": "128"}, (128, 384)),
    ):
        stand_in.check_split("any", options, sizes)
    for sizes in ((), (384, 128)):
        with pytest.raises(RuntimeError, match=r"fused\+split@128: expected a first half of 128 tokens, got"):
            stand_in.check_split("fused+split@128", {"split": "128"}, sizes)


def test_what_is_to_be_whole_and_is_split_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"fused: expected no split, got \(128, 384\)"):
        stand_in.check_split("fused", {"split": "off"}, (128, 384))


@pytest.mark.parametrize(("tokens", "first"), [(1, 1), (31, 1), (32, 16), (512, 256), (1000, 496)])
def test_the_middle_is_in_rows_that_a_half_may_have(tokens: int, first: int) -> None:
    assert stand_in.middle_of(tokens) == first


@pytest.mark.parametrize("sweeps", [False, True])
def test_what_is_asked_for_is_timed(monkeypatch: pytest.MonkeyPatch, sweeps: bool) -> None:
    asked: list[LayerSpec] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(stand_in, "time_layers", lambda spec, profile: asked.append(spec) or iter(()))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    options = ["--model", "tiny-llama", "--tp", "4", "--tokens", "64,128", "--layers", "2"]
    monkeypatch.setattr(sys, "argv", ["stand_in", *options, *(["--sweep-split"] if sweeps else [])])
    assert stand_in.main() == 0
    (spec,) = asked
    assert (spec.tokens, spec.layers, spec.world_size, spec.sweep_split) == ((64, 128), 2, 4, sweeps)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["stand_in", "--model", "tiny-llama", "--tp", "4", "--tokens", "64"])
    with pytest.raises(SystemExit):
        stand_in.main()
    assert "expected a GPU, got none" in capsys.readouterr().err
