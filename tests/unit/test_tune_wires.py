"""``tw-compile tune --wire`` without its ranks: from which sizes on wires pay, what is written, and what is refused."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from tw_compile.benchmark.results import Row
from tw_compile.benchmark.variants import OURS, by_wires, check_wires
from tw_compile.cli.app import app
from tw_compile.cli.tune_wires import finish_wires
from tw_compile.config import Config
from tw_compile.gating import Gate, Node, Settings, read_table
from tw_compile.gating.table import Entry, Source, Table, WireEntry, table_text
from tw_compile.harness.requests import UsageError
from tw_compile.passes.fusion.wire import wire_threshold
from tw_compile.tuning import show
from tw_compile.tuning.measured import KernelRun
from tw_compile.tuning.spec import TuneSpec
from tw_compile.tuning.tables import derive, write
from tw_compile.tuning.wires import LEAST_BYTES, MeasuredWire, labels_of, measured_wires, write_wires

MEBI = 2**20
WIRES = ("int8", "int6")
SPEC = TuneSpec((2,), wires=WIRES, wire_labels=labels_of(WIRES))
SOURCE = Source("measured_tp2", "measured", ("2x NVIDIA H100", "torch 2.11", "2026-11-24", "tw-compile tune --tp 2"))
COMMAND = "tw-compile tune --tp 2 --wire int8,int6"


def us_of(label: str, nbytes: int) -> float | None:
    """int8 over NVLink is faster above 4 MiB, int6 never; through host memory both are faster from the smallest message on."""
    half = 0.55 if label.endswith("int8") else 0.45 if label.endswith("int6") else 1.0
    if label.startswith("tw-host"):
        return 10.0 + half * nbytes / 39e3
    if label.endswith("int6"):
        return 100.0 + nbytes / 300e3
    if label.endswith("int8"):
        return 14.0 + half * nbytes / 300e3
    if label == "tw-push-one-shot":
        return 5.0 + nbytes / 150e3
    return {"tw-p2p": 9.0, "tw-push-two-shot": 8.0, "tw-stream": 11.0}[label] + nbytes / 300e3


def row(label: str, tokens: int, hidden: int, us: float | None) -> Row:
    wire = label.rpartition("-")[2] if label.endswith(WIRES) else "exact"
    times = (None, None, None) if us is None else (0.99 * us, us, 1.01 * us)
    outcome: Any = "not served" if us is None else "timed"
    numerics = "not checked" if us is None else "ok"
    made = Row(label, "ours", tokens, hidden, 2 * tokens * hidden, 1, "", None, outcome, None, numerics, *times)
    return replace(made, wire=wire)


def rows(us: Any = us_of) -> list[Row]:
    (stage,) = SPEC.stages()
    return [
        row(label, size.tokens, size.hidden, us(label, size.nbytes))
        for size in stage.bench.sizes()
        for label in stage.bench.only
    ]


def found(us: Any = us_of) -> dict[tuple[str, str], MeasuredWire]:
    run = KernelRun(2, "NVIDIA H100", SOURCE, tuple(rows(us)))
    return {(wire.transport, wire.wire): wire for wire in measured_wires(run, WIRES, COMMAND)}


def test_only_contenders_of_the_benchmark_are_asked_for() -> None:
    (stage,) = SPEC.stages()
    assert stage.name == "wires tp2" and stage.bench.wires == ("exact", *WIRES)
    assert set(stage.bench.only) <= {
        variant.label for variant in by_wires(OURS, stage.bench.wires, stage.bench.world_size)
    }
    check_wires(stage.bench)
    assert {"tw-push-one-shot", "tw-host-one-shot", "tw-host-words"} <= {
        *stage.bench.only
    }  # they serve exact rows, too


def test_a_wire_pays_from_where_all_larger_messages_are_faster() -> None:
    of = found()
    assert {key: wire.from_bytes for key, wire in of.items()} == {
        ("p2p", "int8"): 8 * MEBI,
        ("p2p", "int6"): None,
        ("host", "int8"): MEBI // 2,
        ("host", "int6"): MEBI // 2,
    }
    assert "TP2, p2p, int8 pays from 8 MiB on" in str(of["p2p", "int8"])
    assert "int6 pays at no size" in str(of["p2p", "int6"])


def test_over_nvlink_no_table_has_a_wire_for_what_decoding_sends() -> None:
    always = found(lambda label, nbytes: (0.5 if label.endswith("int8") else 1.0) * nbytes / 300e3)
    assert min(nbytes for nbytes, ratio in always["p2p", "int8"].ratios if ratio < 1.0) < LEAST_BYTES["p2p"]
    assert always["p2p", "int8"].from_bytes == LEAST_BYTES["p2p"] == MEBI


def test_a_difference_inside_the_noise_is_none() -> None:
    within = found(lambda label, nbytes: us_of("tw-push-two-shot", nbytes) * (0.985 if label.endswith("int8") else 1.0))
    assert within["p2p", "int8"].from_bytes is None


def test_one_size_that_is_slower_moves_the_crossover_behind_it() -> None:
    def us(label: str, nbytes: int) -> float | None:
        return 1e6 if label == "tw-push-two-shot-int8" and nbytes == 64 * MEBI else us_of(label, nbytes)

    assert found(us)["p2p", "int8"].from_bytes == 128 * MEBI


def test_codes_must_be_faster_than_one_shot_too() -> None:
    def us(label: str, nbytes: int) -> float | None:
        return 0.9 * us_of("tw-push-two-shot-int8", nbytes) if label == "tw-push-one-shot" else us_of(label, nbytes)

    assert found(us)["p2p", "int8"].from_bytes is None


def test_what_was_measured_below_is_said() -> None:
    assert found()["p2p", "int8"].below == "at 4 MiB codes take 0.99 of the time of exact rows"  # within the noise
    assert found()["p2p", "int6"].below is None


def test_a_transport_without_times_says_nothing() -> None:
    peers = found(lambda label, nbytes: None if label.startswith("tw-host") else us_of(label, nbytes))
    assert {transport for transport, _ in peers} == {"p2p"}


OLD = Source("mine", "default", ("to try it",))
THERE = Table(
    "thresholds.toml",
    "sm90",
    (Entry(4, "any", 0, None, "fused", "p2p", OLD),),
    (
        WireEntry("int6", 2, "p2p", MEBI, OLD),
        WireEntry("int8", 2, "nccl", 2 * MEBI, OLD),
        WireEntry("int8", 4, "p2p", 0, OLD),
    ),
)


def test_what_is_written_is_what_the_gate_reads_and_all_else_stays(tmp_path: Path) -> None:
    file = tmp_path / "thresholds.toml"
    file.write_text(table_text(THERE))
    assert write_wires(tmp_path, "sm90", list(found().values()), "made by a test") == file
    table = read_table(file.read_text(), str(file))
    assert file.read_text().startswith("# made by a test\n")
    assert table.entries == THERE.entries
    kept = {(wire.wire, wire.world_size, wire.transport): wire.from_bytes for wire in table.wires}
    assert kept == {
        ("int8", 2, "p2p"): 8 * MEBI,
        ("int8", 2, "host"): MEBI // 2,
        ("int6", 2, "host"): MEBI // 2,
        ("int8", 2, "nccl"): 2 * MEBI,
        ("int8", 4, "p2p"): 0,  # another number of ranks; int6 over p2p was measured to pay at no size
    }
    gate = Gate(
        Node((9, 0), False), Settings(), (replace(table, entries=(Entry("any", "any", 0, None, "fused", "p2p", OLD),)),)
    )
    told = wire_threshold(Config(wire="auto"), gate, 2, "p2p")
    assert told.nbytes == 8 * MEBI and COMMAND in told.why
    again = write_wires(tmp_path, "sm90", list(found().values()), "made by a test").read_text()
    assert read_table(again, "again").wires == table.wires


def test_tables_about_another_device_are_refused_and_stay(tmp_path: Path) -> None:
    file = tmp_path / "thresholds.toml"
    file.write_text(table_text(THERE))
    with pytest.raises(UsageError, match="--out: expected a folder whose tables are about sm100"):
        write_wires(tmp_path, "sm100", list(found().values()), "")
    assert file.read_text() == table_text(THERE)


def report(measured: list[Row]) -> dict[str, Any]:
    (stage,) = SPEC.stages()
    done = {"kind": stage.kind, "world_size": 2, "device_name": "NVIDIA H100", "device_class": "sm90"}
    versions = {"torch": "2.11.0", "nccl": "2.28.9", "flashinfer": None, "commit": "abc", "date": "2026-11-24"}
    return {
        "command": "tune",
        "device": "cuda",
        "machine": "x86_64 64 cpus",
        "world_sizes": [2],
        "stages": {stage.name: done | {"environment": {}, "rows": [asdict(one) for one in measured]}},
        "versions": versions,
    }


def test_the_command_writes_tables_and_all_that_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = tmp_path / "told.json"
    finish_wires(report(rows()), WIRES, tmp_path, str(told))
    assert "TP2, p2p, int8 pays from 8 MiB on" in capsys.readouterr().out
    assert len(json.loads(told.read_text())["wires"]) == 4
    assert json.loads((tmp_path / "tune-wires.json").read_text())["stages"]["wires tp2"]["rows"]
    assert "--wire int8,int6" in (tmp_path / "thresholds.toml").read_text()


def test_no_table_is_made_of_a_kernel_that_is_wrong(tmp_path: Path) -> None:
    measured = rows()
    wrong = next(one for one in measured if one.label == "tw-push-two-shot-int8")
    wrong.outcome, wrong.numerics, wrong.p50_us = "numerics failed", "failed", None
    with pytest.raises(typer.Exit) as ended:
        finish_wires(report(measured), WIRES, tmp_path, None)
    assert ended.value.exit_code == 1 and not (tmp_path / "thresholds.toml").exists()


def test_other_tunings_keep_the_wires(tmp_path: Path) -> None:
    from test_tuning import report_of

    file = tmp_path / "thresholds.toml"
    file.write_text(table_text(THERE))
    write(tmp_path, derive(report_of()), "a comment")
    assert read_table(file.read_text(), "thresholds.toml").wires == THERE.wires


def test_a_dry_run_prints_the_grid_and_does_nothing(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["tune", "--dry-run", "--wire", "int8", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "wires tp2: about" in done.output and "tw-push-two-shot-int8" in done.output
    assert list(tmp_path.iterdir()) == []
    text = StringIO()
    show.print_grid(Console(file=text, width=200), SPEC)
    assert "tw-host-two-shot-int6" in text.getvalue()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--wire", "int5"], "--wire: expected different ones of int8, int6, got 'int5'"),
        (["--wire", "int8,int8"], "--wire: expected different ones of int8, int6, got 'int8,int8'"),
        (["--wire", "int8", "--device", "cpu"], "--device: expected cuda with --wire"),
        (["--wire", "int8", "--wire-sites", "mlp"], "--wire-sites: expected all without --checkpoint, got 'mlp'"),
    ],
)
def test_bad_input_is_refused(args: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["tune", *args])
    assert done.exit_code == 2 and words in done.output and done.output.count("\n") == 1, done.output
