"""What exhibits ask the benchmarks for, and how a measurement that was cut short goes on."""

from __future__ import annotations

import json
import types
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tw_compile.benchmark.contenders import contenders
from tw_compile.benchmark.layer.ffn_spec import EQUAL, PLANNED, TUNED, WHOLE, FfnSpec, swept_sizes
from tw_compile.benchmark.layer.variants import variants
from tw_compile.benchmark.papers import measure as module
from tw_compile.benchmark.papers.context import Context
from tw_compile.benchmark.papers.measure import HERE, Request, files_of, measure
from tw_compile.benchmark.papers.published import read_published
from tw_compile.benchmark.papers.registry import PAPERS, exhibits
from tw_compile.benchmark.papers.report import requests_of
from tw_compile.benchmark.papers.timed import given, parse
from tw_compile.benchmark.papers.tokenweave_kernels import BY_MODEL, BY_TUNE
from tw_compile.cli.app import app
from tw_compile.harness.requests import INTERRUPTED, RankError, UsageError
from tw_compile.kernels.collective import peer_access
from tw_compile.kernels.collective.transports import NO_PEER_ATOMICS
from tw_compile.planning.measured_halves import MeasuredHalves
from tw_compile.tuning.halves_profile import write_halves

KEY = "machine"
SPEC = FfnSpec("llama-3.3-70b", 8, (1024, 2048, 4096))
REQUEST = Request("bench ffn", SPEC, 1, 3.0)
HEADER = "label,tokens,first,p50_us,world_size,model"


class FakeBench:
    """Does ``most`` numbers of tokens a call, and is out of time then."""

    labels = (WHOLE,)

    def __init__(self, most: int) -> None:
        self.most = most
        self.asked: list[Any] = []

    def run(self, spec: FfnSpec, progress: Any) -> dict[str, Any]:
        self.asked.append(spec)
        progress("working")
        done = spec.tokens[: self.most]
        return {"done": done, "spec": spec, "incomplete": None if done == spec.tokens else "no answer in time"}

    def as_csv(self, report: dict[str, Any]) -> str:
        lines = [
            f"{label},{tokens},0,{tokens}.0,{report['spec'].shards},llama-3.3-70b"
            for tokens in report["done"]
            for label in self.labels
        ]
        return "\n".join([HEADER, *lines]) + "\n"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> FakeBench:
    fake = FakeBench(2)
    monkeypatch.setattr(module, "import_module", lambda name: fake)
    return fake


def measured(folder: Path, gpus: int = 1, minutes: float = 5.0, **options: Any) -> module.Measured:
    return measure([REQUEST, REQUEST], gpus, folder, minutes, KEY, lambda what: None, **options)


def test_what_was_cut_short_goes_on_with_what_is_missing(bench: FakeBench, tmp_path: Path) -> None:
    first = measured(tmp_path)
    assert [row.tokens for row in first.rows] == [1024, 2048] and list(first.missing.values()) == ["no answer in time"]
    second = measured(tmp_path)
    assert [spec.tokens for spec in bench.asked] == [(1024, 2048, 4096), (4096,)]
    assert [row.tokens for row in second.rows] == [1024, 2048, 4096] and not second.missing
    assert {row.how for row in second.rows} == {HERE}
    measured(tmp_path)
    assert len(bench.asked) == 2
    measured(tmp_path, resume=False)
    assert bench.asked[2].tokens == SPEC.tokens


def test_rows_of_another_machine_are_not_taken(bench: FakeBench, tmp_path: Path) -> None:
    measured(tmp_path)
    assert files_of(REQUEST, tmp_path, KEY) and not files_of(REQUEST, tmp_path, "another")


def test_rows_of_gpus_that_cannot_reach_each_other_went_through_host_memory(
    monkeypatch: pytest.MonkeyPatch, bench: FakeBench, tmp_path: Path
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: f"card {index}")
    keys = []
    for reach in (False, True):
        monkeypatch.setattr(
            peer_access, "pair_obstacle", lambda one, other, found=None if reach else NO_PEER_ATOMICS: found
        )
        keys.append(module.made_with())
        rows = measured(tmp_path, host=module.through_host()).rows
        assert rows and all(row.through_host is not reach for row in rows)
    monkeypatch.setenv("TW_COMPILE_PEER_ACCESS", "0")
    assert module.through_host() and keys[0] != keys[1] != module.made_with()


def test_time_is_kept(bench: FakeBench, tmp_path: Path) -> None:
    measured(tmp_path, minutes=2.0)
    assert bench.asked[0].timeout == pytest.approx(120.0, abs=5.0)
    now = iter([0.0, 50.0])
    late = measure(
        [replace(REQUEST, spec=replace(SPEC, seed=1))], 1, tmp_path, 1.0, KEY, print, clock=lambda: next(now)
    )
    assert "--minutes were over" in next(iter(late.missing.values())) and len(bench.asked) == 1


def on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tw_compile.cli.common.gpus", lambda: 1)
    for fact, value in (("made_with", KEY), ("through_host", False)):
        monkeypatch.setattr(f"tw_compile.cli.bench_paper.{fact}", lambda value=value: value)


@pytest.mark.parametrize(
    ("minutes", "busy", "tuned"), [("5", "", True), ("5", "the GPU is busy", True), ("1.9", "", False)]
)
def test_figure_9_tunes_halves_first_and_plans_by_them(
    monkeypatch: pytest.MonkeyPatch, bench: FakeBench, tmp_path: Path, minutes: str, busy: str, tuned: bool
) -> None:
    on_one_gpu(monkeypatch)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    asked: list[FfnSpec] = []
    (figure,) = exhibits("tokenweave", "9")
    assert figure.requests is not None
    before = {request.digest(KEY) for request in figure.requests(2)}

    def tune(specs: list[FfnSpec], minutes: float, progress: Any) -> str | None:
        assert not bench.asked, "tuned after the figure was measured"
        asked.extend(specs)
        entry = MeasuredHalves(8192, 3584, "bfloat16", 2048, 896, 533.0, 564.0, "today")
        if not busy:
            write_halves(tmp_path / "tw_compile", "NVIDIA H100 80GB HBM3", (entry,), "")
        return busy or None

    monkeypatch.setattr("tw_compile.cli.bench_paper.tune_for", tune)
    args = ["bench", "paper", "tokenweave", "--figures", "9", "--minutes", minutes, "--out", str(tmp_path / "rows")]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    assert [spec.shards for spec in asked] == ([4, 8] if tuned else []) and len(bench.asked) == 2
    assert ("are planned by the model: the GPU is busy" in result.output) is bool(busy)
    kept = {file.name.split("-")[2] for file in (tmp_path / "rows").iterdir()}
    assert (kept == before) is (bool(busy) or not tuned)


def test_the_same_command_goes_on_where_minutes_were_over(
    monkeypatch: pytest.MonkeyPatch, bench: FakeBench, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench, "labels", (WHOLE, PLANNED))
    on_one_gpu(monkeypatch)
    monkeypatch.setattr("tw_compile.cli.bench_paper.tune_for", lambda *asked: "the GPU is busy")
    args = ["bench", "paper", "tokenweave", "--figures", "9", "--minutes", "5", "--out", str(tmp_path), "--json", "-"]

    def call() -> tuple[list[str], list[float]]:
        result = CliRunner().invoke(app, args)
        assert result.exit_code == 0, result.output
        report = json.loads(result.stdout)
        (figure,) = report["exhibits"]
        here = [point["x"] for point in figure["comparison"] if point["how"] == HERE and "TP8" in point["series"]]
        return report["missing"], here

    assert call() == (["no answer in time"], [1024, 2048])
    assert call() == ([], [1024, 2048, 4096, 8192])
    assert [spec.tokens for spec in bench.asked] == [(1024, 2048, 4096, 8192)] * 2 + [(4096, 8192)] * 2
    assert call()[0] == [] and len(bench.asked) == 4


def test_ctrl_c_keeps_rows_and_begins_no_further_benchmark(
    monkeypatch: pytest.MonkeyPatch, bench: FakeBench, tmp_path: Path
) -> None:
    run = bench.run
    monkeypatch.setattr(bench, "run", lambda *given: run(*given) | {"incomplete": INTERRUPTED})
    other = replace(REQUEST, spec=replace(SPEC, shards=4))
    with pytest.raises(KeyboardInterrupt):
        measure([REQUEST, other], 1, tmp_path, 5.0, KEY, print)
    assert len(bench.asked) == 1 and len(files_of(REQUEST, tmp_path, KEY)) == 1


def test_too_few_gpus_are_a_reason(bench: FakeBench, tmp_path: Path) -> None:
    found = measured(tmp_path / "none", gpus=0)
    assert list(found.missing.values()) == ["it needs 1 GPU, and torch finds 0 here"]
    assert bench.asked == [] and not (tmp_path / "none").exists()


def test_a_benchmark_that_fails_is_a_reason_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(spec: Any, progress: Any) -> dict[str, Any]:
        raise RankError("rank 0 failed\nTraceback")

    monkeypatch.setattr(module, "import_module", lambda name: types.SimpleNamespace(run=fail))
    found = measured(tmp_path)
    assert list(found.missing.values()) == ["rank 0 failed"] and found.rows == []


@pytest.mark.parametrize("name", PAPERS)
@pytest.mark.parametrize("tp", [2, 4])
def test_benchmarks_know_what_is_asked_for(name: str, tp: int) -> None:
    asked = {request for requests in requests_of(exhibits(name), tp).values() for request in requests}
    for request in asked:
        if request.bench == "bench kernel":
            assert contenders(request.spec) and request.gpus == request.spec.world_size == tp
        elif request.bench == "bench layer":
            assert len(variants(request.spec, 1024)) == len(request.spec.only) and request.gpus == tp
        else:
            assert request.gpus == request.spec.world_size == 1


def test_the_figures_of_two_gpus_ask_for_kernels_and_layers() -> None:
    asked = requests_of(exhibits("tokenweave", "4,10,11"), 2)
    (fused,), (sms,), layers = asked["4"], asked["10"], asked["11"]
    assert {"nccl+norm", "nccl-reduce-scatter+norm+all-gather", "tw-push-two-shot"} <= set(fused.spec.only)
    assert sms.spec.sms == (2, 4, 8, 16, 32, 64, 128)
    assert [request.spec.model for request in layers] == ["llama-3.1-8b", "llama-3.3-70b"]
    assert all(request.spec.tokens == (1024, 2048, 4096, 8192, 16384) for request in layers)
    assert fused.minutes + sms.minutes <= 10 and sum(request.minutes for request in layers) <= 10
    halves = requests_of(exhibits("tokenweave", "9"), 2)["9"]
    assert [(request.spec.shards, request.gpus) for request in halves] == [(4, 1), (8, 1)]
    assert sum(request.minutes for request in halves) <= 8


def test_a_request_is_the_same_whatever_is_left_of_it() -> None:
    part = replace(REQUEST, spec=replace(SPEC, tokens=(4096,), timeout=7.0))
    assert part.digest(KEY) == REQUEST.digest(KEY) != replace(REQUEST, spec=replace(SPEC, shards=4)).digest(KEY)


def test_files_of_another_schema_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "other.csv"
    file.write_text("a,b\n1,2\n")
    with pytest.raises(
        UsageError, match=r"--from: expected a CSV file of a benchmark .*other.csv' with the columns a, b"
    ):
        given([str(file)])
    with pytest.raises(UsageError, match=r"--from: expected a file that can be read, got 'nowhere.csv'"):
        given(["nowhere.csv"])
    with pytest.raises(UsageError, match="--from: expected numbers where bench ffn has them"):
        parse(f"{HEADER}\nwhole,many,0,1.0,8,m\n", "f.csv", "measured earlier")


def test_rows_without_times_or_with_wrong_results_are_left_out() -> None:
    header = "label,kind,tokens,p50_us,world_size,hidden,numerics"
    lines = ["a,ours,8,1.5,2,64,ok", "b,ours,8,,2,64,ok", "c,peer,8,1.0,2,64,failed", "d,bound,8,1.0,2,64,not checked"]
    rows = parse("\n".join([header, *lines]), "f.csv", "measured earlier")
    assert [row.label for row in rows] == ["a", "d"]


def test_rows_in_codes_are_not_what_peers_give() -> None:
    header = "label,kind,tokens,p50_us,world_size,hidden,numerics,quantises,wire"
    lines = ["a,ours,8,1.5,2,64,ok,False,exact", "b,ours,8,1.0,2,64,ok,False,int8", "c,ours,8,1.0,2,64,ok,True,exact"]
    rows = parse("\n".join([header, *lines]), "f.csv", "measured earlier")
    context = Context(read_published("tokenweave"), rows, None, 2)
    shown = {wire: context.fastest_fused(2, 64, wire) for wire in ("exact", "int8")}
    assert {wire: [row.label for row in times["f.csv"].values()] for wire, times in shown.items()} == {
        "exact": ["a"],
        "int8": ["b"],
    }


def test_swept_halves_are_around_the_middle() -> None:
    assert swept_sizes(1024) == (128, 256, 384, 512, 640, 768, 896)
    assert swept_sizes(256) == (128,)
    assert asdict(SPEC)["world_size"] == 1 and EQUAL != PLANNED


def test_rows_of_an_ffn_are_measured_anew_when_tune_has_measured_its_halves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (figure,) = exhibits("tokenweave", "9")
    assert figure.requests is not None
    before = figure.requests(2)
    entry = MeasuredHalves(8192, 3584, "bfloat16", 2048, 896, 533.0, 564.0, "today")
    write_halves(tmp_path / "tw_compile", "NVIDIA H100 80GB HBM3", (entry,), "")
    four, eight = figure.requests(2)
    assert four.digest(KEY) == before[0].digest(KEY) and eight.digest(KEY) != before[1].digest(KEY)
    assert (four.spec, eight.spec) == (before[0].spec, before[1].spec)  # the sweep itself is the same
    (tmp_path / "tw_compile" / "device.toml").write_text("sms = 0\n")
    assert "device.toml" in figure.requests(2)[0].depends_on[0]
    result = CliRunner().invoke(app, ["bench", "paper", "tokenweave", "--figures", "9", "--dry-run"])
    assert result.exit_code == 0, "a dry run needs no profile of the user's"


@pytest.mark.parametrize(
    ("tuned", "how"),
    [
        ((), "by the model"),
        ((1024, 2048), "from halves that tune measured"),
        ((2048,), "1 of 2 from halves that tune measured, the others by the model"),
    ],
)
def test_figure_9_says_how_halves_were_planned_and_judges_them_all(tuned: tuple[int, ...], how: str) -> None:
    lines = [HEADER.replace("label", "command,label")]
    for tokens in (1024, 2048):
        label = f'"{TUNED}"' if tokens in tuned else PLANNED
        us = {
            WHOLE: (0, 100.0),
            EQUAL: (512, 110.0),
            label: (640, 103.0),
            "half@640": (640, 103.0),
            "half@512": (512, 110.0),
        }
        lines += [f"bench ffn,{name},{tokens},{first},{value},8,llama-3.3-70b" for name, (first, value) in us.items()]
    rows = parse("\n".join(lines) + "\n", "here.csv", HERE)
    (figure,) = exhibits("tokenweave", "9")
    drawn = figure.draw(Context(read_published("tokenweave"), rows, None, 2))
    points = {
        name: [
            p.x for line in drawn.series if line.name.startswith(f"{name}, TP8") for p in line.points if p.how == HERE
        ]
        for name in (BY_MODEL, BY_TUNE)
    }
    assert points == {BY_MODEL: [float(t) for t in (1024, 2048) if t not in tuned], BY_TUNE: list(map(float, tuned))}
    (claim,) = drawn.claims
    assert f"the planned halves ({how}) take" in claim.text and claim.holds_here is True
