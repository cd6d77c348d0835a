"""``tw-compile bench vllm`` with an engine that is none: plans, traces, files, processes."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import signal
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from fake_engine import LLM
from rich.console import Console
from typer.testing import CliRunner

from tw_compile import Config
from tw_compile.benchmark.vllm import engine as vllm_engine
from tw_compile.benchmark.vllm import plot as vllm_plot
from tw_compile.benchmark.vllm import run as vllm_run
from tw_compile.benchmark.vllm.results import NO_REFERENCE, as_csv, failures, rows_of
from tw_compile.benchmark.vllm.spec import VARIANTS, VllmSpec, engines, job, traces, traces_of, variants
from tw_compile.benchmark.vllm.table import print_report
from tw_compile.benchmark.vllm.traces import (
    ACCURACY,
    LONGEST,
    SHORTEST,
    TURN,
    Trace,
    accuracy_trace,
    mixed_lengths,
    prompt_tokens,
    turns,
    warm_trace,
)
from tw_compile.cli import common
from tw_compile.cli.app import app
from tw_compile.harness.requests import UsageError
from tw_compile.model_file import preset_names

SPEC = VllmSpec(
    "tiny-llama", 2, "bfloat16", (64, 128), (1, 4), prompts=3, prompt_tokens=20, requests=5, decode_tokens=6
)


def test_variants_differ_in_what_they_say_and_ours_are_options_that_there_are() -> None:
    labels = [one.label for one in variants(SPEC)]
    ours = ["fuse", "fuse-pieces", "fuse+split", "fuse+split-pieces"]
    assert labels == ["off", *ours, "off-nccl", "off-nccl-tree", "reference"]
    for one in VARIANTS:
        assert one.environment["TW_COMPILE"] == str(int(one.kind == "ours"))
        fused = one.arguments.get("compilation_config", {}).get("pass_config", {}).get("fuse_allreduce_rms")
        assert (one.kind == "control") == (fused is False)
        Config(**one.arguments.get("additional_config", {}).get("tw_compile", {}))
    (apart,) = variants(dataclasses.replace(SPEC, only=("fuse-gemms-apart",)))
    assert apart.arguments["additional_config"]["tw_compile"] == {"split": "off", "disable_passes": "join_gemms"}
    with pytest.raises(UsageError, match=r"--only: expected some of off, .*, got 'on'"):
        variants(dataclasses.replace(SPEC, only=("on",)))


def test_an_engine_without_all_reduces_is_timed_and_never_judged(vllm: Path) -> None:
    """Its tokens and log-probabilities are wrong on purpose, so nobody compares them."""
    spec = dataclasses.replace(SMALL, only=("off", "fuse", "no-communication", "reference"), engine={})
    bound = next(one for one in engines(spec, "folder") if one.variant.kind == "bound")
    assert bound.arguments["worker_extension_cls"].endswith("no_communication.WorkerExtension")
    report = ran(spec)
    rows = {(row.label, row.trace): row for row in rows_of(report)}
    assert ("no-communication", ACCURACY) not in rows and ("fuse", ACCURACY) in rows
    own = [row for (label, _), row in rows.items() if label == "no-communication"]
    assert own and all(row.tokens_per_s and row.kind == "bound" for row in own)
    assert {(row.agreement, row.speedup, row.refused) for row in own} == {(None, None, None)}
    assert all(row.speedup for (label, trace), row in rows.items() if label == "fuse" and trace != ACCURACY)
    assert not failures(rows.values()) and printed(report).count("no-communication") > len(own)


def test_a_group_has_the_traces_of_all_its_engines() -> None:
    """Else the reference of a group without vLLM itself would wait for a turn that does not come."""
    spec = dataclasses.replace(SPEC, only=("no-communication", "reference"), chunks=(128,), together=True)
    plan = engines(spec, "folder")
    labels = [trace.label for trace in traces_of(plan)]
    assert labels == [*(trace.label for trace in plan[0].traces), ACCURACY] and plan[1].traces[-1].kind == ACCURACY


def test_engines_with_a_wire_are_beside_the_exact_ones() -> None:
    spec = dataclasses.replace(SPEC, wires=("int8",), peer_access=False)
    own = [one.label for one in variants(spec)]
    assert (
        own[-3:] == ["fuse-int8", "fuse+split-int8", "reference"]
        and own[:5] == [one.label for one in variants(SPEC)][:5]
    )
    split = next(one for one in variants(dataclasses.replace(spec, split="512")) if one.label == "fuse+split-int8")
    options = split.arguments["additional_config"]["tw_compile"]
    assert options == {"split": "512", "wire": "int8", "wire_min_bytes": 2**20} and split.wire == "int8"
    assert split.arguments["disable_custom_all_reduce"] is True
    Config(**options)


def test_codes_have_a_budget_of_their_own_and_no_control(vllm: Path) -> None:
    """Here 1.08x of off's error is allowed to what keeps rows exact, and is not allowed to codes."""
    errors = {"off": 0.01, "fuse": 0.0108}
    only = ("off", "fuse", "fuse-int8", "reference")
    spec = dataclasses.replace(SMALL, world_size=4, wires=("int8",), only=only, engine={"errors": errors})
    report = ran(spec)
    rows = rows_of(report)
    assert {row.label for row in failures(rows)} == {"fuse-int8"}
    assert {row.wire for row in rows if row.label == "fuse-int8"} == {"int8"}
    text = printed(report)
    assert "1.05x is allowed" in text and "1.1x of off's at every chunk size, 1.05x with a wire" in text
    assert text.count("1.080") == 2
    good = rows_of(ran(dataclasses.replace(spec, only=("off", "fuse-int8", "reference"), engine={})))
    assert {row.refused for row in good if row.label == "fuse-int8" and row.trace != ACCURACY} == {None}
    alone = rows_of(ran(dataclasses.replace(spec, only=("off", "fuse-int8"), engine={})))
    assert {row.refused for row in alone if row.kind == "ours"} == {NO_REFERENCE}


def test_an_engine_whose_rows_stay_exact_is_not_one_with_a_wire(vllm: Path) -> None:
    spec = dataclasses.replace(SMALL, wires=("int8",), only=("fuse-int8",), engine={"exact": True})
    assert {row.reason for row in rows_of(ran(spec))} == {"no rows travelled in int8: nothing is fused"}


def test_no_engine_uses_peers_where_they_are_switched_off() -> None:
    spec = dataclasses.replace(SPEC, peer_access=False)
    plan = engines(spec, "folder")
    assert {one.variant.label for one in plan} == {one.label for one in variants(SPEC)} - {"off-nccl"}
    for one in plan:
        assert one.arguments["disable_custom_all_reduce"] is True
        assert one.arguments["compilation_config"]["pass_config"] == {"fuse_allreduce_rms": False}
        assert one.variant.environment["VLLM_ALLREDUCE_USE_SYMM_MEM"] == "0"
        assert one.variant.environment["VLLM_ALLREDUCE_USE_FLASHINFER"] == "0"
        assert one.variant.environment["TW_COMPILE"] == str(int(one.variant.kind == "ours"))
    (reference,) = (one for one in plan if one.variant.kind == "reference")
    assert reference.arguments["compilation_config"]["custom_ops"] == ["none"]
    with pytest.raises(UsageError, match=r"--only: expected some of off, .*, got 'off-nccl'"):
        variants(dataclasses.replace(spec, only=("off-nccl",)))


def test_every_chunk_is_an_engine_and_decode_runs_in_the_largest() -> None:
    plan = engines(SPEC, "folder")
    assert [(one.chunk, one.variant.label) for one in plan[:8]] == [
        (64, "off"), (64, "fuse"), (64, "fuse-pieces"), (64, "fuse+split"), (64, "fuse+split-pieces"), (64, "off-nccl"),
        (64, "off-nccl-tree"), (128, "off"),
    ]  # fmt: skip
    assert [[trace.label for trace in one.traces] for one in (plan[0], plan[7])] == [
        ["prefill", "mixed"], ["prefill", "mixed", "decode-1", "decode-4", "accuracy"],
    ]  # fmt: skip
    only_decode = engines(dataclasses.replace(SPEC, kinds=("decode",)), "folder")
    assert {one.chunk for one in only_decode} == {128}


def test_the_reference_is_started_at_the_largest_chunk_for_its_log_probabilities_alone() -> None:
    plan = engines(SPEC, "folder")
    assert [one.chunk for one in plan if one.variant.kind == "reference"] == [128]
    assert [trace.label for trace in plan[-1].traces] == [ACCURACY]
    assert all((plan[-1].traces[0] in one.traces) == (one.chunk == 128) for one in plan)
    assert plan[-1].arguments["dtype"] == "float32" and plan[0].arguments["dtype"] == "bfloat16"
    without = engines(dataclasses.replace(SPEC, only=("off", "fuse")), "folder")
    assert ACCURACY not in {trace.label for one in without for trace in one.traces}


@pytest.mark.parametrize(
    ("step", "lengths"),
    [(8192, [256] * 32), (1000, [250] * 4), (130, [130]), (513, [171] * 3), (16385, [513] + [512] * 31)],
)
def test_prompts_of_accuracy_fill_one_step(step: int, lengths: list[int]) -> None:
    trace = accuracy_trace(step)
    assert list(trace.prompts) == lengths and set(trace.outputs) == {1}
    spec = dataclasses.replace(SPEC, chunks=(step,), kinds=("prefill",), prompt_tokens=2)
    plan = engines(spec, "folder")
    assert plan[0].arguments["max_model_len"] == max(lengths) + 1
    assert plan[0].arguments["max_num_seqs"] >= len(lengths)


def test_log_probabilities_are_asked_for_once() -> None:
    found = [(number, trace.kind) for number, trace in turns([Trace("prefill", (9,), (1,)), accuracy_trace(9)], 2)]
    assert found == [(0, "prefill"), (0, ACCURACY), (1, "prefill"), (2, "prefill")]


@pytest.mark.parametrize(
    ("longest", "step", "prompt", "output"),
    [(2049, 8192, 128, 16), (129, 8192, 113, 16), (129, 8, 8, 16), (22, 64, 11, 11), (3, 64, 2, 1), (2, 64, 1, 1)],
)
def test_the_request_that_wakes_an_engine_is_one_that_it_takes(
    longest: int, step: int, prompt: int, output: int
) -> None:
    short = Trace("prefill", (1,), (1,))
    assert warm_trace((short, Trace("prefill", (1, longest - 1), (1, 1))), step) == Trace("warm", (prompt,), (output,))


def test_engines_of_a_benchmark_differ_in_nothing_but_the_variant() -> None:
    spec = dataclasses.replace(SPEC, engine={"additional_config": {"other": 1}, "max_num_seqs": 7})
    off, fuse, *_, nccl = [dict(one.arguments) for one in engines(spec, "folder")[:6]]
    assert off["additional_config"] == {"other": 1} and off["max_num_seqs"] == 7
    assert fuse.pop("additional_config") == {"other": 1, "tw_compile": {"split": "off"}}
    del off["additional_config"], nccl["additional_config"]
    assert fuse == off
    without = {"disable_custom_all_reduce": True, "compilation_config": {"pass_config": {"fuse_allreduce_rms": False}}}
    assert nccl == off | without
    assert off["max_model_len"] >= max(trace.longest for trace in traces(spec, 128))


def test_all_prompts_of_decode_fit_into_one_step() -> None:
    spec = dataclasses.replace(SPEC, chunks=(1024,), batches=(1, 64, 1000), kinds=("decode",))
    assert [trace.prompts[0] for trace in traces(spec, 1024)] == [128, 16, 1]
    assert engines(spec, "folder")[0].arguments["max_num_seqs"] == 1000


def test_lengths_and_tokens_are_the_seeds() -> None:
    first, again, other = mixed_lengths(400, 0), mixed_lengths(400, 0), mixed_lengths(400, 1)
    assert first == again != other
    for lengths, median in zip(first, (120, 150), strict=True):
        assert min(lengths) >= SHORTEST and max(lengths) <= LONGEST
        assert 0.8 * median < statistics.median(lengths) < 1.25 * median < statistics.mean(lengths)
    trace = Trace("prefill", (3, 50), (1, 1))
    tokens = prompt_tokens(trace, 10, 0)
    assert [len(one) for one in tokens] == [3, 50] and set(tokens[1]) == set(range(10))
    assert prompt_tokens(trace, 10, 0) == tokens != prompt_tokens(trace, 10, 1)


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of that name, for the processes that are started."""
    (tmp_path / "vllm.py").write_text(LLM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))
    return tmp_path


SMALL = dataclasses.replace(SPEC, chunks=(64,), batches=(4,), repeats=2, only=("off", "fuse", "off-nccl"))
REFERRED = dataclasses.replace(SMALL, only=(*SMALL.only, "reference"))


def ran(spec: VllmSpec, logs: Path | None = None) -> dict[str, Any]:
    return vllm_run.run(spec, lambda what: None, None if logs is None else str(logs))


@pytest.mark.few(1)
@pytest.mark.parametrize("together", [False, True])
def test_engines_are_put_beside_each_other(vllm: Path, tmp_path: Path, together: bool) -> None:
    errors = {"off": 0.01, "fuse": 0.0105, "off-nccl": 0.01}
    spec = dataclasses.replace(REFERRED, together=together, engine={"errors": errors})
    report = json.loads(json.dumps(ran(spec, tmp_path)))
    rows = {(row.label, row.trace): row for row in rows_of(report)}
    assert len(rows) == 13 and not failures(rows.values())
    decode = rows["fuse", "decode"]
    assert decode.speedup == pytest.approx(2.0) and decode.tpot_p50_ms == pytest.approx(5.0)
    assert (decode.agreement, decode.compared) == (1.0, 4 * 6)
    assert (decode.compile_s, decode.peak_bytes) == (1.5, 2**30) and decode.startup_s is not None
    assert rows["fuse", ACCURACY].logprob_error == pytest.approx(0.0105)
    assert rows["fuse", ACCURACY].of_off == pytest.approx(1.05) and rows["reference", ACCURACY].logprob_error is None
    assert [one["lines"] for one in report["engines"]] == [[], ["on, fusing"], [], []]
    assert "tw_compile: on" in (tmp_path / "fuse-64.log").read_text()

    read = list(csv.DictReader(io.StringIO(as_csv(report))))
    assert len(read) == 13 and {line["model"] for line in read} == {"tiny-llama"}
    assert [line["of_off"][:4] for line in read if line["trace"] == ACCURACY] == ["1.0", "1.05", "1.0", ""]
    (line,) = [line for line in read if (line["label"], line["trace"]) == ("fuse", "decode")]
    assert len(decode.rounds) == report["repeats"] and line["rounds"].split()[0] == f"{decode.rounds[0]:.0f}"
    text = printed(report)
    assert "rms error" in text and "0.0105" in text and "1.050" in text and "nothing of rounding with 2 ranks" in text
    assert "2.000x" in text and "PASSED" in text and "log-normal" in text and "fuse, 64: on, fusing" in text
    assert report["together"] == together == ("a machine that all of them load" in text)
    pytest.importorskip("matplotlib")
    vllm_plot.plot(report, str(tmp_path / "plot.svg"))
    drawn = (tmp_path / "plot.svg").read_text()
    assert all(name in drawn for name in ("tokens/s", "speed-up over off", "requests"))


def test_ours_further_from_the_reference_than_off_has_failed(vllm: Path) -> None:
    report = ran(dataclasses.replace(REFERRED, engine={"errors": {"off": 0.01, "fuse": 0.02}}))
    assert {row.label for row in failures(rows_of(report))} == {"fuse"}
    assert "FAILED  fuse, decode at 4: its log-probabilities are 0.02 away" in printed(report)


def test_a_reference_far_from_off_has_failed(vllm: Path) -> None:
    report = ran(dataclasses.replace(REFERRED, engine={"errors": {"reference": 5.0}}))
    assert [row.label for row in failures(rows_of(report))] == ["reference"]
    assert {row.refused for row in rows_of(report) if row.label == "fuse" and row.trace != ACCURACY} == {NO_REFERENCE}


def test_an_engine_that_fails_is_a_row_with_the_reason(vllm: Path) -> None:
    report = ran(dataclasses.replace(SMALL, engine={"broken": True}, only=("off",)))
    rows = rows_of(report)
    assert {row.reason for row in rows} == {"vLLM ended with 1: ValueError: no such engine"}
    assert "FAILED  off, prefill at 64: vLLM ended with 1" in printed(report)


def test_an_engine_that_hangs_is_ended(vllm: Path) -> None:
    report = ran(dataclasses.replace(SMALL, engine={"slow": 60.0}, only=("off",), timeout=2.0))
    assert all(str(row.reason).startswith("not finished after 2 s") for row in rows_of(report))


def told(diary: Path, *kinds: str) -> list[list[str]]:
    """The lines of these kinds."""
    lines = [line.split() for line in diary.read_text().splitlines()]
    return [line for line in lines if line[0] in kinds]


def running(diary: Path) -> set[str]:
    """Which of the processes that the engines were are still there, though they have had time to end."""
    left = {pid for line in told(diary, "left") for pid in line[1:]}
    assert left
    deadline = time.monotonic() + 5
    while left and time.monotonic() < deadline:
        left = {pid for pid in left if _runs(pid)}
        time.sleep(0.05)
    return left


def _runs(pid: str) -> bool:
    try:
        return "State:\tZ" not in Path("/proc", pid, "status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


TOGETHER = dataclasses.replace(SMALL, together=True, kinds=("prefill", "decode"))
PREFILL, DECODE, WARM, ONE_STEP = ["3", "1"], ["4", "6"], ["1", "11"], ["1", "1"]
"""Requests and tokens of each: of TOGETHER's traces, of what wakes an engine before them, of the trace of accuracy."""


def test_engines_together_take_turns_in_an_order_that_alternates(vllm: Path) -> None:
    diary = vllm / "diary"
    ran(dataclasses.replace(TOGETHER, engine={"diary": str(diary)}))
    forth = ["off", "fuse", "off-nccl"]
    warm_up = [[name, *trace] for trace in (PREFILL, DECODE) for name in forth]
    timed = [
        [name, *what]
        for order in (forth[::-1], forth)
        for trace in (PREFILL, DECODE)
        for name in order
        for what in (WARM, trace)
    ]
    runs = warm_up + timed
    assert told(diary, "begin", "end") == [[word, *run] for run in runs for word in ("begin", "end")]
    assert sorted(told(diary, "measure")) == [["measure", name, "0"] for name in ("fuse", "off", "off-nccl")]
    assert len(told(diary, "left")) == 3 and not running(diary)


@pytest.mark.parametrize(("given", "first"), [(None, 21_000), ("30000", 30_000)])
def test_engines_together_choose_ports_apart(
    vllm: Path, given: str | None, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_PORT", raising=False)
    if given is not None:
        monkeypatch.setenv("VLLM_PORT", given)
    ran(dataclasses.replace(TOGETHER, engine={"diary": str(vllm / "diary")}))
    ports = {name: int(port) for _, name, port in told(vllm / "diary", "port")}
    assert ports == {"off": first, "fuse": first + 100, "off-nccl": first + 200}


@pytest.mark.parametrize("given", ["tcp://10.0.0.7:8000", "0", "65536", ""])
def test_a_first_port_that_is_none_is_refused_before_an_engine_starts(
    vllm: Path, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PORT", given)
    with pytest.raises(UsageError, match=f"VLLM_PORT: expected a port, got '{given}'"):
        ran(dataclasses.replace(TOGETHER, engine={"diary": str(vllm / "diary")}))
    assert not (vllm / "diary").exists()


def test_the_reference_takes_its_one_turn_after_the_warm_up(vllm: Path) -> None:
    diary = vllm / "diary"
    ran(dataclasses.replace(TOGETHER, only=("off", "reference"), engine={"diary": str(diary)}))
    warm_up = [["off", *PREFILL], ["off", *DECODE], ["off", *ONE_STEP], ["reference", *ONE_STEP]]
    longer = ["1", "16"]  # prompts of accuracy are
    timed = [["off", *what] for trace in (PREFILL, DECODE) for what in (longer, trace)]
    assert [line[1:] for line in told(diary, "begin")] == [*warm_up, *timed, *timed]


def test_engines_by_themselves_run_all_their_rounds_before_the_next_starts(vllm: Path) -> None:
    diary = vllm / "diary"
    ran(dataclasses.replace(TOGETHER, together=False, engine={"diary": str(diary)}))
    runs = [PREFILL, DECODE, *[WARM, PREFILL, WARM, DECODE] * 2]
    alone = [["left"], *[["begin"]] * len(runs)]
    assert [line[:1] for line in told(diary, "left", "begin")] == alone * 3
    assert [line[1:] for line in told(diary, "end")] == [
        [name, *run] for name in ("off", "fuse", "off-nccl") for run in runs
    ]


def test_what_wakes_an_engine_is_in_none_of_its_times_and_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("vllm")
    exec(LLM, module.__dict__)
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setenv("TW_COMPILE", "0")
    spec = dataclasses.replace(TOGETHER, only=("off", "reference"))
    plan = engines(spec, "folder")[0]
    driver, engine = socket.socketpair()
    with driver, engine:
        driver.sendall(TURN * (2 + len(turns(plan.traces, spec.repeats))))
        found = vllm_engine.run(job(plan, spec, SimpleNamespace(vocab_size=90)), engine)["traces"]
    prefill, decode, accuracy = found
    for one, requests, tokens in ((prefill, 3, 1), (decode, 4, 6)):
        assert [len(answer) for answer in one["tokens"]] == [tokens] * requests
        assert [len(times["first"]) for times in one["rounds"]] == [requests] * spec.repeats
        assert [len(times["between"]) for times in one["rounds"]] == [requests * (tokens > 1)] * spec.repeats
    assert not accuracy["rounds"] and len(accuracy["logprobs"]) == 63


@pytest.mark.full
@pytest.mark.parametrize(
    ("failing", "timeout", "reason"),
    [
        ({"ends": {"fuse": 3}}, 900.0, "vLLM ended with 3"),  # in the request that wakes it
        ({"ends": {"fuse": 4}}, 900.0, "vLLM ended with 3"),
        ({"ends": {"fuse": 4}, "code": 0}, 900.0, "vLLM ended early"),
        ({"hangs": {"fuse": 4}}, 4.0, "not finished after 4 s"),
    ],
)
def test_engines_go_on_without_one_that_fails_in_its_turn(
    vllm: Path, failing: dict[str, Any], timeout: float, reason: str
) -> None:
    (last,) = (failing.get("ends") or failing["hangs"]).values()
    diary = vllm / "diary"
    report = ran(dataclasses.replace(TOGETHER, timeout=timeout, engine={"diary": str(diary)} | failing))
    reasons = {row.label: row.reason for row in rows_of(report)}
    assert str(reasons.pop("fuse")).startswith(reason) and set(reasons.values()) == {None}
    runs = [line[1] for line in told(diary, "begin")]
    assert [runs.count(name) for name in ("off", "fuse", "off-nccl")] == [10, last, 10]
    assert not running(diary)


def test_engines_go_on_without_one_that_does_not_start(vllm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [
        dataclasses.replace(one, arguments={**one.arguments, "broken": True}) if one.label == "off" else one
        for one in VARIANTS
    ]
    monkeypatch.setattr("tw_compile.benchmark.vllm.spec.VARIANTS", broken)
    reasons = {row.label: row.reason for row in rows_of(ran(TOGETHER))}
    assert reasons == {"off": "vLLM ended with 1: ValueError: no such engine", "fuse": None, "off-nccl": None}


def test_nothing_is_left_running_by_a_benchmark_that_is_interrupted(vllm: Path) -> None:
    diary = vllm / "diary"

    def interrupt(what: str) -> None:
        if "round 2" in what:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        vllm_run.run(dataclasses.replace(TOGETHER, engine={"diary": str(diary)}), interrupt)
    assert len(told(diary, "left")) == 3 and not running(diary)


@pytest.mark.parametrize("by_signal", [False, True])
def test_a_benchmark_that_is_interrupted_later_says_what_it_has(vllm: Path, by_signal: bool) -> None:
    diary = vllm / "diary"

    def interrupt(what: str) -> None:
        if "round 3" in what:
            if by_signal:
                os.kill(os.getpid(), signal.SIGTERM)
            raise KeyboardInterrupt

    spec = dataclasses.replace(TOGETHER, chunks=(64, 128), repeats=5, engine={"diary": str(diary)})
    report = json.loads(json.dumps(vllm_run.run(spec, interrupt)))
    shown = printed(report)
    assert "INCOMPLETE  interrupted" in shown and "PASSED" not in shown
    rows = rows_of(report)
    assert {row.reason for row in rows if row.chunk == 64} == {None}
    assert {row.reason for row in rows if row.chunk == 128} == {"interrupted before it was started"}
    assert all(row.tokens_per_s for row in rows if row.chunk == 64)
    prefills = [line[1] for line in told(diary, "begin") if line[2:] == PREFILL]
    assert prefills == ["off", "fuse", "off-nccl", "off-nccl", "fuse", "off"]
    assert not running(diary)


def test_an_engine_ends_when_nobody_gives_it_turns() -> None:
    driver, engine = socket.socketpair()
    with driver, engine:
        driver.shutdown(socket.SHUT_WR)
        with pytest.raises(RuntimeError, match="the benchmark that started this engine has ended"):
            vllm_engine.await_turn(engine)
        assert driver.recv(2) == b"."


def test_engines_together_share_the_memory_unless_told_otherwise() -> None:
    def shares(**given: Any) -> set[float | None]:
        plan = engines(dataclasses.replace(SPEC, **given), "folder")
        return {one.arguments.get("gpu_memory_utilization") for one in plan}

    assert shares() == {None}
    assert shares(together=True) == {0.11}
    assert shares(together=True, only=("off", "fuse", "fuse+split", "off-nccl")) == {0.22}
    assert shares(together=True, engine={"gpu_memory_utilization": 0.3}) == {0.3}


def test_ours_without_the_passes_is_no_measurement(vllm: Path) -> None:
    report = ran(dataclasses.replace(SMALL, engine={"ignored": True}))
    reasons = {row.label: row.reason for row in rows_of(report)}
    assert reasons["fuse"] == "vLLM ran without the passes: on, fusing" and reasons["off"] is None


def test_the_models_configuration_is_written_whole(tmp_path: Path) -> None:
    for name in preset_names():
        vllm_run.write_model(VllmSpec(name, 2, "bfloat16", (64,), (1,), 1, kinds=("decode",)), tmp_path)
        written = json.loads((tmp_path / "config.json").read_text())
        assert written["num_hidden_layers"] == 1 and written["architectures"][0].endswith("ForCausalLM")


def printed(report: dict[str, Any]) -> str:
    text = io.StringIO()
    print_report(Console(file=text, highlight=False), report)
    return text.getvalue()


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "vllm", *arguments])


BAD: Sequence[tuple[tuple[str, ...], str]] = (
    (("--model", "nothing"), "--model nothing: source: expected a preset"),
    (("--model", "tiny-llama", "--layers", "99"), "--layers: expected at most"),
    (("--model", "tiny-llama", "--prompt-tokens", "9999999"), "expected at most"),
    (("--layers", "0"), "--layers: expected a positive number of at most 999999999, got 0"),
    (("--tp", "1"), "--tp: expected 2 to 1024 ranks, got 1"),
    (("--chunks", "64,64"), "--chunks: expected different positive numbers"),
    (("--batches", "x"), "--batches: expected different positive numbers"),
    (
        ("--model", "tiny-llama", "--batches", "9999"),
        "--batches: expected at most 8192, the largest of --chunks, got 9999",
    ),
    (("--traces", "chat"), "--traces: expected some of prefill, mixed, decode, got 'chat'"),
    (("--only", "on"), "--only: expected some of off,"),
    (("--engine", "[1]"), "--engine: expected a JSON object, got '[1]'"),
    (("--engine", "{"), "--engine: expected a JSON object, got '{'"),
    (("--decode-tokens", "1"), "--decode-tokens: expected 2 to 999999999, got 1"),
    (("--repeats", "0"), "--repeats: expected a positive number of at most 999999999, got 0"),
    (("--kv-cache-gib", "0"), "--kv-cache-gib: expected a positive number of at most 1048576, got 0"),
    (("--seed", "-1"), "--seed: expected 0 to 999999999, got -1"),
    (("--split", "half"), "--split: expected auto or a positive number of tokens, got 'half'"),
    (("--split", "٣"), "--split: expected auto or a positive number of tokens, got '٣'"),
    (("--timeout", "0"), "--timeout: expected a positive number of seconds, at most 31536000, got 0"),
    (("--dtype", "int8"), "--dtype: expected one of"),
    (("--logs", "/dev/null/logs"), "--logs: expected a folder that is there or can be made, got '/dev/null/logs'"),
    (("--csv", "/no/such/folder/x.csv"), "--csv: expected a file in a folder that exists"),
    (("--engine", "[]"), "--engine: expected a JSON object, got '[]'"),
    (("--engine", '{"additional_config": {"tw_compile": {"spilt": 1}}}'), "--engine: unknown option tw_compile.spilt"),
    (("--engine", '{"additional_config": {"tw_compile": "on"}}'), "expected options, true or false, got 'on'"),
    (("--plot", "x.gif"), "--plot: expected a file that ends in .png or .svg"),
)


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    result = invoke(*arguments, "--dry-run")
    assert result.exit_code == 2 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert message in result.stderr


def test_without_vllm_or_gpus_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "gpus", lambda: 0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "expected vLLM to be installed" in invoke().stderr
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    result = invoke("--tp", "4")
    assert (result.exit_code, result.stderr) == (2, "error: bench vllm: expected 4 GPUs for --tp 4, got 0\n")


def test_the_command_writes_what_was_asked_for(vllm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "gpus", lambda: 2)
    monkeypatch.syspath_prepend(vllm)
    small = ("--model", "tiny-llama", "--chunks", "64", "--batches", "2", "--requests", "3", "--prompts", "2")
    given = (*small, "--prompt-tokens", "9", "--repeats", "1", "--only", "off,fuse,off-nccl")
    result = invoke(*given, "--csv", str(vllm / "rows.csv"), "--json", str(vllm / "report.json"))
    assert result.exit_code == 0, result.output
    assert "21/21 off-nccl, 64 tokens a step: round 2 of 2, decode-2" in result.stdout
    report = json.loads((vllm / "report.json").read_text())
    assert (report["world_size"], len(report["rows"]), report["versions"]["torch"]) == (2, 9, torch.__version__)
    assert len((vllm / "rows.csv").read_text().splitlines()) == 10
    together = invoke(*given, "--together")
    assert " 1/7 off, fuse, off-nccl, 64 tokens a step: start" in together.stdout
    assert " 7/7 off, fuse, off-nccl, 64 tokens a step: round 2 of 2, decode-2" in together.stdout
    failed = invoke(*given, "--engine", '{"ignored": true}')
    assert failed.exit_code == 1 and "FAILED  fuse, prefill at 64: vLLM ran without the passes" in failed.stdout


def test_a_dry_run_shows_every_start_and_starts_nothing(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    result = invoke("--model", "tiny-llama", "--tp", "4", "--chunks", "256", "--dry-run", "--json", str(file))
    assert result.exit_code == 0, result.output
    assert (
        "8 starts of vLLM with 4 ranks, one after the other" in result.stdout
        and "disable_custom_all_reduce=True" in result.stdout
    )
    assert "decode-64: 64 requests" in result.stdout
    assert len(result.stdout.splitlines()) <= 14 and "about 16 minutes of starts" in result.stdout
    assert all(f"\n{one.label}: " in result.stdout for one in variants(SPEC))
    assert [one["variant"] for one in json.loads(file.read_text())["engines"]] == [one.label for one in variants(SPEC)]
    together = invoke("--model", "tiny-llama", "--chunks", "256", "--together", "--dry-run").stdout
    assert "those of a chunk size at once, taking turns" in together and "gpu_memory_utilization=0.11" in together
