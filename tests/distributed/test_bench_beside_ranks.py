"""``tw-compile bench beside`` on gloo ranks, and calls that go wrong only later than their first check."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from reference import assert_keys_are_listed
from typer.testing import CliRunner

from tw_compile import compat
from tw_compile.benchmark.beside import rank as rank_module
from tw_compile.benchmark.beside.rank import CallBeside, bench_size
from tw_compile.benchmark.beside.results import TIMED
from tw_compile.benchmark.beside.sides import Covered, Lane, OnCpu
from tw_compile.benchmark.beside.spec import BesideSpec, GemmShape
from tw_compile.benchmark.contender import ContenderCall
from tw_compile.cli.app import app
from tw_compile.harness.problems import Context, Problem
from tw_compile.harness.ranks import Ranks
from tw_compile.testing import GlooRanks


@pytest.mark.full
@pytest.mark.timeout(180)
def test_rehearsal_on_gloo_ranks(tmp_path: Path) -> None:
    files = {name: tmp_path / f"rows.{name}" for name in ("csv", "json")}
    args = ["--device", "cpu", "--hidden", "64", "--tokens", "5", "--gemm", "64x96,32x64", "--sms", "6"]
    args += ["--repeats", "20"]
    args += [part for name, file in files.items() for part in (f"--{name}", str(file))]
    result = CliRunner().invoke(app, ["bench", "beside", *args])
    assert result.exit_code == 0, result.output
    assert "say nothing about speed, so there are no ratios" in result.output and "PASSED" in result.output
    report = json.loads(files["json"].read_text())
    assert_keys_are_listed("bench beside", report)
    assert (report["schema_version"], report["world_size"], report["peer_access"]) == (1, 2, "on")
    rows = report["rows"]
    assert [(row["tokens"], row["gemm_inner"], row["gemm_columns"]) for row in rows] == [(5, 64, 96), (5, 32, 64)]
    for row in rows:
        assert (row["transport"], row["sms"], row["outcome"], row["numerics"]) == ("gloo", 6, "timed", "ok")
        assert row["residual_form"] == "sharded bfloat16" and row["calls"] >= 4 and row["covering_gemms"] > 4
        assert all(0 < row[f"{timed}_p20_us"] <= row[f"{timed}_p50_us"] for timed in TIMED)
        assert (row["gemm_factor"], row["call_factor"]) == (None, None)
        # Ranks share few cores here, so a side may have been idle. Then the row says so.
        idle = min(row["call_tail_us"], row["gemm_tail_us"]) <= 0
        assert row["covered"] is not idle and (row["reason"] or "").startswith("no ratio: in a run" if idle else "")
    lines = list(csv.DictReader(files["csv"].open()))
    assert [float(line["call_beside_p50_us"]) for line in lines] == [row["call_beside_p50_us"] for row in rows]
    assert {(line["torch"], line["peer_access"]) for line in lines} == {(torch.__version__, "on")}


class _WrongLater(CallBeside):
    """From its third call on, one element of its results is wrong on rank 1. The first call is what is checked at first."""

    def prepare(self, ranks: Ranks, problem: Problem) -> ContenderCall:
        right, is_bad, made = super().prepare(ranks, problem), ranks.ctx.rank == 1, [0]

        def call() -> tuple[torch.Tensor, torch.Tensor]:
            hidden, residual = right()
            made[0] += 1
            if is_bad and made[0] > 2:
                hidden[-1, -1] += 1
            return hidden, residual

        return call


def _benched(rank: int, wrong: bool) -> list[Any]:
    world = dist.group.WORLD
    assert world is not None
    spec = BesideSpec(2, "cpu", "bfloat16", (64,), (5,), gemms=(GemmShape(64, 32),), repeats=20)
    with torch.no_grad(), mock.patch.object(rank_module, "CallBeside", _WrongLater if wrong else CallBeside):
        ranks = Ranks(Context(rank, 2, torch.device("cpu"), compat.group_name(world)), world)
        (row,) = bench_size(spec, ranks, OnCpu(), spec.sizes()[0], 2**10, lambda what: None)
    return [row.outcome, row.numerics, row.reason, row.call_p50_us is not None]


def test_calls_that_go_wrong_after_the_first_check_are_found(gloo_ranks: GlooRanks) -> None:
    (outcome, numerics, reason, timed), other = gloo_ranks.run(_benched, True)
    assert [outcome, numerics, reason, timed] == other
    assert (outcome, numerics, timed) == ("numerics failed", "failed", True)
    assert reason.startswith("of a call that ran beside GEMMs: rank 1: hidden: ")


def test_right_calls_pass_on_all_ranks_alike(gloo_ranks: GlooRanks) -> None:
    first, second = gloo_ranks.run(_benched, False)
    assert first == second and first[:2] == ["timed", "ok"]


class _Scripted(OnCpu):
    """Sides whose covering side ends too early until it has enough items; rank 1 needs more of them."""

    def __init__(self, enough: int) -> None:
        self.enough = enough

    def both(self, covering: Lane, covered: Lane) -> Covered:
        return Covered(10.0, 5.0, 100.0 if covering.count >= self.enough else -1.0)


def _covering_items(rank: int, enough: tuple[int, int]) -> list[int]:
    world = dist.group.WORLD
    assert world is not None
    ranks = Ranks(Context(rank, 2, torch.device("cpu"), compat.group_name(world)), world)
    spec = BesideSpec(2, "cpu", "bfloat16", (64,), (5,))
    bench = rank_module._Bench(spec, ranks, _Scripted(enough[rank]), spec.sizes()[0], [], None, 0)  # type: ignore[arg-type]
    timer = bench._covered(bench.sides.lane([lambda: None], 4), [lambda: None], 3)
    for _ in range(spec.repeats):
        timer.run()
    return [timer.covering.count, bench._evidence(timer)]  # type: ignore[list-item]


def test_the_covering_side_grows_on_all_ranks_until_it_covers(gloo_ranks: GlooRanks) -> None:
    assert gloo_ranks.run(_covering_items, (1, 10)) == [[12, (5.0, 100.0, True)]] * 2
    # Where it never covers, growing ends, and the evidence says so.
    assert gloo_ranks.run(_covering_items, (1, 1000)) == [[24, (5.0, -1.0, False)]] * 2
