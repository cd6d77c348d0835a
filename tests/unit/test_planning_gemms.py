"""Predicted GEMMs beside measured ones: what the model of tiles in waves is worth, on all SMs and on those that are left."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path
from statistics import median, quantiles

import pytest

from tw_compile.planning import DeviceProfile, Gemm, load_profile
from tw_compile.planning.gemm import gemm_time

DATA = Path(__file__).parents[1] / "data"
H100, H200 = load_profile("H100"), load_profile("H200")
FILES = {"H100": "h100-gemms.csv", "H200": "h200-gemms.csv"}


def errors(reserved: str, most_columns: int = 10**6, profile: DeviceProfile = H200) -> list[float]:
    """Relative errors of all shapes; ``reserved``: SMs that cuBLASLt leaves, empty for cuBLAS as it is."""
    text = (DATA / FILES[profile.name]).read_text()
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    found = []
    for row in csv.DictReader(lines):
        if row["reserved"] == reserved and int(row["n"]) <= most_columns:
            gemm = Gemm(row["name"], columns=int(row["n"]), depth=int(row["k"]))
            us = gemm_time(profile, gemm, int(row["tokens"]), profile.sms - int(reserved or 0)).us
            found.append(abs(us / float(row["us"]) - 1.0))
    return found


def test_gemms_on_all_sms_are_predicted_within_six_percent() -> None:
    found = errors("")
    assert len(found) == 14 * 13
    assert median(found) < 0.06
    assert quantiles(found, n=10)[-1] < 0.13


def test_gemms_of_few_columns_are_predicted_as_well_as_others() -> None:
    found = errors("", most_columns=512)
    assert len(found) == 3 * 13
    assert median(found) < 0.06
    assert max(found) < 0.20


@pytest.mark.parametrize("reserved", ["4", "8", "12", "16", "32"])
def test_gemms_that_leave_sms_are_predicted_nearly_as_well(reserved: str) -> None:
    """cuBLASLt often takes longer with an SM more, so no model in which SMs never harm comes much closer."""
    found = errors(reserved)
    assert len(found) == 14 * 13
    assert median(found) < 0.07
    assert quantiles(found, n=10)[-1] < 0.18


@pytest.mark.parametrize("reserved", ["", "4", "16"])
def test_gemms_of_an_h100_are_predicted_as_well(reserved: str) -> None:
    found = errors(reserved, profile=H100)
    assert len(found) == 13 * 9
    assert median(found) < 0.08
    assert quantiles(found, n=10)[-1] < 0.18


def test_tiles_that_leave_sms_idle_share_their_depth() -> None:
    short = Gemm("k", columns=256, depth=8192)
    whole = dataclasses.replace(H200, gemm=dataclasses.replace(H200.gemm, most_parts=1))
    split, unsplit = (gemm_time(profile, short, 512, H200.sms) for profile in (H200, whole))
    assert split.us < 0.7 * unsplit.us
    assert unsplit.tiles < H200.sms // 2 < split.tiles <= H200.sms and split.waves == 1
    full = Gemm("gate_up", columns=14336, depth=8192)
    assert gemm_time(H200, full, 512, H200.sms) == gemm_time(whole, full, 512, H200.sms)


def test_tiles_for_half_of_the_sms_are_split_in_two_and_one_more_is_not() -> None:
    rates = dataclasses.replace(H200.gemm, short_sides=(128,), long_sides=(128,))
    profile = dataclasses.replace(H200, gemm=rates)
    half, more = (gemm_time(profile, Gemm("k", 128, 65536), 128 * tiles, H200.sms) for tiles in (66, 67))
    assert (half.tiles, more.tiles) == (H200.sms, 67) and half.us < more.us
    grouped = Gemm("down", 128, 65536, experts=2)
    assert gemm_time(profile, grouped, 128, H200.sms).tiles == 2 * 2, "a cluster each, whose depth is never shared"


def test_long_gemms_run_at_lower_clocks() -> None:
    steady = dataclasses.replace(H200, gemm=dataclasses.replace(H200.gemm, long_factor=1.0))
    for tokens, slower in ((128, False), (4096, True)):
        gemm = Gemm("gate_up", columns=14336, depth=8192)
        ratio = gemm_time(H200, gemm, tokens, H200.sms).us / gemm_time(steady, gemm, tokens, H200.sms).us
        assert (1.0 < ratio < H200.gemm.long_factor) if slower else ratio == 1.0
