"""An FFN in halves: its plan, its numerics, and the benchmark on a CPU."""

from __future__ import annotations

import csv
import io

import pytest
import torch

from tw_compile.benchmark.layer import ffn
from tw_compile.benchmark.layer.ffn_spec import EQUAL, PLANNED, TUNED, WHOLE, FfnSpec
from tw_compile.benchmark.papers import predict
from tw_compile.benchmark.papers.timed import parse
from tw_compile.planning import load_profile
from tw_compile.planning.ffn import FfnPlan, plan_ffn
from tw_compile.planning.measured_halves import MeasuredHalves

LLAMA = "llama-3.3-70b"


def test_halves_give_what_the_whole_gives() -> None:
    subject = ffn.Ffn(32, 48, 20, torch.device("cpu"), torch.float32)
    gate, up = (subject.x @ subject.gate_up).chunk(2, dim=-1)
    want = (torch.nn.functional.silu(gate) * up) @ subject.down
    for first in (0, 10, 7):
        out = torch.full((20, 32), float("nan"))
        subject(20, first, out)
        torch.testing.assert_close(out, want)


@pytest.mark.parametrize("shards", [4, 8])
@pytest.mark.parametrize("tokens", [1024, 2048, 4096, 8192])
def test_planned_halves_are_predicted_within_two_percent_of_a_sweep(shards: int, tokens: int) -> None:
    sizes = tuple(range(128, tokens, 128))
    plan = plan_ffn(load_profile("H100"), predict.layer_of(LLAMA, shards), tokens, sizes)
    assert 0 < plan.first < tokens and plan.first % 16 == 0
    assert plan.us[plan.first] <= 1.02 * min(plan.us[size] for size in sizes)


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="tokens: expected at least 32 for two halves, got 31"):
        plan_ffn(load_profile("H100"), predict.layer_of(LLAMA, 8), 31)


def test_ways_are_the_whole_and_halves_that_add_up() -> None:
    found = ffn.ways(1024, FfnPlan(448, 448, {}))
    assert (found[WHOLE], found[EQUAL], found[PLANNED]) == (0, 512, 448)
    assert found["half@384"] == 384 and len(found) == 3 + 7


def test_measured_halves_have_a_label_of_their_own() -> None:
    entry = MeasuredHalves(8192, 7168, "bfloat16", 1024, 640, 557.8, 569.0, "today")
    found = ffn.ways(1024, FfnPlan(640, 384, {}, entry))
    assert found[TUNED] == 640 and PLANNED not in found and len(found) == 3 + 7


@pytest.mark.full
@pytest.mark.timeout(120)
def test_benchmark_on_a_cpu_writes_rows_that_exhibits_can_be_drawn_from() -> None:
    spec = FfnSpec("tiny-llama", 2, (64, 320), repeats=20, calls=1, device="cpu", dtype="float32", timeout=100.0)
    seen: list[str] = []
    report = ffn.run(spec, seen.append)
    assert report["incomplete"] is None and "64 tokens" in seen
    assert report["planned_for"] == ffn.OTHERWISE
    rows = list(csv.DictReader(io.StringIO(ffn.as_csv(report))))
    assert {row["world_size"] for row in rows} == {"2"} and {row["command"] for row in rows} == {"bench ffn"}
    timed = parse(ffn.as_csv(report), "here.csv", "measured here")
    assert [row.label for row in timed if row.tokens == 64] == [WHOLE, EQUAL, PLANNED, "half@32"]
    assert {row.bench for row in timed} == {"bench ffn"} and all(row.value > 0 for row in timed)
