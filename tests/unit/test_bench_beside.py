"""``tw-compile bench beside`` without its ranks: what is asked, what is refused, and when a row has ratios."""

from __future__ import annotations

import contextlib
import csv
import io
import time
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

from tw_compile.benchmark.beside import sides as sides_module
from tw_compile.benchmark.beside.plot import plot
from tw_compile.benchmark.beside.rank import CallBeside, make_gemms, poison
from tw_compile.benchmark.beside.results import TIMED, BesideRow, as_csv, failures, judge, rows_of
from tw_compile.benchmark.beside.run import run
from tw_compile.benchmark.beside.sides import Alone, AtOnce, Covered, Lane, OnCpu, OnGpu, Watched
from tw_compile.benchmark.beside.spec import (
    FEWEST,
    FILL_US,
    MOST,
    SPARE,
    BesideSpec,
    GemmShape,
    call_variant,
    items_to_cover,
    items_to_time,
    most_steps,
    of_mlp,
    transports,
    usual_sms,
)
from tw_compile.benchmark.beside.table import print_report
from tw_compile.cli.app import app
from tw_compile.cli.bench_beside import gemm_shapes
from tw_compile.harness.requests import UsageError

SHAPES = "--gemm: expected shapes KxN or KxN+N of positive numbers, separated by commas"
SPEC = BesideSpec(2, "cuda", "bfloat16", (4096, 8192), (1024, 4096))
ALONE = {"gemm": 100.0, "gemm_leaving": 104.0, "call": 50.0}


def row(gemm_beside: float = 107.0, call_beside: float = 56.0, **changes: Any) -> BesideRow:
    """A row whose every part has been timed and covered."""
    made = BesideRow(1024, 8192, 2**24, "host", 8, 8192, 28672, False, kernel="host_two_shot", call_sms=8)
    medians = ALONE | {"gemm_beside": gemm_beside, "call_beside": call_beside}
    made.take({timed: [0.9 * us, us, us, us, 1.1 * us] for timed, us in medians.items()})
    evidence = {
        "call_lead_us": 60.0,
        "call_tail_us": 30.0,
        "gemm_lead_us": 110.0,
        "gemm_tail_us": 25.0,
        "covered": True,
    }
    return replace(made, residual_form="sharded bfloat16", **(evidence | changes))


def report_of(*rows: BesideRow, device: str = "cuda", incomplete: str | None = None) -> dict[str, Any]:
    return {
        "machine": "x86_64 64 cpus",
        "peer_access": "off",
        "device": device,
        "device_name": "NVIDIA H100 80GB HBM3",
        "world_size": 2,
        "dtype": "bfloat16",
        "hidden": [8192],
        "tokens": [1024, 4096],
        "repeats": 50,
        "seed": 0,
        "gemm_at_most": 1.05,
        "call_at_most": 1.15,
        "incomplete": incomplete,
        "environment": {"NCCL_P2P_DISABLE": "1"},
        "rows": [asdict(one) for one in rows],
        "versions": {"torch": "2.11.0", "nccl": "2.28.9", "commit": "abc", "date": "2026-11-27"},
    }


def printed(report: dict[str, Any]) -> str:
    text = io.StringIO()
    print_report(Console(file=text, highlight=False), report)
    return " ".join(text.getvalue().split())


def test_factors_compare_each_side_with_itself_alone() -> None:
    judged = judge(row(), None, "cuda")
    assert judged.numerics == "ok" and judged.reason is None
    assert judged.gemm_factor == pytest.approx(107 / 104) and judged.gemm_factor_of_all_sms == pytest.approx(1.07)
    assert judged.call_factor == pytest.approx(1.12) and judged.within is True
    assert judged.span("gemm_leaving")[1] == 104.0 and judged.span("call")[0] < 50.0 < judged.span("call")[2]


@pytest.mark.parametrize(
    ("gemm_beside", "call_beside", "within"),
    [(109.0, 57.0, True), (109.5, 57.0, False), (109.0, 58.0, False)],
)
def test_what_is_asked_holds_for_both_sides(gemm_beside: float, call_beside: float, within: bool) -> None:
    assert judge(row(gemm_beside, call_beside), None, "cuda").within is within


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"call_tail_us": -12.25},
            "no ratio: in a run the GEMMs ended 12.2 us before the calls that were timed beside them",
        ),
        (
            {"gemm_tail_us": -3.0},
            "no ratio: in a run the calls ended 3.0 us before the GEMMs that were timed beside them",
        ),
        ({"gemm_lead_us": 1.0}, "no ratio: in a run what was timed may have begun before the other side went on"),
    ],
)
def test_a_side_that_was_idle_means_no_ratio(changes: dict[str, float], said: str) -> None:
    judged = judge(row(covered=False, **changes), None, "cuda")
    assert judged.reason == said and judged.numerics == "ok"
    assert (judged.gemm_factor, judged.gemm_factor_of_all_sms, judged.call_factor, judged.within) == (None,) * 4
    assert failures([judged], "cuda") == [judged] and failures([judged], "cpu") == []
    text = printed(report_of(judged))
    assert f"FAILED 1024 tokens x 8192, 16.0 MiB, over host on 8 SMs; GEMM [1024, 8192] x [8192, 28672]: {said}" in text
    assert "1.0" in text and "x of all SMs" not in text and "what is asked" not in text


def test_wrong_results_mean_no_ratio() -> None:
    judged = judge(row(), "rank 1: hidden: rms error 2", "cuda")
    assert (judged.outcome, judged.numerics) == ("numerics failed", "failed")
    assert (judged.gemm_factor, judged.call_factor, judged.within) == (None, None, None)
    assert failures([judged], "cpu") == [judged]
    assert "PASSED" not in printed(report_of(judged))


def test_a_report_of_which_nothing_ran_has_failed() -> None:
    unserved = BesideRow(
        1024, 8192, 2**24, "p2p", 16, 8192, 28672, False, outcome="not served", reason="no peer access"
    )
    assert failures([unserved], "cuda") == [unserved]
    assert "PASSED" not in printed(report_of(unserved)) and "no peer access" in printed(report_of(unserved))
    assert failures([unserved, judge(row(), None, "cuda")], "cuda") == []


def test_a_cpu_gives_no_ratio() -> None:
    judged = judge(row(), None, "cpu")
    assert judged.numerics == "ok" and judged.reason is None and judged.gemm_factor is None
    text = printed(report_of(judged, device="cpu"))
    assert "say nothing about speed, so there are no ratios" in text and "PASSED" in text


def test_the_report_says_factors_and_what_is_missing() -> None:
    text = printed(report_of(judge(row(), None, "cuda")))
    assert "1.029x, 1.070x of all SMs" in text and "1.120x" in text
    assert "within what is asked: GEMM at most 1.05x, call at most 1.15x" in text
    assert "host_two_shot on 8 SMs, residual sharded bfloat16" in text and "NCCL_P2P_DISABLE=1; NCCL 2.28.9" in text
    assert "PASSED results of calls and GEMMs are right" in text
    assert "NOT within what is asked" in printed(report_of(judge(row(call_beside=90.0), None, "cuda")))
    text = printed(report_of(judge(row(), None, "cuda"), incomplete="rank 1 died"))
    assert "INCOMPLETE missing [4096, 8192]: rank 1 died" in text and "PASSED" not in text


def test_csv_has_a_line_for_each_row_with_versions_and_peer_access() -> None:
    report = report_of(
        judge(row(), None, "cuda"), BesideRow(4096, 8192, 2**26, "p2p", 16, 8192, 28672, False, outcome="not served")
    )
    first, second = csv.DictReader(io.StringIO(as_csv(report)))
    assert (first["machine"], first["peer_access"], first["commit"]) == ("x86_64 64 cpus", "off", "abc")
    assert float(first["call_factor"]) == pytest.approx(1.12) and float(first["gemm_leaving_p50_us"]) == 104.0
    assert second["outcome"] == "not served" and second["call_factor"] == "" and second["sms"] == "16"
    assert [asdict(one) for one in rows_of(report)] == report["rows"]


def test_the_picture_has_all_rows_with_times(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "beside.svg"
    rows = [judge(row(tokens=tokens), None, "cuda") for tokens in (1024, 4096, 8192, 16384)]
    plot(report_of(*rows, BesideRow(1, 8192, 2**14, "p2p", 16, 8192, 28672, False, outcome="error")), str(file))
    assert file.stat().st_size > 10_000
    with pytest.raises(UsageError, match="without any"):
        plot(report_of(), str(file))


def test_the_default_gemms_are_those_of_an_mlp_of_a_rank() -> None:
    assert of_mlp(8192, 2) == (GemmShape(8192, 28672 // 2, gated=True), GemmShape(28672 // 2, 8192))
    assert of_mlp(4096, 4)[0] == GemmShape(4096, 14336 // 4, gated=True)
    assert of_mlp(8192, 3)[0].columns % 8 == 0 and of_mlp(8, 16)[0] == GemmShape(8, 8, gated=True)
    assert SPEC.gemms_of(4096) == of_mlp(4096, 2)
    assert replace(SPEC, gemms=(GemmShape(64, 32),)).gemms_of(4096) == (GemmShape(64, 32),)
    assert (str(GemmShape(64, 32)), str(GemmShape(64, 32, gated=True))) == ("64x32", "64x32+32")
    assert gemm_shapes("64x32+32, 32x64") == (GemmShape(64, 32, gated=True), GemmShape(32, 64))


def test_a_call_has_the_form_and_the_sms_of_a_split_layer() -> None:
    assert transports("cuda") == ("p2p", "host") and transports("cpu") == ("gloo",)
    assert (usual_sms("host"), usual_sms("p2p"), usual_sms("gloo")) == ((4, 8), (16,), (8,))
    assert SPEC.sms_of("host") == (4, 8) and replace(SPEC, sms=(4, 12)).sms_of("host") == (4, 12)
    assert call_variant("cuda", "p2p").in_slot and not call_variant("cuda", "host").in_slot
    over_host = CallBeside("cuda", "host", 8)
    assert (over_host.residual_sharded, over_host.residual_narrow, over_host.kind) == (True, True, "ours")
    over_host._algorithm = SimpleNamespace(sms=lambda tokens, world_size: 16, name="host_two_shot")  # type: ignore[assignment]
    size = SPEC.sizes()[0]
    assert over_host.taken_sms(size, 2) == 8 and over_host.kernel_name() == "host_two_shot"
    assert CallBeside("cpu", "gloo", 8).taken_sms(size, 2) is None


def test_as_many_items_are_timed_as_fill_the_time_and_more_cover_them() -> None:
    assert (items_to_time(1e6), items_to_time(FILL_US / 10), items_to_time(0.5)) == (FEWEST, 10, MOST)
    for covered_us, item_us in ((5000.0, 440.0), (28000.0, 11500.0), (44000.0, 60.0)):
        assert items_to_cover(covered_us, item_us) * item_us > SPARE * covered_us


def test_sizes_and_steps_follow_from_the_request() -> None:
    assert [(size.tokens, size.hidden) for size in SPEC.sizes()] == [
        (1024, 4096), (4096, 4096), (1024, 8192), (4096, 8192)
    ]  # fmt: skip
    one = replace(SPEC, sms=(8,))
    assert most_steps(one) == 2 + 4 * (1 + 2 * (1 + 2)), "calls and copies, beside gate and up, and down"
    assert most_steps(SPEC) == most_steps(replace(SPEC, sms=(4, 8))), "as many numbers of SMs as over host"
    wide = replace(SPEC, sms=(4, 8), transports=("p2p", "host"), gemms=(GemmShape(8, 8), GemmShape(8, 16)))
    assert most_steps(wide) == 2 + 4 * (1 + 8 * (1 + 2))


def test_a_run_counts_only_between_the_other_sides_begin_and_end() -> None:
    assert Covered(1.0, 20.0, 5.0, 5.0).whole
    assert not Covered(1.0, 20.0, -0.1, 5.0).whole and not Covered(1.0, 20.0, 0.0, 5.0).whole
    assert not Covered(1.0, 4.0, 5.0, 5.0).whole


order: list[str] = []


class Event:
    """An event that notes who records it and waits for it."""

    made = 0

    def __init__(self, enable_timing: bool = False) -> None:
        Event.made += 1
        self.number = Event.made

    def record(self) -> None:
        order.append(f"{Stream.current} records {self.number}")

    def wait(self) -> None:
        order.append(f"{Stream.current} waits for {self.number}")

    def synchronize(self) -> None:
        order.append(f"host waits for {self.number}")

    def elapsed_time(self, other: Event) -> float:
        return float(other.number - self.number)


class Stream:
    current = "main"


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[OnGpu]:
    """``OnGpu`` whose streams and events say in which order they are used."""

    @contextlib.contextmanager
    def on(stream: str) -> Iterator[None]:
        Stream.current = stream
        yield
        Stream.current = "main"

    order.clear()
    Event.made = 0
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", on)
    streams = iter(("covering", "own"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: next(streams))
    monkeypatch.setattr(torch, "ones", lambda size, device: "one")
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op: order.append("ranks meet"))
    monkeypatch.setattr(sides_module.compat, "delay_stream", lambda cycles: None)
    monkeypatch.setattr(
        sides_module,
        "capture",
        lambda calls, count: SimpleNamespace(replay=lambda: order.append(f"{count} on {Stream.current}")),
    )
    yield OnGpu()


def of(sides: OnGpu, count: int) -> Lane:
    return sides.lane([lambda: None], count)


def test_the_covering_side_begins_first_and_its_end_is_measured(on_gpu: OnGpu) -> None:
    covered = on_gpu.both(of(on_gpu, 7), of(on_gpu, 3))
    assert order == [
        "ranks meet", "main records 1",
        "covering waits for 1", "1 on covering", "covering records 2", "7 on covering", "covering records 3",
        "own waits for 2", "1 on own", "own records 4", "3 on own", "own records 5",
        "host waits for 5", "host waits for 3",
    ]  # fmt: skip
    assert covered == Covered(1e3 / 3, (4 - 2) * 1e3, (3 - 5) * 1e3, 5.0) and not covered.whole


def test_a_lane_alone_runs_as_beside_the_other(on_gpu: OnGpu) -> None:
    assert Alone(on_gpu, of(on_gpu, 4)).run() == 250.0
    assert order == [
        "ranks meet", "main records 1",
        "own waits for 1", "1 on own", "own records 2", "4 on own", "own records 3", "host waits for 3",
    ]  # fmt: skip


def test_on_a_cpu_both_sides_really_run_at_once() -> None:
    sides, done = OnCpu(), []

    def nap() -> None:
        time.sleep(0.001)
        done.append(torch.is_grad_enabled())

    slow = sides.lane([nap], 50)
    timer = AtOnce(sides, slow, sides.lane([lambda: None], 3))
    assert timer.run() >= 0.0 and len(done) == 51 and not any(done)
    assert timer.runs[0].whole
    timer = AtOnce(sides, sides.lane([lambda: None], 3), slow)
    timer.run()
    assert timer.runs[0].tail_us < 0.0 and not timer.runs[0].whole


def test_an_error_of_the_covering_side_is_raised() -> None:
    def broken() -> None:
        raise RuntimeError("lost")

    sides = OnCpu()
    with pytest.raises(RuntimeError, match="lost"):
        sides.both(sides.lane([broken], 2), sides.lane([lambda: None], 2))


def test_results_are_watched_and_poisoned() -> None:
    results = iter([(torch.zeros(2), torch.zeros(1)), (torch.ones(2), torch.ones(1))])
    watched = Watched(lambda: next(results))
    watched(), watched()
    hidden, residual = watched.result  # type: ignore[misc]
    assert hidden.tolist() == [1.0, 1.0]
    product = torch.ones(2)
    poison(watched.result, product)
    assert all(tensor.isnan().all() for tensor in (hidden, residual, product))


def test_gemms_take_turns_with_more_weights_than_the_cache_holds() -> None:
    x = torch.ones(3, 16, dtype=torch.bfloat16)
    gemms = make_gemms(GemmShape(16, 32), x, 5 * 16 * 32 * 2)
    assert len(gemms.weights) == 6 and len({one.data_ptr() for (one,) in gemms.weights}) == 6
    assert len(make_gemms(GemmShape(16, 32), x, 100).weights) == 1
    first, second, *_ = (multiply() for multiply in gemms.leaving(2))
    assert first.shape == (3, 32) and torch.equal(first, second)  # type: ignore[attr-defined]
    assert gemms.deviation(first) is None
    assert "off by" in str(gemms.deviation(first + 1))  # type: ignore[operator]
    assert "off by nan" in str(gemms.deviation(torch.full_like(first, float("nan"))))  # type: ignore[call-overload]


def test_gate_and_up_are_multiplied_as_in_a_split_layer() -> None:
    x = torch.ones(3, 16, dtype=torch.bfloat16)
    gemms = make_gemms(GemmShape(16, 32, gated=True), x, 5 * 2 * 16 * 32 * 2)
    assert len(gemms.weights) == 6 and len({one.data_ptr() for pair in gemms.weights for one in pair}) == 12
    first, *_ = (multiply() for multiply in gemms.leaving(2))
    gate, up = (torch.mm(gemms.a, one.t()) for one in gemms.weights[0])
    assert torch.equal(first, torch.nn.functional.silu(gate) * up)  # type: ignore[arg-type]
    assert gemms.deviation(first) is None and "off by" in str(gemms.deviation(gate))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gemm", "64"], f"{SHAPES}, got '64'"),
        (["--gemm", "64+8"], f"{SHAPES}, got '64+8'"),
        (["--gemm", "64x0"], f"{SHAPES}, got '64x0'"),
        (["--gemm", "64x0+8"], f"{SHAPES}, got '64x0+8'"),
        (["--gemm", "8x8,8x8"], "--gemm: expected different shapes, got '8x8,8x8'"),
        (["--sms", "0"], "--sms: expected different positive numbers, separated by commas, got '0'"),
        (["--sms", "8,33"], "--sms: expected at most 32, the most that a call beside work has, got 33"),
        (
            ["--transport", "nccl"],
            "--transport: expected different ones of auto, p2p, host with --device cuda, got 'nccl'",
        ),
        (["--transport", "host,host"], "--transport: expected different ones of auto, p2p, host with --device cuda"),
        (
            ["--device", "cpu", "--transport", "host"],
            "--transport: expected different ones of auto, gloo with --device cpu",
        ),
        (["--hidden", "none"], "--hidden: expected different positive numbers, separated by commas, got 'none'"),
        (["--tokens", "-1"], "--tokens: expected different positive numbers, separated by commas, got '-1'"),
        (["--repeats", "5"], "--repeats: expected 20 to "),
        (["--dtype", "int8"], "--dtype: expected one of bfloat16, float16, float32, got 'int8'"),
        (["--device", "tpu"], "--device: expected one of cuda, cpu, got 'tpu'"),
        (["--plot", "rows.txt"], "--plot: expected a file that ends in .png or .svg, got 'rows.txt'"),
        (["--device", "cpu", "--tp", "1"], "--tp: expected at least 2 ranks, got 1"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["bench", "beside", *arguments])
    assert result.exit_code == 2 and said in " ".join(result.output.split()), result.output


def test_a_spec_is_checked_before_ranks_start() -> None:
    with pytest.raises(UsageError, match="--sms: expected at most 32"):
        run(replace(SPEC, sms=(64,)), lambda what: None)


def test_all_times_have_fields() -> None:
    names = set(BesideRow.__dataclass_fields__)
    assert {f"{timed}_{part}_us" for timed in TIMED for part in ("p20", "p50", "p80")} <= names
