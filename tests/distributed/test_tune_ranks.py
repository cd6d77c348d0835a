"""``tw-compile tune`` on gloo ranks: everything runs, and nothing of it becomes a table."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reference import assert_keys_are_listed
from typer.testing import CliRunner

from tw_compile import compat
from tw_compile.benchmark.variants import OURS_ON_CPU
from tw_compile.benchmark.worker import bench_size
from tw_compile.cli.app import app
from tw_compile.harness.problems import Context, Problem
from tw_compile.harness.ranks import Ranks
from tw_compile.testing import GlooRanks
from tw_compile.tuning.beside import Beside, beside_contenders
from tw_compile.tuning.pairs import gemms, pair_costs
from tw_compile.tuning.spec import TuneSpec


@pytest.mark.timeout(300)
def test_smoke_test_on_gloo_ranks(tmp_path: Path) -> None:
    args = ["tune", "--device", "cpu", "--out", str(tmp_path), "--json", "-"]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    assert "say nothing about speed: no table is made of them" in " ".join(result.stderr.split())
    assert "PASSED" in result.stderr
    # No thresholds, no kernels, no profile.
    assert [file.name for file in tmp_path.iterdir()] == ["tune-cpu.json"]
    report = json.loads(result.stdout)
    assert report == json.loads((tmp_path / "tune-cpu.json").read_text())
    assert_keys_are_listed("tune", report)
    assert (report["device"], sorted(report["stages"])) == ("cpu", ["beside tp2", "kernel tp2"])
    for stage in report["stages"].values():
        assert stage["rows"] and all(row["outcome"] == "timed" for row in stage["rows"])


class _WrongProduct(Beside):
    def meanwhile(self, problem: Problem) -> Any:
        multiply = super().meanwhile(problem)

        def wrong() -> None:
            multiply()
            assert self._product is not None
            self._product[-1, -1] += 1000

        return wrong


def _bench_beside(rank: int) -> list[dict[str, Any]]:
    world = dist.group.WORLD
    assert world is not None
    (_, stage) = TuneSpec((2,), "cpu").stages()
    spec = replace(stage.bench, hidden=(64,), tokens=(6,))
    everyone = [*beside_contenders(spec), _WrongProduct(OURS_ON_CPU[0], 2, gemms(2)[0], 2)]
    (size,) = spec.sizes()
    with torch.no_grad():
        ranks = Ranks(Context(rank, 2, torch.device("cpu"), compat.group_name(world)), world)
        rows = bench_size(spec, ranks, everyone, size, 2**20, lambda what: None)
    costs = pair_costs(rows, spec)
    assert [(one.kernel, one.sms, one.gemm) for one in costs] == [("tw-gloo", 4, "o_proj"), ("tw-gloo", 4, "gate_up")]
    return [asdict(row) for row in rows]


def test_pairs_are_timed_only_if_call_and_product_are_right(gloo_ranks: GlooRanks) -> None:
    rows, _ = gloo_ranks.run(_bench_beside)
    *good, wrong = rows
    assert all(row["outcome"] == "timed" for row in good)
    assert {row["numerics"] for row in good if " on " in row["label"]} == {"ok"}
    assert wrong["outcome"] == "error" and "the product beside it is off" in wrong["reason"]
    assert wrong["p50_us"] is None
