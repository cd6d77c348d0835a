"""What is kept of a calibration, and who goes by it."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from calibrations import FOUND, HERE, SM90, STEPS
from typer.testing import CliRunner

from tw_compile import calibration, current
from tw_compile.calibration import all_stored, calibration_of, store, stored, text_of
from tw_compile.cli.app import app
from tw_compile.config import Config
from tw_compile.current import current_gate
from tw_compile.files import write_whole
from tw_compile.gating import Entry, Layer, Source, Table, table_text
from tw_compile.gating.facts import Node
from tw_compile.kernels.collective.transports import GroupFacts
from tw_compile.kernels.transports.selection import Step, shipped_steps, steps_for
from tw_compile.kernels.transports.selection import table_text as kernels_text
from tw_compile.own_gate import own_gate
from tw_compile.runner import gpus as runner_gpus
from tw_compile.runner import machine
from tw_compile.tuning import calibrate


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    yield
    calibration.use(None)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    read = calibration_of(text_of(FOUND), "file")
    assert read == FOUND
    assert stored(tmp_path, HERE) is None and all_stored(tmp_path / "nowhere") == []
    file = store(tmp_path / "new", FOUND)
    assert file == tmp_path / "new" / HERE.file_name and stored(tmp_path / "new", HERE) is not None
    assert [one.measured_on for one in all_stored(tmp_path / "new")] == [HERE]


@pytest.mark.parametrize(
    "change",
    [
        {"device_name": "Another GPU"},
        {"world_size": 4},
        {"peer_access": False},
        {"multicast": True},
        {"driver": "580"},
        {"torch": "2.12"},
        {"source": "def"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_file_is_for_one_kind_of_node(
    change: dict[str, Any], tmp_path: Path, tw_log: pytest.LogCaptureFixture
) -> None:
    other = replace(HERE, **change)
    store(tmp_path, FOUND)
    assert stored(tmp_path, other) is None and not tw_log.messages
    (tmp_path / HERE.file_name).rename(tmp_path / other.file_name)  # as if somebody had copied it
    assert stored(tmp_path, other) is None
    assert len(tw_log.messages) == 1 and "it was measured on another node" in tw_log.messages[0]


def _without(key: str) -> str:
    return json.dumps({name: value for name, value in json.loads(text_of(FOUND)).items() if name != key})


def _with(**values: Any) -> str:
    return json.dumps(json.loads(text_of(FOUND)) | values)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (text_of(FOUND)[:200], "expected JSON, got "),
        ("", "expected JSON, got "),
        ("[]", "schema_version: expected 1, got None"),
        (_with(schema_version=2), "schema_version: expected 1, got 2"),
        (_without("kernels"), "got no 'kernels'"),
        (_with(thresholds=3), "thresholds: expected str, got 3"),
        (_with(thresholds="schema_version = 1\n"), "expected the keys schema_version, device"),
        (_with(kernels='device = "A"\nstep = 1\n'), "expected the keys device and steps, got 'step'"),
        (_with(seconds=[1.0]), "seconds: expected two numbers, got [1.0]"),
        (_with(measured_on={}), "measured_on: expected the keys device_name, "),
        (
            _with(measured_on={**json.loads(text_of(FOUND))["measured_on"], "world_size": "8"}),
            "world_size: expected int",
        ),
    ],
    ids=lambda value: value if value.startswith(("expected", "schema", "got", "measured", "thr", "world")) else "text",
)
def test_a_file_that_cannot_be_used_is_named_in_one_line(
    text: str, why: str, tmp_path: Path, tw_log: pytest.LogCaptureFixture
) -> None:
    (tmp_path / HERE.file_name).write_text(text)
    assert stored(tmp_path, HERE) is None
    (line,) = tw_log.messages
    assert line.startswith(f"tw_compile: a calibration is not used: {tmp_path / HERE.file_name}: ") and why in line
    assert "\n" not in line


def test_of_two_writers_at_once_nothing_is_lost(tmp_path: Path) -> None:
    others = [replace(FOUND, measured_on=replace(HERE, driver=str(number))) for number in range(4)]
    threads = [threading.Thread(target=store, args=(tmp_path, one)) for one in (FOUND, *others) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {one.measured_on for one in all_stored(tmp_path)} == {HERE, *(other.measured_on for other in others)}
    assert len(list(tmp_path.iterdir())) == 5  # no part of a file stays


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(tmp_path / "a", "before")
    monkeypatch.setattr(Path, "replace", lambda self, other: (_ for _ in ()).throw(OSError("no room")))
    with pytest.raises(OSError, match="no room"):
        write_whole(tmp_path / "a", "after")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("a", "before")]


def test_a_folder_that_cannot_be_written_costs_one_line(tmp_path: Path, tw_log: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert store(tmp_path / "file", FOUND) is None and store(None, FOUND) is None
    assert [line.split(": ")[1].split(",")[0] for line in tw_log.messages] == ["the calibration is not kept"] * 2


def test_the_layer_is_above_what_is_shipped_and_below_the_users(tmp_path: Path) -> None:
    layer = Layer("calibration", "file", FOUND.table)

    def fused(calibrated: Layer | None, node: Node = SM90) -> bool:
        return own_gate(Config(), node, calibrated).decide(2**20, world_size=8, dtype="bfloat16").fused

    assert fused(None) and not fused(layer)
    assert fused(layer, Node((10, 0), False))  # it is about another class of devices
    source = Source("user", "public", ("somebody's",))
    (tmp_path / "tw_compile").mkdir()
    (tmp_path / "tw_compile" / "thresholds.toml").write_text(
        table_text(Table("user", "sm90", (Entry(8, "nccl", 0, None, "fused", "p2p", source),)))
    )
    assert fused(layer)


def test_kernels_come_from_the_user_then_from_the_calibration_then_from_what_is_shipped(tmp_path: Path) -> None:
    h200 = replace(FOUND, measured_on=replace(HERE, device_name="NVIDIA H200", world_size=4))
    four = tuple(replace(step, world_size=4) for step in STEPS)
    assert steps_for("A GPU", 8) == () and steps_for("NVIDIA H200", 4) == shipped_steps("NVIDIA H200", 4) != four
    calibration.use(FOUND)
    assert steps_for("A GPU", 8) == STEPS and steps_for("A GPU", 4) == ()
    calibration.use(replace(h200, steps=four))
    assert steps_for("NVIDIA H200", 4) == four and steps_for("NVIDIA H200", 2) == shipped_steps("NVIDIA H200", 2)
    (tmp_path / "tw_compile").mkdir()
    user = (Step(4, 1024, "stream", 16),)
    (tmp_path / "tw_compile" / "kernels.toml").write_text(kernels_text("NVIDIA H200", user, ""))
    assert steps_for("NVIDIA H200", 4) == user
    calibration.use(None)
    assert steps_for("A GPU", 8) == () and calibration.in_use() is None


def test_a_gate_that_was_agreed_before_does_not_hide_the_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(current, "current_node", lambda: SM90)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        before, off = current_gate(Config()), current_gate(Config(calibrate="off"))
        calibration.use(FOUND)
        after = current_gate(Config())
        assert before.digest() != after.digest() and current_gate(Config(calibrate="off")) is off
        verdict = after.decide(2**20, world_size=8, dtype="bfloat16")
        assert not verdict.fused and verdict.entry.startswith("calibration: world_size 8, nccl, from 0 bytes")
        assert verdict.source.startswith("measured on 8x A GPU")
    finally:
        dist.destroy_process_group()


def test_doctor_shows_the_layer_and_its_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_gpus, "node_facts", lambda device, ranks: GroupFacts(device, ranks, 1))
    gpus = [{"name": "A GPU"}] * 8
    assert runner_gpus.calibrations_of(gpus, SM90) == []
    layer = machine.calibrated_layer([], SM90)
    report = machine.thresholds_report(own_gate(Config(), SM90, layer), layer)
    assert [row["layer"] for row in report["layers"]][2:4] == ["calibration", "user file"]
    assert report["layers"][2]["state"] == "absent"
    assert [row["state"] for row in machine.kernel_tables_report(gpus, [])["layers"]][1] == "absent"

    here = current.measured_on("A GPU", 8, SM90, True)
    folder = calibration.default_folder()
    store(folder, replace(FOUND, measured_on=here))
    found = runner_gpus.calibrations_of(gpus, SM90)
    assert [one.measured_on for one in found] == [here] and steps_for("A GPU", 8) == STEPS
    layer = machine.calibrated_layer(found, SM90)
    report = machine.thresholds_report(own_gate(Config(), SM90, layer), layer)
    assert report["layers"][2] == {"layer": "calibration", "from": str(folder), "state": "1 range"}
    (row,) = (row for row in machine.kernel_tables_report(gpus, found)["layers"] if row["layer"] == "calibration")
    assert row["state"] == "8 ranks"
    assert runner_gpus.calibrations_of(gpus[:4], SM90) == []


def test_explain_goes_by_what_ranks_of_such_a_node_measured() -> None:
    args = ["explain", "--device", "sm90", "--tp", "8", "--tokens", "64", "--json", "-"]

    def message(*more: str) -> dict[str, Any]:
        result = CliRunner().invoke(app, [*args, *more])
        assert result.exit_code == 0, result.output
        (only,) = json.loads(result.stdout)["messages"]
        return dict(only)

    assert message()["decision"] == "fused"
    here = current.measured_on("A GPU", 8, SM90, True)
    for other in (replace(here, torch="1.0"), replace(here, source="old"), replace(here, peer_access=False)):
        store(calibration.default_folder(), replace(FOUND, measured_on=other))
    assert message()["decision"] == "fused"
    store(calibration.default_folder(), replace(FOUND, measured_on=here))
    now = message()
    assert now["decision"] == "gated" and now["entry"].startswith("calibration: world_size 8, nccl")
    assert now["source"].endswith("2026-11-24: tw_compile.calibrate")
    assert not message("--multicast")["entry"].startswith("calibration")
    assert message("--thresholds", "off")["decision"] == "fused"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--device", "cpu"], "--quick: expected --device cuda with it, got 'cpu'"),
        (["--out", "folder"], "--out: expected none with --quick, got 'folder'"),
        (["--plot", "a.png"], "--plot: expected none with --quick, got 'a.png'"),
        (["--transport", "nccl"], "--transport: expected none with --quick, got 'nccl'"),
    ],
)
def test_what_does_not_go_with_quick_is_refused(args: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["tune", "--quick", *args])
    assert result.exit_code == 2 and message in result.output


def test_quick_shows_what_ranks_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    specs: list[Any] = []

    def spawn(spec: Any, progress: Any, entry: Any) -> dict[str, Any]:
        specs.append((spec.world_size, entry))
        return {"calibration": None if spec.world_size == 4 else text_of(FOUND)}

    monkeypatch.setattr("tw_compile.cli.tune.world_sizes_of", lambda asked, device, dry_run: asked or (2, 4))
    monkeypatch.setattr("tw_compile.harness.launch.spawn_ranks", spawn)
    result = CliRunner().invoke(app, ["tune", "--quick", "--tp", "2", "--json", "-"])
    assert result.exit_code == 0, result.output
    assert specs == [(2, calibrate.rank_process)]
    for line in (
        "push_one_shot (128 SMs) to 4.0 KiB, push_two_shot (128 SMs)",
        "left, measured",
        "stream is left out: no",
        "measured in 2.5 s, after 7.0 s",
    ):
        assert line in " ".join(result.stderr.split())
    assert json.loads(result.stdout)["calibrations"] == [json.loads(text_of(FOUND))]
    assert CliRunner().invoke(app, ["tune", "--quick"]).exit_code == 1  # 4 ranks measured nothing
    specs.clear()
    dry = CliRunner().invoke(app, ["tune", "--quick", "--dry-run"])
    assert dry.exit_code == 0 and "would time 1, 4, 16, " in dry.output and specs == []
