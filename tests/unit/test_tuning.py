"""``tw-compile tune`` without its ranks: what follows from a report, what is written, and what is refused."""

from __future__ import annotations

import dataclasses
import io
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from tw_compile.benchmark.results import Row
from tw_compile.cli import common
from tw_compile.cli import tune as command
from tw_compile.cli.app import app
from tw_compile.gating import (
    Entry,
    Gate,
    Node,
    Settings,
    Source,
    Table,
    read_table,
    table_text,
    tables_of,
    threshold_layers,
)
from tw_compile.gating.table import WireEntry
from tw_compile.harness import start
from tw_compile.harness.requests import UsageError
from tw_compile.kernels.transports.selection import shipped_steps, steps_for, steps_of
from tw_compile.planning.communication import fused_us, traffic_bytes
from tw_compile.planning.device import parse_profile, profile_of_device, shipped_profile
from tw_compile.tuning import busy, run, show
from tw_compile.tuning.beside import beside_contenders
from tw_compile.tuning.busy import Usage, obstacles
from tw_compile.tuning.pairs import contentions, pair_costs
from tw_compile.tuning.run import key_of
from tw_compile.tuning.spec import TuneSpec
from tw_compile.tuning.tables import changes, derive, merged_table, write

H200 = "NVIDIA H200"
SPEC = TuneSpec((2,))
CONTENTION = 1.25


def kernel_us(label: str, tokens: int, hidden: int) -> float | None:
    """Of a machine on which NCCL is better than ours above 16 MiB, and push on few SMs is nothing."""
    nbytes = 2 * tokens * hidden
    traffic = traffic_bytes("two_shot", nbytes, 2)
    profile = shipped_profile(H200)
    assert profile is not None
    if label == "no-communication":
        return 2.0
    if label == "nccl+norm":
        return (40.0 + traffic / 400e3 if nbytes < 2**24 else 1.0) + 2.0
    if label.startswith("symm"):
        return 12.0 + traffic / 250e3
    if label == "tw-push-one-shot":
        return 3.0 + traffic / 100e3
    if label == "tw-push-two-shot":
        return 6.0 + traffic / 300e3
    if label == "tw-stream":
        return fused_us(replace(profile.fused["stream"], latency_us=7.0), tokens, hidden, 2, 16, staged=True)
    return None


def row(label: str, tokens: int, hidden: int, us: float | None) -> Row:
    ours = label.startswith("tw-")
    kind = "ours" if ours else "bound" if label == "no-communication" else "peer"
    times = (None, None, None) if us is None else (0.99 * us, us, 1.01 * us)
    outcome: Any = "not served" if us is None else "timed"
    numerics = "ok" if us is not None and kind != "bound" else "not checked"
    found = Row(label, kind, tokens, hidden, 2 * tokens * hidden, 1, "", None, outcome, None, numerics, *times)
    kernels = {"tw-push-one-shot": ("push_one_shot", 128), "tw-push-two-shot": ("push_two_shot", 128)}
    kernels["tw-stream"] = ("stream", 16)
    algorithm, sms = kernels.get(label, (None, None))
    return replace(found, algorithm=algorithm, max_sms=sms)


def beside_us(label: str) -> float:
    gemm = 300.0 if "gate_up" in label else 100.0
    if " on " in label:
        return gemm + (CONTENTION - 1) * 50.0 if "leaving" in label else 2 * gemm
    return gemm if not label.startswith("tw-") else 50.0


def report_of(spec: TuneSpec = SPEC, device_class: str = "sm90") -> dict[str, Any]:
    stages: dict[str, Any] = {}
    for stage in spec.stages():
        bench, rows = stage.bench, []
        for size in bench.sizes():
            if stage.kind == "kernel":
                rows += [
                    row(label, size.tokens, size.hidden, kernel_us(label, size.tokens, size.hidden))
                    for label in bench.only
                ]
            else:
                labels = [one.label for one in beside_contenders(bench)]
                rows += [row(label, size.tokens, size.hidden, beside_us(label)) for label in labels]
        stages[stage.name] = {
            "kind": stage.kind,
            "world_size": bench.world_size,
            "device_name": H200,
            "device_class": device_class,
            "environment": {"NCCL_NVLS_ENABLE": "0"},
            "rows": [asdict(one) for one in rows],
        }
    return {
        "command": "tune",
        "device": "cuda",
        "machine": "x86_64 64 cpus",
        "world_sizes": list(spec.world_sizes),
        "stages": stages,
        "versions": {"torch": "2.11.0", "nccl": "2.28.9", "flashinfer": None, "commit": "abc", "date": "2026-11-21"},
    }


def test_the_grid_doubles_from_8_kib_to_256_mib_and_fits_in_five_minutes() -> None:
    spec = TuneSpec((2, 4))
    (kernel, *_) = spec.stages()
    assert sorted(size.nbytes for size in kernel.bench.sizes()) == [2**power for power in range(13, 29)]
    text = io.StringIO()
    show.print_grid(Console(file=text, width=200), spec)
    (total,) = (line for line in text.getvalue().splitlines() if line.startswith("in all about"))
    assert float(total.split()[3]) < 5


def test_what_is_written_is_what_gate_kernels_and_planner_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    found = derive(report_of())
    files = write(tmp_path / "tw_compile", found, "made by a test\nin two lines")
    assert [file.name for file in files] == ["thresholds.toml", "kernels.toml", "device.toml"]
    assert all(file.read_text().startswith("# made by a test\n# in two lines\n") for file in files)
    assert read_table(files[0].read_text(), found.table.file) == found.table
    assert steps_of(files[1].read_text(), "k") == (H200, found.steps)
    assert parse_profile(files[2].read_text(), "p") == found.profile
    # And they count, for what they speak of.
    node = Node((9, 0), False)
    gate = Gate(node, Settings(), tables_of(threshold_layers("auto", "sm90"), "sm90"))
    small, large = (gate.decide(nbytes, world_size=2, dtype="bfloat16") for nbytes in (2**20, 2**25))
    assert (small.fused, large.fused) == (True, False)
    assert "tw-compile tune --tp 2" in large.source and "2x NVIDIA H200" in large.source
    assert gate.decide(2**25, world_size=4, dtype="bfloat16").fused
    assert steps_for(H200, 2) == found.steps and steps_for(H200, 4) == shipped_steps(H200, 4)
    assert steps_for("another", 2) == ()
    assert profile_of_device(H200) == found.profile and profile_of_device("NVIDIA H100 80GB HBM3") is not None


def test_changes_are_told_and_only_changes() -> None:
    found = derive(report_of())
    lines = changes(found)
    assert any(
        line.startswith("TP2, nccl, from 9.0 MiB to 256.0 MiB: ") and line.endswith("left, shipped fused by p2p")
        for line in lines
    )
    assert not any("symm" in line for line in lines)
    kernels = [line for line in lines if "kernels" in line]
    assert len(kernels) == 1 and "push_two_shot (128 SMs)" in kernels[0] and "shipped push_one_shot" in kernels[0]


def test_a_profile_recovers_the_machine_that_made_the_times() -> None:
    found = derive(report_of())
    assert found.profile is not None and found.profile.name == "H200, tuned"
    shipped = shipped_profile(H200)
    assert shipped is not None
    # In none of these pairs does the kernel take longer.
    assert found.profile.contention == CONTENTION and "contention" in found.measured
    assert found.profile.communication_contention == shipped.communication_contention
    assert found.profile.gemm == shipped.gemm and not any(name.startswith("gemm") for name in found.measured)
    two_shot = found.profile.all_reduce["torch_two_shot"]
    assert (two_shot.latency_us, two_shot.link_gb_per_s) == (pytest.approx(10.0), pytest.approx(250.0))
    push = found.profile.fused["push"]
    assert push.latency_us == pytest.approx(6.0)
    assert fused_us(push, 4096, 8192, 2, 128, staged=True) == pytest.approx(6.0 + 2**26 / 300e3, rel=0.01)
    assert "fused.push.latency_us" in found.measured and "fused.two_shot.latency_us" not in found.measured


def test_a_pair_costs_what_its_parts_and_their_contention_say() -> None:
    (_, beside) = SPEC.stages()
    rows = [Row(**one) for one in report_of()["stages"]["beside tp2"]["rows"]]
    costs = pair_costs(rows, beside.bench)
    assert len(costs) == 2 * 2 * 2 * 3  # tokens, kernels, GEMMs, SM counts
    one = next(one for one in costs if one.gemm == "gate_up")
    assert (one.alone_us, one.best_us, one.plain_us, one.leaving_us, one.left) == (350.0, 300.0, 600.0, 312.5, 8)
    assert pair_costs([row for row in rows if row.label != "gate_up"], beside.bench) == [
        one for one in costs if one.gemm != "gate_up"
    ]
    waiting = [dataclasses.replace(one, longer="kernel", contention=factor) for factor in (0.9, 1.4, 1.5)]
    assert contentions([*costs, *waiting]) == {"contention": CONTENTION, "communication_contention": 1.4}
    of_four = [dataclasses.replace(one, world_size=4, contention=2.2) for one in waiting]
    assert contentions(of_four) == {"communication_contention": pytest.approx(1.4)}
    assert contentions([]) == {}


def test_a_second_tuning_keeps_what_the_first_said_about_other_world_sizes(tmp_path: Path) -> None:
    write(tmp_path, derive(report_of(TuneSpec((4,)))), "first")
    write(tmp_path, derive(report_of(TuneSpec((2,)))), "second")
    later = report_of(TuneSpec((2,)))
    later["versions"]["date"] = "2026-12-01"
    write(tmp_path, derive(later), "third")
    table = read_table((tmp_path / "thresholds.toml").read_text(), "t")
    assert {entry.world_size for entry in table.entries} == {2, 4}
    dates = {entry.world_size: entry.source.values[2] for entry in table.entries if entry.source.kind == "measured"}
    assert dates == {2: "2026-12-01", 4: "2026-11-21"}
    _, steps = steps_of((tmp_path / "kernels.toml").read_text(), "k")
    assert {step.world_size for step in steps} == {2, 4}


def test_files_about_other_devices_and_wrong_ones_are_not_overwritten(tmp_path: Path) -> None:
    write(tmp_path, derive(report_of()), "")
    before = (tmp_path / "thresholds.toml").read_text()
    with pytest.raises(UsageError, match=r"--out: expected .* about sm100, got .*thresholds\.toml about sm90"):
        write(tmp_path, derive(report_of(device_class="sm100")), "")
    (tmp_path / "kernels.toml").write_text('device = "another"\n')
    with pytest.raises(UsageError, match=r"--out: expected .* about NVIDIA H200, got .*kernels\.toml about another"):
        write(tmp_path, derive(report_of()), "")
    (tmp_path / "kernels.toml").write_text("device = = 1\n")
    with pytest.raises(UsageError, match=r"kernels\.toml: expected TOML"):
        write(tmp_path, derive(report_of()), "")
    assert (tmp_path / "thresholds.toml").read_text() == before


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("kernels.toml", "steps = 3\n", "device: expected str, got None"),
        ("kernels.toml", 'device = "a"\nsteps = 3\n', "steps: expected [[steps]] tables, got 3"),
        ("kernels.toml", 'device = "a"\nsteps = [3]\n', "steps[0]: expected a table, got 3"),
        ("kernels.toml", "device =", "expected TOML, got "),
        ("device.toml", "name =", "expected TOML, got "),
        ("device.toml", 'name = "a"\n', "expected the keys name, device_names, "),
    ],
)
def test_a_malformed_user_file_is_one_error_that_names_it(
    name: str, text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "tw_compile").mkdir()
    file = tmp_path / "tw_compile" / name
    file.write_text(text)
    with pytest.raises(ValueError) as error:
        steps_for(H200, 2) if name == "kernels.toml" else profile_of_device(H200)
    assert str(error.value).startswith(f"{file}: ") and message in str(error.value)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 2 and f"error: {file}: " in result.output


def test_doctor_prints_where_kernels_and_profile_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    write(tmp_path / "tw_compile", derive(report_of()), "")
    result = CliRunner().invoke(app, ["doctor", "--json", "-"])
    report = json.loads(result.stdout)
    for key in ("kernel_tables", "device_profile"):
        assert report[key]["layers"][0]["layer"] == "shipped"
        own = report[key]["layers"][1]
        assert own["layer"] == "user file" and "not used: it is about NVIDIA H200" in own["state"]
    assert "shipped < calibration < user file < environment < options" in " ".join(result.stderr.split())


def test_a_plot_and_a_strip_show_the_crossover(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = derive(report_of(TuneSpec((2, 4))))
    show.plot(found, str(tmp_path / "plot.svg"))
    text = (tmp_path / "plot.svg").read_text()
    assert text.startswith("<?xml") and len(text) > 10_000
    nccl = show.strip(found.table.ranges((2, "nccl")))
    assert "█" in nccl and "·" in nccl and nccl.index("█") < nccl.index("·") and len(nccl) == 17


def test_busy_gpus_are_named_with_what_was_seen() -> None:
    assert obstacles([Usage(0, 2**29), Usage(1, 2**30, 5)]) == []
    seen = obstacles([Usage(0, 80 * 2**30, 97, (41, 42)), Usage(1, 0)])
    assert seen == ["GPU 0 has processes 41, 42", "GPU 0 is 97% busy", "GPU 0 has 80.0 GiB in use"]


def _on_gpus(monkeypatch: pytest.MonkeyPatch, used: int) -> None:
    monkeypatch.setattr(common, "gpus", lambda: 2)
    monkeypatch.setattr(busy, "usages", lambda count: [Usage(index, used) for index in range(count)])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: H200)
    monkeypatch.setattr("tw_compile.current.current_node", lambda: Node((9, 0), False))


def test_busy_gpus_are_refused_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _on_gpus(monkeypatch, 2**35)
    result = CliRunner().invoke(app, ["tune", "--out", str(tmp_path)])
    assert result.exit_code == 2 and "error: tune: expected idle GPUs, got GPU 0 has 32.0 GiB in use" in result.output
    assert list(tmp_path.iterdir()) == []


def _spawn_of(report: dict[str, Any], started: list[str], fail_at: str | None = None) -> Any:
    def spawn(bench: Any, progress: Any, entry: Any) -> dict[str, Any]:
        name = f"{'beside' if bench.sms else 'kernel'} tp{bench.world_size}"
        started.append(name)
        if name == fail_at:
            raise KeyboardInterrupt
        return {key: report["stages"][name][key] for key in ("device_name", "device_class", "rows")} | {
            "cache_bytes": 1
        }

    return spawn


def test_an_interrupted_tuning_is_resumed_and_a_stale_one_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _on_gpus(monkeypatch, 0)
    started: list[str] = []
    args = ["tune", "--tp", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(start, "nccl_version", lambda: "2.28.9")
    monkeypatch.setattr(run, "spawn_ranks", _spawn_of(report_of(), started, "beside tp2"))
    CliRunner().invoke(app, args)
    assert started == ["kernel tp2", "beside tp2"]
    assert [file.name for file in tmp_path.iterdir()] == ["tune-partial.json"]
    monkeypatch.setattr(run, "spawn_ranks", _spawn_of(report_of(), started))
    monkeypatch.setattr(start, "nccl_version", lambda: "3.0")
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 2 and "nccl differ (2.28.9, now 3.0); --fresh begins anew" in result.output
    assert len([line for line in result.output.splitlines() if line.startswith("error: --resume: ")]) == 1
    monkeypatch.setattr(start, "nccl_version", lambda: "2.28.9")
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0 and started[2:] == ["beside tp2"], result.output
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {"tune.json", "thresholds.toml", "kernels.toml", "device.toml"}
    assert "TP2, nccl, from 9.0 MiB to 256.0 MiB: left, shipped fused by p2p" in result.output
    # The report is enough to derive the tables again.
    assert derive(json.loads((tmp_path / "tune.json").read_text())).steps == derive(report_of()).steps
    result = CliRunner().invoke(app, [*args, "--fresh"])
    assert started[3:] == ["kernel tp2", "beside tp2"] and result.exit_code == 0


@pytest.mark.parametrize(("outcome", "files"), [("numerics failed", 1), ("error", 4)])
def test_no_table_is_written_when_numerics_of_ours_fail(
    outcome: str, files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _on_gpus(monkeypatch, 0)
    report = report_of()
    broken = next(one for one in report["stages"]["kernel tp2"]["rows"] if one["label"] == "tw-stream")
    broken |= {"outcome": outcome, "numerics": "failed", "reason": "hidden: not finite", "p50_us": None}
    monkeypatch.setattr(run, "spawn_ranks", _spawn_of(report, []))
    result = CliRunner().invoke(app, ["tune", "--tp", "2", "--out", str(tmp_path)])
    assert result.exit_code == 1 and "FAILED  tw-stream at [1, 4096] (kernel tp2)" in result.output
    names = {file.name for file in tmp_path.iterdir()}
    assert "tune.json" in names and len(names) == files


def test_partial_results_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    for text in ("", "[]", '{"key": 3, "stages": {}}'):
        (tmp_path / "tune-partial.json").write_text(text)
        with pytest.raises(UsageError, match=r"--resume: expected partial results in .*; --fresh begins anew"):
            run.earlier_stages(tmp_path, {})


def test_tables_of_switched_off_peers_need_a_folder_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TW_COMPILE_PEER_ACCESS", "0")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    result = CliRunner().invoke(app, ["tune"])
    (line,) = result.output.splitlines()
    assert result.exit_code == 2 and line.startswith("error: --out: expected a folder with TW_COMPILE_PEER_ACCESS=0")
    assert CliRunner().invoke(app, ["tune", "--dry-run"]).exit_code == 0
    assert "--out" not in CliRunner().invoke(app, ["tune", "--out", str(tmp_path)]).output
    assert key_of(SPEC, [])["peer_access"] == "off"


def test_a_dry_run_prints_the_grid_and_does_nothing(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["tune", "--dry-run", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    for words in ("kernel tp2: about", "beside tp4: about", "16384", "tw-stream", "in all about", str(tmp_path)):
        assert words in result.output
    assert list(tmp_path.iterdir()) == []
    asked = json.loads(CliRunner().invoke(app, ["tune", "--dry-run", "--tp", "2", "--json", "-"]).stdout)
    assert sorted(asked["stages"]) == ["beside tp2", "kernel tp2"]


@pytest.mark.parametrize(
    ("args", "named", "came"),
    [
        (["--device", "tpu"], "--device", "tpu"),
        (["--device", "cpu", "--tp", "1"], "--tp", "1"),
        (["--device", "cpu", "--tp", "two"], "--tp", "two"),
        (["--device", "cpu", "--timeout", "0"], "--timeout", "0"),
        (["--device", "cpu", "--plot", "a.png"], "--plot", "a.png"),
        (["--device", "cpu", "--json", "/no/such/folder/a.json"], "--json", "/no/such/folder"),
        (["--plot", "a.pdf"], "--plot", "a.pdf"),
        (["--out", __file__], "--out", __file__),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else None,
)
def test_bad_input_is_one_line_that_names_the_option(args: list[str], named: str, came: str) -> None:
    result = CliRunner().invoke(app, ["tune", *args])
    assert result.exit_code == 2
    lines = [line for line in result.output.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and lines[0].startswith(f"error: {named}: expected") and came in lines[0]


def test_without_gpus_a_tuning_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "gpus", lambda: 0)
    with pytest.raises(UsageError, match="--device: expected cpu"):
        command.world_sizes_of(None, "cuda", dry_run=False)
    monkeypatch.setattr(common, "gpus", lambda: 2)
    assert command.world_sizes_of(None, "cuda", dry_run=False) == (2,)
    with pytest.raises(UsageError, match="--tp: expected at most 2"):
        command.world_sizes_of((2, 4), "cuda", dry_run=False)


@pytest.mark.parametrize("ours", [None, 30.0])
def test_a_node_whose_gpus_cannot_reach_each_other_has_tables_too(
    ours: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All over peer memory is not served there: what is written names no kernel, and is readable."""
    left = {"nccl+norm": 40.0, "no-communication": 2.0, "tw-nccl": ours}
    monkeypatch.setitem(globals(), "kernel_us", lambda label, tokens, hidden: left.get(label))
    monkeypatch.setitem(globals(), "beside_us", lambda label: None if label.startswith("tw-") else 100.0)
    derived = derive(report_of())
    assert derived.steps == () and derived.pairs == ()
    for file in write(tmp_path, derived, "a comment"):
        assert file.read_text().startswith("#")


def test_a_wires_source_does_not_replace_the_source_of_new_entries(tmp_path: Path) -> None:
    old, new = (Source("measured_tp2", "measured", ("2x", "torch", date, "c")) for date in ("2026-01-01", "2026-02-02"))
    file = tmp_path / "thresholds.toml"
    file.write_text(table_text(Table("", "sm90", (), (WireEntry("int8", 2, "host", 0, old),))))
    own = Table("", "sm90", (Entry(2, "nccl", 0, None, "fused", "p2p", new),))
    read = read_table(table_text(merged_table(file, own)), "read")
    assert (read.entries[0].source.values[2], read.wires[0].source.values[2]) == ("2026-02-02", "2026-01-01")
