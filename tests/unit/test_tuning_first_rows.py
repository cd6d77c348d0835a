"""A tuning goes on where a calibration stopped: the same candidates, and its rows as the first ones."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from calibrations import FOUND, HERE, SM90

from tw_compile.benchmark.results import Row
from tw_compile.calibration import Calibration, default_folder, store, text_of
from tw_compile.cli import tune as command
from tw_compile.current import measured_on
from tw_compile.kernels.collective import transport as transports
from tw_compile.kernels.collective.transports import GroupFacts
from tw_compile.planning import load_profile
from tw_compile.tuning.candidates import candidates
from tw_compile.tuning.spec import TuneSpec
from tw_compile.tuning.tables import derive

MIB = 2**20


def row(label: str, nbytes: int, us: float, algorithm: str | None = None) -> Row:
    kind = "peer" if algorithm is None else "ours"
    form = ("", 128, "timed", None, "ok", us, us, us)
    size = (nbytes // 16384, 8192, nbytes, 1)
    return Row(label, kind, *size, *form, algorithm=algorithm, max_sms=None if algorithm is None else 128)  # type: ignore[arg-type]


def rows(*times: tuple[int, float, float]) -> list[Row]:
    """Bytes, and microseconds of NCCL's way and of push's."""
    return [
        each
        for nbytes, nccl, push in times
        for each in (row("nccl+norm", nbytes, nccl), row("tw-push-two-shot", nbytes, push, "push_two_shot"))
    ]


def report(own: list[Row], *calibrations: Calibration, device: str = "A GPU") -> dict[str, Any]:
    stage = {
        "kind": "kernel",
        "world_size": 2,
        "device_name": device,
        "device_class": "sm90",
        "environment": {},
        "rows": [asdict(each) for each in own],
    }
    versions = {"torch": "2.11.0", "nccl": "2.28.9", "flashinfer": None, "commit": "abc", "date": "2026-11-24"}
    return {
        "device": "cuda",
        "world_sizes": [2],
        "calibrations": [json.loads(text_of(calibration)) for calibration in calibrations],
        "stages": {"kernel tp2": stage},
        "versions": versions,
    }


def calibrated(*times: tuple[int, float, float], ranks: int = 2) -> Calibration:
    return replace(
        FOUND, measured_on=replace(HERE, world_size=ranks), rows=tuple(asdict(each) for each in rows(*times))
    )


def decision(found: Any, nbytes: int) -> tuple[str, str]:
    entry = next(entry for entry in reversed(found.table.ranges((2, "nccl"))) if entry.from_bytes <= nbytes)
    return entry.decision, entry.source.kind


@pytest.mark.parametrize("over", [("p2p",), ("host",), ("p2p", "multimem")])
def test_both_lengths_have_the_same_candidates(over: tuple[str, ...]) -> None:
    spec = next(TuneSpec((2,), transports=over).stages())
    assert {one.label for one in candidates(over)} < set(spec.bench.only)


def test_sizes_of_the_calibration_count_where_the_tuning_has_none() -> None:
    own = rows((MIB, 40.0, 10.0), (128 * MIB, 900.0, 400.0))
    alone = derive(report(own))
    assert decision(alone, 8 * MIB) != ("left", "measured")  # too far from both sizes to tell
    before = calibrated((8 * MIB, 20.0, 60.0))
    assert decision(derive(report(own, before)), 8 * MIB) == ("left", "measured")
    others = calibrated((8 * MIB, 20.0, 60.0), ranks=4)
    assert decision(derive(report(own, others)), 8 * MIB) == decision(alone, 8 * MIB)


def test_where_both_have_a_size_the_tuning_overrides() -> None:
    own = rows((MIB, 40.0, 10.0), (8 * MIB, 100.0, 40.0))
    wrong = calibrated((8 * MIB, 20.0, 60.0))
    found = derive(report(own, wrong))
    assert found.table == derive(report(own)).table and decision(found, 8 * MIB) == ("fused", "measured")


def test_a_device_without_a_profile_is_tuned_from_its_estimate() -> None:
    own = rows((MIB, 40.0, 10.0), (8 * MIB, 100.0, 40.0))
    assert derive(report(own)).profile is None
    estimate = replace(load_profile("H200"), name="A GPU, estimated", device_names=("A GPU",), estimated=True)
    found = derive(report(own, replace(calibrated(), profile=estimate)))
    assert found.profile is not None and found.profile.estimated and found.profile.name == "A GPU, estimated, tuned"


def test_the_command_finds_what_ranks_of_this_node_have_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr("tw_compile.current.current_node", lambda: SM90)
    monkeypatch.setattr(transports, "node_facts", lambda device, ranks: GroupFacts(device, ranks, 1))
    spec = TuneSpec((2, 4))
    assert command._calibrations(spec, ["A GPU"] * 4) == []
    kept = replace(calibrated((MIB, 40.0, 10.0)), measured_on=measured_on("A GPU", 2, SM90, True))
    store(default_folder(), kept)
    store(default_folder(), replace(kept, measured_on=replace(kept.measured_on, world_size=4, driver="another")))
    assert command._calibrations(spec, ["A GPU"] * 4) == [kept]
    assert command._calibrations(replace(spec, link_labels=("nccl+norm",)), ["A GPU"] * 4) == []
    assert command._transports((2, 4), "cuda", dry_run=False) == ("p2p",)
