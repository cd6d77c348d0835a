"""The gated contender: it runs what the gate says, and its row tells how far that is from the best."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tw_compile.benchmark import gated, ours
from tw_compile.benchmark.contenders import contenders
from tw_compile.benchmark.gated import Gated, regret_csv, regret_line, regrets, set_regret
from tw_compile.benchmark.ours import Operator
from tw_compile.benchmark.peers import SymmetricMemory, UnfusedAllReduce
from tw_compile.benchmark.results import Row
from tw_compile.benchmark.spec import BenchSpec, MessageSize
from tw_compile.cli import bench_common, common
from tw_compile.cli.app import app
from tw_compile.config import Config
from tw_compile.gating import Entry, Gate, Node, Settings, Source, Table
from tw_compile.harness.rows import Outcome, failures
from tw_compile.kernels.transports.selection import Step

NAMED = Source("s", "default", ("why",))
STEPS = (Step(2, 2**20, "push_one_shot", 128), Step(2, 2**26, "push_two_shot", 128))


def row(label: str, us: float | None, kind: str = "ours", tokens: int = 16, outcome: Outcome = "timed") -> Row:
    numerics = "ok" if outcome == "timed" and kind != "bound" else "not checked"
    times = (us, us, us)
    return Row(label, kind, tokens, 8192, tokens * 16384, 1, "", None, outcome, None, numerics, *times)


def report_of(rows: list[Row]) -> dict[str, Any]:
    names = {
        "machine": "m",
        "peer_access": "on",
        "device": "cuda",
        "device_name": "GPU",
        "world_size": 2,
        "dtype": "bfloat16",
        "repeats": 50,
    }
    return names | {"rows": [asdict(one) for one in rows], "versions": {"torch": "2.11.0", "date": "2026-11-21"}}


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Gated]:
    """A gated contender on fake GPUs, for a table with one range and a backend."""

    def make(transport: str | None, backend: str = "nccl", steps: tuple[Step, ...] = STEPS) -> Gated:
        decision: Any = "left" if transport is None else "fused"
        table = Table("t.toml", "generic", (Entry("any", "any", 0, None, decision, transport, NAMED),))
        gate = Gate(Node((9, 0), False), Settings(backend=backend), (table,))

        def current(config: Config) -> Gate:
            return gate

        monkeypatch.setattr(gated, "current_gate", current)
        monkeypatch.setattr(gated, "steps_for", lambda device, world_size: steps)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
        monkeypatch.setattr(ours, "multicast_here", lambda: False)
        return Gated()

    return make


def chosen(one: Gated, tokens: int = 16) -> Any:
    assert one.obstacle(MessageSize(tokens, 8192, "bfloat16"), 2) is None
    return one.current


def test_what_is_left_runs_by_the_backend_that_it_is_left_to(decided: Callable[..., Gated]) -> None:
    assert isinstance(chosen(decided(None)), UnfusedAllReduce)
    for backend, label in (("symm_mem_one_shot", "symm-one-shot+norm"), ("symm_mem_two_shot", "symm-two-shot+norm")):
        one = decided(None, backend)
        found = chosen(one)
        assert isinstance(found, SymmetricMemory) and found.label == label
        assert one.choice() == f"{label} by t.toml: world_size any, any, from 0 bytes"
    refused = decided(None, "custom").obstacle(MessageSize(16, 8192, "bfloat16"), 2)
    assert refused == "left to custom, which this benchmark does not run"
    # What its backend does not serve, it does not either.
    assert "32 MiB" in str(decided(None, "symm_mem_one_shot").obstacle(MessageSize(4096, 8192, "bfloat16"), 2))


def test_what_is_fused_runs_by_the_transport_with_the_residual_that_its_kernel_wants(
    decided: Callable[..., Gated],
) -> None:
    one = decided("p2p")
    small = chosen(one)
    assert isinstance(small, Operator) and (small.label, one.residual_sharded) == ("tw-p2p-replicated", False)
    large = chosen(one, 4096)
    assert (large.label, one.residual_sharded) == ("tw-p2p", True)
    assert chosen(one) is small
    assert chosen(decided("p2p", steps=())).label == "tw-p2p"
    assert chosen(decided("nccl")).label == "tw-nccl"
    assert "multimem" in str(decided("multimem").obstacle(MessageSize(16, 8192, "bfloat16"), 2))


def test_regret_is_against_the_best_of_all_who_do_the_same_work() -> None:
    rows = [
        row("tw-a", 10.0),
        replace(row("tw-fp8", 1.0), quantises=True),
        row("peer", 12.0, "peer"),
        row("no-communication", 2.0, "bound"),
        replace(row("tw-wrong", 3.0, outcome="numerics failed"), numerics="failed"),
        row("gated", 11.0),
    ]
    set_regret(rows)
    assert (rows[-1].best, rows[-1].regret) == ("tw-a", pytest.approx(0.1))
    assert [one.regret for one in rows[:-1]] == [None] * 5
    rows[-1].p50_us = 9.0
    set_regret(rows)
    assert (rows[-1].best, rows[-1].regret) == ("gated", 0.0)


def _measured() -> dict[str, Any]:
    rows = []
    for tokens, us in ((1, 10.1), (4, 10.5), (16, None)):
        outcome: Outcome = "not served" if us is None else "timed"
        own = [
            row("tw-a", 10.0, tokens=tokens),
            replace(row("gated", us, tokens=tokens, outcome=outcome), chosen="x by t"),
        ]
        set_regret(own)
        rows += own
    return report_of(rows)


def test_summary_and_csv_tell_every_size() -> None:
    report = _measured()
    assert regret_line(report) == "gated: within 2% at 1 of 2 points, worst 5.0% (1 of 3 sizes have no gated time)"
    lines = list(csv.DictReader(io.StringIO(regret_csv(report))))
    assert [(line["tokens"], line["best"], line["best_us"]) for line in lines] == [
        ("1", "tw-a", "10.0"),
        ("4", "tw-a", "10.0"),
        ("16", "", ""),
    ]
    assert [float(line["regret"] or "nan") for line in lines[:2]] == pytest.approx([0.01, 0.05])
    assert {(line["chosen"], line["torch"], line["device_name"]) for line in lines} == {("x by t", "2.11.0", "GPU")}
    assert len(regrets(report)) == 3


def test_regret_does_not_make_the_benchmark_fail() -> None:
    assert failures([Row(**one) for one in _measured()["rows"]]) == []


def test_gated_takes_part_only_when_asked() -> None:
    spec = BenchSpec(2, "cuda", "bfloat16", (8192,), (1,), only=("nccl+norm",))
    assert [one.label for one in contenders(spec)] == ["nccl+norm"]
    assert [one.label for one in contenders(replace(spec, gated=True))] == ["nccl+norm", "gated"]


def test_gated_has_sizes_of_its_own_and_regret_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[BenchSpec] = []

    def measure(run: Any, steps: int, print_report: Any, spec: BenchSpec, json_file: str | None) -> dict[str, Any]:
        seen.append(spec)
        return {"rows": [], "incomplete": None}

    monkeypatch.setattr(common, "gpus", lambda: 2)
    monkeypatch.setattr(bench_common, "measure", measure)
    assert CliRunner().invoke(app, ["bench", "kernel", "--gated"]).exit_code == 0
    assert CliRunner().invoke(app, ["bench", "kernel"]).exit_code == 0
    assert [(one.hidden, one.gated) for one in seen] == [((2048, 4096, 8192), True), ((8192,), False)]
    assert (seen[0].tokens[0], seen[0].tokens[-1]) == (1, 16384)
    result = CliRunner().invoke(app, ["bench", "kernel", "--regret", "r.csv"])
    assert result.exit_code == 2 and "error: --regret: expected --gated with it, got 'r.csv' alone" in result.output
