"""``tw-compile run`` on real ranks, and what happens when a rank fails."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from reference import assert_keys_are_listed
from typer.testing import CliRunner

from tw_compile.cli.app import app
from tw_compile.harness import launch
from tw_compile.harness.launch import Entry, spawn_ranks
from tw_compile.harness.requests import RankError, UsageError
from tw_compile.runner.ranks import run_in_process_group
from tw_compile.runner.spec import RunSpec

SPEC = RunSpec(model="tiny-llama", world_size=2, device="cpu", tokens=(8,), dtype="bfloat16", layers=1, timeout=300)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_run_fuses_every_site_and_passes(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    args = ["run", "--device", "cpu", "--tp", "2", "--layers", "1", "--tokens", "8,3", "--json", str(file)]
    args += ["--trace", str(tmp_path / "trace.json")]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    assert result.output.rstrip().splitlines()[-1].startswith("PASSED  3 of 3 all_reduces fused")
    report = json.loads(file.read_text())
    assert_keys_are_listed("run", report)
    assert report["schema_version"] == 1
    assert (report["world_size"], report["device"], report["tokens"]) == (2, "cpu", [8, 3])
    assert report["counts"] == {"all_reduce": 3, "fused": 3, "refused": 0, "gated": 0}
    assert {(site["decision"], site["transport"], site["bytes"]) for site in report["sites"]} == {
        ("fused", "gloo", 8 * 512 * 2)
    }
    numerics = report["numerics"]
    assert numerics["passed"] and numerics["bitwise_equal_across_ranks"]
    for name in ("hidden", "residual"):
        assert 1e-4 < numerics[name]["error"] <= numerics[name]["budget"] == 1.1 * numerics[name]["unfused_error"]
    seconds = report["compile_seconds"]
    assert 0 < seconds["passes"] < 0.05 * seconds["tw_compile"]
    assert seconds["baseline"] > 0
    trace = report["trace"]
    assert trace["files"] == [str(tmp_path / f"trace.rank{rank}.json") for rank in (0, 1)]
    assert all(json.loads(Path(one).read_text())["traceEvents"] for one in trace["files"])
    slowest = max(trace["by_rank"], key=lambda one: one["span_us"])
    assert trace["by_rank"][trace["slowest_rank"]] == slowest and trace["hidden_share"] == slowest["share"]
    assert all(one["communication_us"] > 0 and 0 <= one["share"] <= 1 for one in trace["by_rank"])
    assert report["memory"] is None


@pytest.mark.full
@pytest.mark.timeout(600)
def test_run_with_a_wire_tells_what_it_costs(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    args = ["run", "--device", "cpu", "--tp", "2", "--layers", "1", "--tokens", "8", "--wire", "int8"]
    args += ["--wire-sites", "mlp", "--json", str(file)]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    assert "int8 wire: relative RMS error of a call" in result.output and "ranks identical" in result.output
    report = json.loads(file.read_text())
    wire = report["wire"]
    assert (wire["wire"], wire["calls"], wire["exact_calls"], wire["passed"]) == ("int8", 1, 2, True)
    (down_proj,) = wire["classes"]
    assert (down_proj["feeds"], down_proj["third"]) == ("down_proj", "first")
    assert 0.003 < down_proj["sum"]["error"] < 0.006
    assert [site["wire"] for site in report["sites"]] == ["exact", "exact", "int8"]


def test_a_wire_that_breaks_models_is_refused_before_anything_starts() -> None:
    begin = time.perf_counter()
    command = [sys.executable, "-m", "tw_compile.cli", "run", "--wire", "int4"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("error: --wire: expected one of exact, int8, int6, auto, got 'int4', which gathers")
    assert (
        time.perf_counter() - begin < 20
    )  # it takes about one second; torch alone takes longer to import on a busy machine


@pytest.mark.full
@pytest.mark.timeout(300)
def test_model_that_a_rank_cannot_build_is_bad_input() -> None:
    spec = dataclasses.replace(SPEC, world_size=1, layers=99)
    with pytest.raises(UsageError, match=r"num_layers: expected 1 to 4, got 99"):
        spawn_ranks(spec, lambda what: None, run_in_process_group)


def _rank_1_raises(spec: RunSpec, rank: int, scratch: str, messages: Connection) -> None:
    messages.send(("doing", "thinking"))
    if rank == 1:
        messages.send(("failed", "Traceback ...\nKeyError: 'lost'"))
        return
    time.sleep(60)


def _rank_1_is_killed(spec: RunSpec, rank: int, scratch: str, messages: Connection) -> None:
    messages.send(("doing", "computing"))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1)
    messages.send(("failed", "ConnectionError: peer is gone"))


def _rank_1_hangs(spec: RunSpec, rank: int, scratch: str, messages: Connection) -> None:
    messages.send(("doing", "waiting for Godot"))
    if rank == 1:
        time.sleep(60)
    messages.send(("result", {}))


def _fails(entry: Entry[RunSpec], timeout: float = 60) -> str:
    begin = time.monotonic()
    with pytest.raises(RankError) as caught:
        spawn_ranks(dataclasses.replace(SPEC, timeout=timeout), lambda what: None, entry)
    assert time.monotonic() - begin < 30
    return str(caught.value)


def _sends_parts(spec: RunSpec, rank: int, scratch: str, messages: Connection) -> None:
    for done in ([1], [1, 2]):
        messages.send(("so far", {"rank": rank, "rows": done}))
    messages.send(("doing", "row 3"))
    if rank == 1:
        messages.send(("failed", "KeyError: 'lost'"))
    time.sleep(60)


def _sends_parts_late(spec: RunSpec, rank: int, scratch: str, messages: Connection) -> None:
    messages.send(("so far", {"rows": [1]}))
    messages.send(("doing", "row 2"))
    time.sleep(60)


@pytest.mark.full
def test_failure_of_a_rank_leaves_what_rank_0_had_so_far() -> None:
    with pytest.raises(RankError, match="rank 1 failed while row 3: KeyError") as caught:
        spawn_ranks(SPEC, lambda what: None, _sends_parts)
    assert caught.value.so_far == {"rank": 0, "rows": [1, 2]}


@pytest.mark.full
def test_time_limit_leaves_what_rank_0_had_so_far() -> None:
    with pytest.raises(RankError, match="no result after 8 s; unfinished: rank 0: row 2; rank 1: row 2") as caught:
        spawn_ranks(dataclasses.replace(SPEC, timeout=8), lambda what: None, _sends_parts_late)
    assert caught.value.so_far == {"rows": [1]}


def _sends_nothing_yet(spec: RunSpec, rank: int, scratch: str, messages: Connection) -> None:
    messages.send(("doing", "row 1"))
    time.sleep(60)


def _interrupt(what: str) -> None:
    raise KeyboardInterrupt


def test_interruption_leaves_what_rank_0_had_so_far_and_is_none_of_ours_without() -> None:
    with pytest.raises(RankError, match=r"^interrupted$") as caught:
        spawn_ranks(SPEC, _interrupt, _sends_parts_late)
    assert caught.value.so_far == {"rows": [1]}
    with pytest.raises(KeyboardInterrupt):
        spawn_ranks(SPEC, _interrupt, _sends_nothing_yet)


def _terminate(what: str) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_time_limit_from_outside_is_an_interruption_while_ranks_run() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RankError, match=r"^interrupted$") as caught:
        spawn_ranks(SPEC, _terminate, _sends_parts_late)
    assert caught.value.so_far == {"rows": [1]} and signal.getsignal(signal.SIGTERM) == before


ASKED = """
import multiprocessing, os, signal
from tw_compile.harness.launch import report_to_parent

def work(doing):
    os.kill(os.getpid(), signal.SIGUSR1)
    return {}

ours, theirs = multiprocessing.Pipe(duplex=False)
report_to_parent(theirs, work)
"""


def test_a_rank_that_is_asked_prints_where_it_is_and_goes_on() -> None:
    done = subprocess.run([sys.executable, "-c", ASKED], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "in work" in done.stderr


@pytest.mark.full
def test_ranks_are_asked_where_they_are_at_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(launch._Rank, "ask", lambda rank: asked.append(rank.rank))
    assert _fails(_rank_1_hangs, timeout=5) == "no result after 5 s; unfinished: rank 1: waiting for Godot"
    assert asked == [1]


@pytest.mark.full
def test_rank_that_raises_is_named_with_its_traceback() -> None:
    message = _fails(_rank_1_raises)
    assert message.startswith("rank 1 failed while thinking")
    assert "KeyError: 'lost'" in message


def test_rank_that_is_killed_is_named_and_not_the_one_that_noticed() -> None:
    message = _fails(_rank_1_is_killed)
    assert message.startswith("rank 1 died while computing: killed by SIGKILL")
    assert "then failed too: rank 0" in message
