"""``tw-compile bench kernel`` on gloo ranks, and contenders that fail on one rank or compute nonsense."""

from __future__ import annotations

import csv
import dataclasses
import json
import platform
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from reference import assert_keys_are_listed
from typer.testing import CliRunner

from tw_compile import compat
from tw_compile.benchmark import worker
from tw_compile.benchmark.contender import Contender, ContenderCall
from tw_compile.benchmark.peers import UnfusedAllReduce
from tw_compile.benchmark.results import Row
from tw_compile.benchmark.spec import BenchSpec, MessageSize
from tw_compile.benchmark.worker import bench_size, rank_process
from tw_compile.cli.app import app
from tw_compile.harness.problems import Context, Problem
from tw_compile.harness.ranks import Ranks, UnavailableError
from tw_compile.harness.start import launch
from tw_compile.kernels.collective.codes import round_trip
from tw_compile.kernels.collective.reference import add_rms_norm
from tw_compile.kernels.collective.spec import row_range
from tw_compile.kernels.collective.wires import WIRES
from tw_compile.testing import GlooRanks

SPEC = BenchSpec(2, "cpu", "bfloat16", (64,), (5,), calls=2, repeats=20)


@pytest.mark.full
@pytest.mark.timeout(120)
def test_smoke_test_on_gloo_ranks(tmp_path: Path) -> None:
    files = {name: tmp_path / f"rows.{name}" for name in ("csv", "json", "regret")}
    args = ["--device", "cpu", "--hidden", "64", "--tokens", "1,5", "--repeats", "20", "--calls", "3", "--gated"]
    args += [part for name, file in files.items() for part in (f"--{name}", str(file))]
    result = CliRunner().invoke(app, ["bench", "kernel", *args])
    assert result.exit_code == 0, result.output
    assert "say nothing about speed" in result.output and "PASSED" in result.output
    assert "[5, 64] checking gloo+norm" in result.output
    report = json.loads(files["json"].read_text())
    assert_keys_are_listed("bench kernel", report)
    assert (report["schema_version"], report["world_size"], report["tokens"]) == (1, 2, [1, 5])
    rows = report["rows"]
    assert [(row["label"], row["tokens"]) for row in rows] == [
        (label, tokens) for tokens in (1, 5) for label in ("tw-gloo", "gloo+norm", "gated")
    ]
    assert all(row["numerics"] == "ok" and 0 < row["p20_us"] <= row["p50_us"] <= row["p80_us"] for row in rows)
    assert all(row["speedup"] is None and row["residual_form"] == "replicated bfloat16" for row in rows)
    assert {row["chosen"] for row in rows if row["label"] != "gated"} == {None}
    assert all(row["chosen"].startswith("tw-gloo by generic.toml: ") for row in rows if row["label"] == "gated")
    regrets = list(csv.DictReader(files["regret"].open()))
    # Gloo ranks say nothing about speed, so nothing about regret.
    assert [(line["tokens"], line["outcome"], line["regret"]) for line in regrets] == [
        ("1", "timed", ""),
        ("5", "timed", ""),
    ]
    assert "gated: no regret" in result.output
    lines = list(csv.DictReader(files["csv"].open()))
    assert [float(line["p50_us"]) for line in lines] == [row["p50_us"] for row in rows]
    assert {line["torch"] for line in lines} == {torch.__version__}


def _fails_late(spec: BenchSpec, rank: int, scratch: str, messages: Connection) -> None:
    """Rank 1 is lost in the second size."""

    def lost_in_second(spec: BenchSpec, ranks: Ranks, everyone: Any, size: MessageSize, *others: Any) -> list[Row]:
        if rank == 1 and size.tokens == 5:
            raise RuntimeError("lost")
        return bench_size(spec, ranks, everyone, size, *others)

    with mock.patch.object(worker, "bench_size", lost_in_second):
        rank_process(spec, rank, scratch, messages)


@pytest.mark.full
@pytest.mark.timeout(120)
def test_sizes_done_before_a_rank_failed_are_reported() -> None:
    spec = dataclasses.replace(SPEC, tokens=(1, 5), timeout=100.0)
    report = launch(spec, "bench kernel", _fails_late, lambda what: None)
    assert [(row["label"], row["tokens"], row["outcome"]) for row in report["rows"]] == [
        ("tw-gloo", 1, "timed"),
        ("gloo+norm", 1, "timed"),
    ]
    assert report["incomplete"].startswith("rank 1 failed while [1, 64] timing: RuntimeError: lost")
    assert (report["tokens"], report["device_name"]) == ((1, 5), platform.machine())


class _Broken(UnfusedAllReduce):
    """Raises on rank 1 when it is prepared, or when it is called, or what it computes is wrong."""

    def __init__(self, when: str) -> None:
        super().__init__(when)

    def prepare(self, ranks: Ranks, problem: Problem) -> ContenderCall:
        is_bad = ranks.ctx.rank == 1
        if is_bad and self.label == "prepare":
            raise RuntimeError("no memory\nat all")
        if self.label == "inside":
            ranks.together(lambda: 1 // (not is_bad))
        if self.label == "before inside" and is_bad:
            raise RuntimeError("early")
        if self.label == "before inside":
            ranks.together(lambda: None)
        right = super().prepare(ranks, problem)

        def call() -> tuple[torch.Tensor, torch.Tensor]:
            hidden, residual = right()
            if is_bad and self.label == "call":
                raise RuntimeError("lost")
            if is_bad and self.label == "wrong":
                hidden[-1, -1] += 1
            if is_bad and self.label == "unequal":
                hidden[-1, -1] *= 1 + 2**-7
            return hidden, residual

        return call


class _Elsewhere(UnfusedAllReduce):
    kind = "ours"

    def deviation(self, ranks: Ranks) -> str | None:
        return "fell back" if ranks.ctx.rank == 0 else None


class _OursUnequal(_Broken):
    kind = "ours"


def _on_ranks(rank: int, check: Callable[[Ranks], Any]) -> Any:
    world = dist.group.WORLD
    assert world is not None
    with torch.no_grad():
        return check(Ranks(Context(rank, 2, torch.device("cpu"), compat.group_name(world)), world))


def _bench_broken(ranks: Ranks) -> dict[str, tuple[str, str | None, bool, str]]:
    everyone: list[Contender] = [_Broken(when) for when in ("prepare", "inside", "before inside", "call", "wrong")]
    everyone += [_OursUnequal("unequal"), _Elsewhere("elsewhere"), UnfusedAllReduce("good")]
    (size,) = SPEC.sizes()
    rows = bench_size(SPEC, ranks, everyone, size, 2**20, lambda what: None)
    return {row.label: (row.outcome, row.reason, row.p50_us is not None, row.numerics) for row in rows}


@pytest.mark.full
def test_contender_that_fails_on_one_rank_is_a_row_with_its_reason_on_all(gloo_ranks: GlooRanks) -> None:
    rows, other = gloo_ranks.run(_on_ranks, _bench_broken)
    assert rows == other
    assert rows["prepare"] == ("error", "rank 1: RuntimeError: no memory", False, "not checked")
    assert rows["inside"] == (
        "error",
        "rank 1: ZeroDivisionError: integer division or modulo by zero",
        False,
        "not checked",
    )
    assert rows["before inside"] == ("error", "rank 1: RuntimeError: early", False, "not checked")
    assert rows["call"] == ("error", "rank 1: RuntimeError: lost", False, "not checked")
    assert rows["elsewhere"] == ("error", "rank 0: fell back", False, "not checked")
    assert rows["good"] == ("timed", None, True, "ok")


def test_wrong_or_unequal_results_get_no_time(gloo_ranks: GlooRanks) -> None:
    rows, _ = gloo_ranks.run(_on_ranks, _bench_broken)
    outcome, reason, has_time, numerics = rows["wrong"]
    assert (outcome, has_time, numerics) == ("numerics failed", False, "failed")
    assert reason is not None and reason.startswith("rank 1: hidden: ")
    outcome, reason, has_time, numerics = rows["unequal"]
    assert (outcome, has_time, numerics) == ("numerics failed", False, "failed")
    assert "differs from rank 0" in str(reason)


class _Coded(Contender):
    """Says that its rows travel by ``wire``, and lets them travel by another one."""

    kind = "ours"

    def __init__(self, wire: str, travels: str) -> None:
        self.label, self.wire, self.travels = f"{travels} as {wire}", wire, WIRES[travels]

    def prepare(self, ranks: Ranks, problem: Problem) -> ContenderCall:
        world_size, request = ranks.ctx.world_size, problem.request(ranks.ctx)

        def call() -> tuple[torch.Tensor, torch.Tensor]:
            sent = [torch.empty_like(problem.x) for _ in range(world_size)]
            dist.all_gather(sent, problem.x)
            total = torch.zeros(problem.x.shape)
            for owner in range(world_size):
                rows = slice(*row_range(len(total), world_size, owner))
                for source, x in enumerate(sent):
                    total[rows] += (x if source == owner else round_trip(x, self.travels.sums))[rows]
            hidden, h = add_rms_norm(total, request.residual, None, request.weight, request.norm)
            return round_trip(hidden, self.travels.results).to(hidden.dtype), h

        return call


def _bench_coded(ranks: Ranks) -> dict[str, tuple[str, str | None, str]]:
    everyone: list[Contender] = [
        _Coded(wire, travels)
        for wire, travels in (
            ("int8", "int8"),
            ("int6", "int6"),
            ("int4", "int4"),
            ("int8", "exact"),
            ("int8", "int6"),
            ("int6", "int4"),
            ("exact", "int8"),
        )
    ]
    spec = dataclasses.replace(SPEC, hidden=(256,), wires=("exact", "int8", "int6", "int4"))
    (size,) = spec.sizes()
    rows = bench_size(spec, ranks, everyone, size, 2**20, lambda what: None)
    return {row.label: (row.outcome, row.reason, row.wire) for row in rows}


def test_rows_in_codes_may_be_as_wrong_as_their_own_wire_and_no_more(gloo_ranks: GlooRanks) -> None:
    rows, other = gloo_ranks.run(_on_ranks, _bench_coded)
    assert rows == other
    for wire in ("int8", "int6", "int4"):
        assert rows[f"{wire} as {wire}"] == ("timed", None, wire)
    assert rows["exact as int8"] == ("timed", None, "int8")
    for label, budget in (
        ("int6 as int8", "torch in int8"),
        ("int4 as int6", "torch in int6"),
        ("int8 as exact", "unfused"),
    ):
        outcome, reason, _ = rows[label]
        assert outcome == "numerics failed" and "hidden: rms error" in str(reason) and budget in str(reason)


def _agreements(ranks: Ranks) -> tuple[Any, ...]:
    rank = ranks.ctx.rank
    with pytest.raises(UnavailableError, match=r"rank 0: KeyError"):
        ranks.together(lambda: {1: "there"}[rank])
    return ranks.agree("same"), ranks.agree(None), ranks.agree("own" if rank else None), ranks.together(lambda: rank)


def test_ranks_agree_on_obstacles(gloo_ranks: GlooRanks) -> None:
    assert gloo_ranks.run(_on_ranks, _agreements) == [
        ("same", None, "rank 1: own", 0),
        ("same", None, "rank 1: own", 1),
    ]
