"""``tw-compile bench kernel`` without its ranks: arithmetic, choices, files and refusals."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import io
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from typer.testing import CliRunner

from tw_compile import compat
from tw_compile.benchmark import run as bench_run
from tw_compile.benchmark.contender import Contender
from tw_compile.benchmark.contenders import contenders, select
from tw_compile.benchmark.flashinfer_peers import FlashInfer, import_obstacle
from tw_compile.benchmark.ours import Operator
from tw_compile.benchmark.peers import add_rms_norm_
from tw_compile.benchmark.plot import plot
from tw_compile.benchmark.results import Row, as_csv, complete, rows_of
from tw_compile.benchmark.spec import BenchSpec, MessageSize, bounds_us, bus_bytes, input_sets
from tw_compile.benchmark.table import print_report
from tw_compile.benchmark.variants import Variant, check
from tw_compile.cli import bench_common, common
from tw_compile.cli.app import app
from tw_compile.harness import measure, start
from tw_compile.harness import plot as harness_plot
from tw_compile.harness.measure import GraphTimer, LoopTimer, capture, percentiles, round_robin, slowest
from tw_compile.harness.plot import spread
from tw_compile.harness.requests import RankError, UsageError
from tw_compile.harness.rows import Outcome, failures
from tw_compile.harness.table import SMOKE_TEST
from tw_compile.kernels.collective import peer_access
from tw_compile.kernels.collective.peer_access import SWITCHED_OFF
from tw_compile.kernels.collective.transport import get_transport
from tw_compile.kernels.collective.transports import NO_PEER_ACCESS, NO_PEER_ATOMICS

SPEC = BenchSpec(4, "cuda", "bfloat16", (8192,), (16, 64))
MIB = 2**20


def row(
    label: str, kind: str, p50: float | None, tokens: int = 16, outcome: Outcome = "timed", reason: str | None = None
) -> Row:
    numerics = {"timed": "ok", "numerics failed": "failed"}.get(outcome, "not checked")
    times = (None, None, None) if p50 is None else (0.9 * p50, p50, 1.2 * p50)
    nbytes = tokens * 8192 * 2
    return Row(label, kind, tokens, 8192, nbytes, 1, "replicated bfloat16", None, outcome, reason, numerics, *times)


def completed(*rows: Row, tokens: int = 16, spec: BenchSpec = SPEC) -> dict[str, Row]:
    return {one.label: one for one in complete(list(rows), MessageSize(tokens, 8192, "bfloat16"), spec)}


def report_of(rows: list[Row], device: str = "cuda") -> dict[str, Any]:
    return {
        "machine": "x86_64 64 cpus",
        "peer_access": "off",
        "device": device,
        "device_name": "NVIDIA H200",
        "world_size": 4,
        "dtype": "bfloat16",
        "hidden": [8192],
        "tokens": [16, 64],
        "incomplete": None,
        "calls": 20,
        "repeats": 50,
        "rotate_from": MIB,
        "seed": 3,
        "link_gb_per_s": 370.0,
        "through_host": False,
        "environment": {"NCCL_NVLS_ENABLE": "0"},
        "rows": [asdict(one) for one in rows],
        "versions": {"torch": "2.11.0", "triton": "3.6.0", "nccl": "2.28.9", "flashinfer": None, "commit": "unknown"}
        | {"source": "0123456789ab", "date": "2026-11-21"},
    }


def measured(sizes: tuple[int, ...] = (16, 64)) -> list[Row]:
    rows: list[Row] = []
    for tokens in sizes:
        rows += completed(
            row("tw-p2p", "ours", 10.0 + tokens, tokens),
            row("tw-nccl", "ours", None, tokens, "numerics failed", "hidden: rms error 2"),
            row("nccl+norm", "peer", 30.0 + tokens, tokens),
            row("no-communication", "bound", 3.0, tokens),
            tokens=tokens,
        ).values()
    return rows


def printed(report: dict[str, Any]) -> str:
    text = io.StringIO()
    print_report(Console(file=text, highlight=False), report)
    return text.getvalue()


def test_bounds_are_the_bytes_of_the_busiest_link_by_its_speed() -> None:
    assert bus_bytes(370_000, 4) == 1.5 * 370_000
    assert bounds_us(370_000, 4) == {"two-shot-bound": pytest.approx(1.5), "one-shot-bound": pytest.approx(3.0)}
    assert len(set(bounds_us(1 << 20, 2).values())) == 1


def test_small_messages_repeat_one_input_and_larger_ones_displace_it_from_l2() -> None:
    def sets(nbytes: int, calls: int = 20) -> int:
        return input_sets(nbytes, 50 * MIB, calls, MIB)

    assert sets(MIB - 2) == 1
    assert sets(MIB) == 20  # 26 would displace it, but there are only so many calls
    assert sets(MIB, calls=64) == 26
    assert (sets(16 * MIB) - 1) * 2 * 16 >= 50
    assert sets(256 * MIB) == 2
    assert input_sets(256, 50 * MIB, 20, 0) == 20


def test_a_repeat_takes_as_long_as_its_slowest_rank() -> None:
    assert slowest([[1.0, 5.0, 2.0], [3.0, 4.0, 2.5]]) == [3.0, 5.0, 2.5]
    with pytest.raises(ValueError, match="shorter"):
        slowest([[1.0, 2.0], [1.0]])


def test_percentiles_are_the_20th_50th_and_80th() -> None:
    assert percentiles([float(value) for value in range(100, -1, -1)]) == (20.0, 50.0, 80.0)
    assert percentiles([1.0] * 19 + [1000.0]) == (1.0, 1.0, 1.0)


def test_contenders_are_interleaved_and_take_turns_in_beginning() -> None:
    order = list(round_robin(["a", "b", "c"], 4))
    assert [label for _, label in order] == list("abcbcacababc")
    assert [number for number, _ in order] == sorted(list(range(4)) * 3)
    assert list(round_robin([], 4)) == []


def test_a_loop_times_every_call_in_turn() -> None:
    seen: list[str] = []
    empty = torch.empty(0)

    def call(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(name)
        return empty, empty

    assert LoopTimer([lambda: call("a"), lambda: call("b")], 5).run() > 0
    assert seen == list("ababa")


def test_a_launch_is_timed_from_when_the_gpus_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[object] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            order.append("event")

        def synchronize(self) -> None:
            order.append("waited")

        def elapsed_time(self, end: object) -> float:
            return 0.006

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "ones", lambda size, device: None)
    monkeypatch.setattr(compat, "delay_stream", order.append)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op: order.append("met"))
    graph = SimpleNamespace(replay=lambda: order.append("replay"))
    monkeypatch.setattr(measure, "capture", lambda calls, count, at_once: graph)
    assert GraphTimer([], 3).run() == pytest.approx(2.0)
    assert order == [measure.HEAD_START_CYCLES, "met", "event", "replay", "event", "waited"]


def test_call_that_breaks_a_capture_is_the_reason_and_not_the_broken_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def graph(made: object, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        try:
            yield
        finally:
            if len(seen) != 3:
                raise RuntimeError("capture was invalidated")

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(None)
        if len(seen) == fails_at:
            raise KeyError("workspace")
        return torch.empty(0), torch.empty(0)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    seen: list[None] = []
    fails_at = 0
    capture([call], 3)
    assert len(seen) == 3
    seen.clear()
    fails_at = 2
    with pytest.raises(KeyError, match="workspace"):
        capture([call], 3)


def test_speedup_is_against_the_fastest_peer_of_that_size() -> None:
    rows = completed(
        row("tw-p2p", "ours", 20.0), row("slow", "peer", 40.0), row("fast", "peer", 30.0), row("alone", "bound", 1.0)
    )
    assert (rows["tw-p2p"].speedup, rows["tw-p2p"].best_peer) == (1.5, "fast")
    assert rows["fast"].speedup is None and rows["alone"].bus_gb_per_s is None
    assert rows["tw-p2p"].bus_gb_per_s == pytest.approx(1.5 * 16 * 8192 * 2 / 20e-6 / 1e9)
    bound = rows["two-shot-bound"].p50_us
    assert bound is not None and rows["tw-p2p"].share_of_bound == pytest.approx(bound / 20.0)


def test_who_fails_numerics_has_no_speedup_and_is_nobodys_best_peer() -> None:
    broken = row("tw-p2p", "ours", None, outcome="numerics failed", reason="hidden: not finite")
    rows = completed(broken, row("nccl+norm", "peer", 30.0))
    assert (rows["tw-p2p"].speedup, rows["tw-p2p"].p50_us, rows["tw-p2p"].numerics) == (None, None, "failed")
    # Even if a time were there.
    wrong_but_fast = replace(row("fast", "peer", 1.0), outcome="numerics failed", numerics="failed")
    ours_but_wrong = replace(row("tw-nccl", "ours", 1.0), outcome="numerics failed", numerics="failed")
    rows = completed(row("tw-p2p", "ours", 20.0), wrong_but_fast, row("nccl+norm", "peer", 30.0), ours_but_wrong)
    assert (rows["tw-p2p"].best_peer, rows["tw-p2p"].speedup) == ("nccl+norm", 1.5)
    assert rows["tw-nccl"].speedup is None


def test_who_moves_fewer_bytes_than_the_peers_has_no_speedup() -> None:
    ours = replace(row("tw-push-two-shot-fp8", "ours", 20.0), quantises=True)
    found = completed(ours, row("nccl+norm", "peer", 30.0))["tw-push-two-shot-fp8"]
    assert found.speedup is None and found.share_of_bound is not None


def test_without_a_peer_there_is_no_speedup() -> None:
    assert completed(row("tw-p2p", "ours", 20.0))["tw-p2p"].speedup is None


def test_times_on_a_cpu_get_no_claims() -> None:
    spec = replace(SPEC, device="cpu", world_size=2)
    rows = completed(row("tw-gloo", "ours", 20.0), row("gloo+norm", "peer", 40.0), spec=spec)
    assert set(rows) == {"tw-gloo", "gloo+norm"}
    assert rows["tw-gloo"].speedup is None and rows["tw-gloo"].share_of_bound is None
    text = printed(report_of(list(rows.values()), device="cpu"))
    assert SMOKE_TEST in text


def test_only_ours_that_should_have_run_make_the_benchmark_fail() -> None:
    rows = [
        row("tw-p2p", "ours", 20.0),
        row("tw-a", "ours", None, outcome="numerics failed"),
        row("tw-b", "ours", None, outcome="error"),
        row("tw-c", "ours", None, outcome="not served"),
        row("flashinfer-one-shot", "peer", None, outcome="error"),
    ]
    assert [bad.label for bad in failures(rows)] == ["tw-a", "tw-b"]


def test_table_shows_failures_without_a_time_and_names_the_best_peer() -> None:
    text = printed(report_of(measured()))
    (failed, _) = (line.split() for line in text.splitlines() if line.startswith("tw-nccl"))
    assert failed == ["tw-nccl", "-", "-", "-", "-", "-", "-", "replicated", "failed"]
    assert text.count("against nccl+norm, the best peer") == 2
    assert "FAILED  tw-nccl at [16, 8192]: numerics failed: hidden: rms error 2" in text and "PASSED" not in text


def test_csv_has_a_line_a_contender_and_size_with_what_it_was_made_with() -> None:
    rows = measured()
    lines = list(csv.DictReader(io.StringIO(as_csv(report_of(rows)))))
    assert [(line["label"], line["tokens"]) for line in lines] == [(one.label, str(one.tokens)) for one in rows]
    assert len(lines) == 2 * 6 and {line["peer_access"] for line in lines} == {"off"}
    first = lines[0]
    assert (float(first["p50_us"]), first["best_peer"], first["residual_form"]) == (
        26.0,
        "nccl+norm",
        "replicated bfloat16",
    )
    names = ("machine", "device_name", "torch", "triton", "nccl", "flashinfer", "commit", "source", "date", "seed")
    assert [first[name] for name in names] == [
        *(
            "x86_64 64 cpus",
            "NVIDIA H200",
            "2.11.0",
            "3.6.0",
            "2.28.9",
            "",
            "unknown",
            "0123456789ab",
            "2026-11-21",
            "3",
        )
    ]
    assert [line["speedup"] for line in lines if line["numerics"] == "failed"] == ["", ""]


def test_rows_survive_json() -> None:
    rows = measured()
    assert rows_of(json.loads(json.dumps(report_of(rows)))) == rows


@pytest.mark.few(1)
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot_is_written(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / f"plot.{suffix}"
    plot(report_of(measured((1, 16, 64, 256))), str(file))
    content = file.read_bytes()
    assert content.startswith(b"\x89PNG" if suffix == "png" else b"<?xml") and len(content) > 10_000


def test_a_plot_without_bounds_has_labelled_ticks_and_no_empty_panel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    figures: list[Any] = []
    monkeypatch.setattr(harness_plot, "save", lambda figure, path, title: figures.append(figure))
    rows = [replace(row, share_of_bound=None) for row in measured((1, 16, 64)) if row.kind != "bound"]
    for row in rows:
        for name in ("p20_us", "p50_us", "p80_us"):
            if getattr(row, name) is not None:
                setattr(row, name, 200.0 + row.tokens)  # less than a power of ten
    plot(report_of(rows), str(tmp_path / "plot.svg"))
    (figure,) = figures
    (panel,) = figure.axes
    low, high = panel.get_ylim()
    ticks = [tick for tick in panel.yaxis.get_major_ticks() if low <= tick.get_loc() <= high]
    assert ticks and all(tick.label1.get_text() for tick in ticks)
    with pytest.raises(UsageError, match="--plot: expected a report with times"):
        plot(report_of([replace(row, p50_us=None) for row in rows]), str(tmp_path / "plot.svg"))


def test_labels_of_lines_that_end_together_are_spread_in_order_and_stay_inside() -> None:
    assert spread([0.1, 0.9], 0.05) == [0.1, 0.9]
    assert spread([0.5, 0.5, 0.5], 0.1) == pytest.approx([0.4, 0.5, 0.6])
    assert spread([1.0, 0.99, 0.2], 0.1) == pytest.approx([1.0, 0.9, 0.2])
    assert spread([0.5] * 5, 1.0) == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0])


def _variants(made_for: list[int | None]) -> list[Variant]:
    def transport(sms: int | None) -> Any:
        made_for.append(sms)
        return get_transport("gloo")

    return [
        Variant("swept", transport, "p2p", False, sms=8, most_sms=16),
        Variant("fixed", transport, "p2p", False),
    ]


def test_a_sweep_over_sms_is_for_those_that_take_one() -> None:
    made_for: list[int | None] = []
    chosen = select(replace(SPEC, sms=(4, 16, 32)), _variants(made_for))  # "swept" can have 16
    assert [one.label for one in chosen] == ["swept-4sm", "swept-16sm", "fixed"]
    size = MessageSize(1, 8, "bfloat16")
    assert [one.num_sms(size, 2) for one in chosen] == [4, 16, None]
    for one in chosen:
        assert isinstance(one, Operator) and one.transport is one.transport
    assert made_for == [4, 16, None]
    assert select(SPEC, _variants([]))[0].num_sms(size, 2) == 8
    with pytest.raises(UsageError, match="--sms: expected no value"):
        check(replace(SPEC, sms=(4,), only=("nccl+norm", "tw-nccl")))
    with pytest.raises(UsageError, match="--sms: expected 32 or less, as no contender here can have more, got 33,64"):
        check(replace(SPEC, sms=(33, 64), only=("tw-multimem",)))


def test_only_selects_by_label_and_names_what_there_is() -> None:
    assert [one.label for one in contenders(replace(SPEC, only=("nccl+norm", "tw-p2p")))] == ["tw-p2p", "nccl+norm"]
    with pytest.raises(UsageError, match=r"--only: expected some of tw-p2p, .*no-communication, got 'vllm'"):
        contenders(replace(SPEC, only=("vllm",)))


def test_every_contender_of_gpus_says_what_it_does_not_serve() -> None:
    everyone = {one.label: one for one in contenders(replace(SPEC, tokens=(1, 16384)))}
    kinds = {kind: sum(one.kind == kind for one in everyone.values()) for kind in ("ours", "peer", "bound")}
    assert kinds == {"ours": 19, "peer": 6, "bound": 2}

    def obstacle(label: str, tokens: int) -> str | None:
        return everyone[label].obstacle(MessageSize(tokens, 8192, "bfloat16"), 4)

    assert obstacle("symm-one-shot+norm", 2048) is None and "32 MiB" in str(obstacle("symm-one-shot+norm", 2049))
    assert obstacle("symm-two-shot+norm", 16384) is None
    assert obstacle("flashinfer-two-shot", 4) == "needs more tokens than ranks"
    assert "32 MiB" in str(obstacle("flashinfer-one-shot", 32768))
    # Ours choose a kernel when they see the message.
    assert everyone["tw-p2p"].num_sms(MessageSize(4, 8192, "bfloat16"), 4) is None


def test_what_needs_peer_memory_is_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    everyone = contenders(SPEC)
    size = MessageSize(512, 8192, "bfloat16")
    monkeypatch.setenv("TW_COMPILE_PEER_ACCESS", "0")
    off = {one.label for one in everyone if one.obstacle(size, 2) == SWITCHED_OFF}
    others = {"symm-one-shot+norm", "symm-two-shot+norm", "flashinfer-one-shot", "flashinfer-two-shot"}
    assert off >= {"tw-p2p", "tw-stream", "copy-engines+norm", *others}
    assert not off & {"tw-nccl", "nccl+norm", "no-communication"}
    assert all(one.obstacle(size, 2) is None for one in everyone if one.label not in off)
    assert "tw-multimem" in off
    monkeypatch.setenv("TW_COMPILE_PEER_ACCESS", "1")
    assert SWITCHED_OFF not in {one.obstacle(size, 2) for one in everyone}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda gpu, peer: False)
    assert {one.label for one in everyone if one.obstacle(size, 2) == NO_PEER_ACCESS} == off
    monkeypatch.setattr(peer_access, "pair_obstacle", lambda gpu, peer: NO_PEER_ATOMICS)
    without_atomics = {one.label for one in everyone if one.obstacle(size, 2) == NO_PEER_ATOMICS}
    assert off - without_atomics == {"copy-engines+norm", "flashinfer-one-shot", "flashinfer-two-shot"}, (
        "which need none"
    )


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is not None, reason="flashinfer is installed")
def test_flashinfer_that_is_not_installed_is_a_row_with_that_reason() -> None:
    assert "not installed" in str(import_obstacle())
    peer = FlashInfer("flashinfer-one-shot", one_shot=True, most_tokens=16)
    assert peer.obstacle(MessageSize(16, 8192, "bfloat16"), 2) == import_obstacle()


def test_in_place_norm_keeps_repeated_sums_finite() -> None:
    x, residual = torch.randn(3, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    weight = torch.ones(64).bfloat16()
    for _ in range(200):
        x *= 8  # what an all_reduce of 8 equal inputs does
        add_rms_norm_(x, residual, weight)
    assert x.isfinite().all() and 0.9 < float(x.float().square().mean().sqrt()) < 1.1


@pytest.mark.parametrize(
    ("args", "named", "came"),
    [
        (["--device", "tpu"], "--device", "tpu"),
        (["--device", "cpu", "--tp", "1"], "--tp", "1"),
        (["--device", "cpu", "--tp", "0"], "--tp", "0"),
        (["--device", "cpu", "--hidden", "64,64"], "--hidden", "64,64"),
        (["--device", "cpu", "--tokens", "0"], "--tokens", "0"),
        (["--device", "cpu", "--dtype", "int8"], "--dtype", "int8"),
        (["--device", "cpu", "--calls", "0"], "--calls", "0"),
        (["--device", "cpu", "--repeats", "19"], "--repeats", "19"),
        (["--device", "cpu", "--rotate-from", "-1"], "--rotate-from", "-1"),
        (["--device", "cpu", "--seed", "-1"], "--seed", "-1"),
        (["--device", "cpu", "--timeout", "0"], "--timeout", "0"),
        (["--device", "cpu", "--only", "tw-p2p"], "--only", "tw-p2p"),
        (["--device", "cpu", "--sms", "4"], "--sms", "4"),
        (["--device", "cpu", "--sms", "few"], "--sms", "few"),
        (["--wire", "exact,int8,exact"], "--wire", "exact,int8,exact"),
        (["--wire", ""], "--wire", "''"),
        (["--norm", "softmax"], "--norm: expected different ones of rms_norm, layer_norm", "'softmax'"),
        (["--norm", "layer_norm,layer_norm"], "--norm", "layer_norm,layer_norm"),
        (["--norm", "layer_norm", "--wire", "int8"], "--norm: expected rms_norm with rows in codes", "layer_norm"),
        (
            ["--wire", "int8", "--hidden", "256,200"],
            "--wire: expected hidden sizes that are multiples of 128 for int8",
            "200",
        ),
        (
            ["--wire", "exact,int6", "--only", "tw-p2p,nccl+norm"],
            "--wire: expected exact, as no contender of --only",
            "int6",
        ),
        (["--device", "cpu", "--wire", "int8"], "--wire: expected exact, as no contender of --device cpu", "int8"),
        (["--device", "cpu", "--csv", "/no/such/folder/rows.csv"], "--csv", "/no/such/folder"),
        (["--device", "cpu", "--plot", "plot.pdf"], "--plot", "plot.pdf"),
    ],
    ids=" ".join,
)
def test_bad_input_is_one_line_that_names_the_option(args: list[str], named: str, came: str) -> None:
    result = CliRunner().invoke(app, ["bench", "kernel", *args])
    assert result.exit_code == 2
    lines = [line for line in result.output.splitlines() if line.startswith("error: ")]
    start = named if ": " in named else f"{named}: expected"
    assert len(lines) == 1 and lines[0].startswith(f"error: {start}") and came in lines[0]


def test_plot_without_matplotlib_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    result = CliRunner().invoke(app, ["bench", "kernel", "--device", "cpu", "--plot", "plot.png"])
    assert result.exit_code == 2 and "pip install matplotlib" in result.output
    assert "pip install 'tw-compile[plot]'" in result.output


@pytest.mark.parametrize(("gpus", "tp", "ranks"), [(8, None, 8), (3, None, 2), (4, 2, 2)])
def test_ranks_are_the_gpus_that_are_there(
    gpus: int, tp: int | None, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "gpus", lambda: gpus)
    assert bench_common.ranks_here("bench kernel", tp, "cuda") == ranks


def test_too_few_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "gpus", lambda: 1)
    with pytest.raises(UsageError, match="--device: expected cpu"):
        bench_common.ranks_here("bench kernel", None, "cuda")
    monkeypatch.setattr(common, "gpus", lambda: 4)
    with pytest.raises(UsageError, match="--tp: expected at most 4"):
        bench_common.ranks_here("bench kernel", 8, "cuda")


def _bench(monkeypatch: pytest.MonkeyPatch, outcome: dict[str, Any] | Exception, *args: str) -> Any:
    def run(spec: BenchSpec, progress: Any) -> dict[str, Any]:
        for number in range(bench_run.steps(spec)):
            progress(f"step {number}")
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(bench_run, "run", run)
    return CliRunner().invoke(app, ["bench", "kernel", "--device", "cpu", "--tokens", "1,5", *args])


INCOMPLETE = "no result after 150 s; unfinished: rank 0: [64, 8192] timing"


def test_sizes_that_are_missing_are_named_and_nothing_has_passed() -> None:
    gated = replace(row("gated", "ours", 10.0), chosen="tw-p2p")
    report = report_of([gated, *(one for one in measured((16,)) if one.label != "tw-nccl")])
    assert "PASSED" in printed(report) and "gated: no regret" in printed(report)
    text = printed(report | {"incomplete": INCOMPLETE})
    assert text.splitlines()[-1] == f"INCOMPLETE  missing [64, 8192]: {INCOMPLETE}"
    assert "26.0" in text and "PASSED" not in text and "gated: no regret" not in text
    failed = printed(report_of(measured((16,))) | {"incomplete": INCOMPLETE})
    assert "FAILED  tw-nccl" in failed and "INCOMPLETE  missing [64, 8192]" in failed
    late = printed(report_of(measured()) | {"incomplete": "rank 1 died"})
    assert "INCOMPLETE  missing no size: rank 1 died" in late


def test_incomplete_run_writes_its_rows_and_decides_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = {name: tmp_path / f"file.{name}" for name in ("csv", "json", "table", "regret")}
    options = [part for name, file in files.items() for part in (f"--{name}", str(file))]
    timed_row = replace(row("tw-p2p", "ours", 10.0), algorithm="stream", max_sms=8)
    whole = report_of([timed_row])
    assert _bench(monkeypatch, whole, "--gated", *options).exit_code == 0
    assert all(file.is_file() for file in files.values())
    for file in files.values():
        file.unlink()
    result = _bench(monkeypatch, whole | {"incomplete": INCOMPLETE}, "--gated", *options)
    assert result.exit_code == 1 and f"INCOMPLETE  missing [64, 8192]: {INCOMPLETE}" in result.output
    assert [line["p50_us"] for line in csv.DictReader(files["csv"].open())] == ["10.0"]
    assert json.loads(files["json"].read_text())["incomplete"] == INCOMPLETE
    for name in ("table", "regret"):
        assert not files[name].exists()
        assert f"--{name}: '{files[name]}' is not written, as the run is incomplete" in result.output


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_run_keeps_its_rows_and_ends_as_the_signal_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    def spawn(spec: BenchSpec, progress: Any, entry: Any) -> dict[str, Any]:
        try:
            os.kill(os.getpid(), number)
            raise AssertionError("not interrupted")
        except KeyboardInterrupt:
            so_far = {"device_name": "d", "cache_bytes": 1, "rows": [asdict(row("tw-nccl", "ours", 10.0, tokens=1))]}
            raise RankError("interrupted", so_far) from None

    monkeypatch.setattr(start, "spawn_ranks", spawn)
    files = [tmp_path / name for name in ("rows.csv", "report.json")]
    options = ["--tokens", "1,5", "--hidden", "8192", "--csv", str(files[0]), "--json", str(files[1])]
    result = CliRunner().invoke(app, ["bench", "kernel", "--device", "cpu", *options])
    assert result.exit_code == code, result.output
    assert "INCOMPLETE  missing [5, 8192]: interrupted" in result.output
    assert len(list(csv.DictReader(files[0].open()))) == len(json.loads(files[1].read_text())["rows"]) == 1


def test_exit_code_tells_whether_ours_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    good = [one for one in measured() if one.label != "tw-nccl"]
    result = _bench(monkeypatch, report_of(good))
    assert result.exit_code == 0 and "10/10 step 9" in result.output and "PASSED" in result.output
    assert _bench(monkeypatch, report_of(measured())).exit_code == 1


def test_failed_rank_is_named_in_the_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    result = _bench(monkeypatch, RankError("rank 1 failed while [16, 8192] timing: RuntimeError: lost\nTraceback"))
    assert result.exit_code == 1
    assert "error: rank 1 failed while [16, 8192] timing: RuntimeError: lost" in result.output.splitlines()


def test_contender_is_a_complete_interface() -> None:
    class Minimal(Contender):
        label = "minimal"

        def prepare(self, ranks: Any, problem: Any) -> Any:
            raise NotImplementedError

    one, size = Minimal(), MessageSize(1, 8, "float32")
    assert (one.kind, one.obstacle(size, 2), one.num_sms(size, 2)) == ("peer", None, None)
