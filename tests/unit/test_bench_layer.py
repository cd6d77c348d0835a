"""``bench layer`` and ``bench model`` without their ranks: variants, graphs, arithmetic, files and refusals."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from typer.testing import CliRunner

from tw_compile import Config, compat
from tw_compile.benchmark import short_kernels
from tw_compile.benchmark.layer import plot as layer_plot
from tw_compile.benchmark.layer import run as layer_run
from tw_compile.benchmark.layer import symmetric
from tw_compile.benchmark.layer.results import LayerRow, as_csv, complete, rows_of, sweeps
from tw_compile.benchmark.layer.spec import LayerSpec, Scope
from tw_compile.benchmark.layer.symmetric import CountAllReduces, DropAllReduces, Slots, UseSymmetricMemory
from tw_compile.benchmark.layer.table import print_report
from tw_compile.benchmark.layer.variants import variants
from tw_compile.cli import common
from tw_compile.cli.app import app
from tw_compile.harness import start
from tw_compile.harness.ranks import one_line
from tw_compile.harness.requests import UsageError
from tw_compile.harness.rows import Outcome
from tw_compile.harness.table import SMOKE_TEST
from tw_compile.kernels.collective.peer_access import SWITCHED_OFF
from tw_compile.kernels.registry import load
from tw_compile.models import reference
from tw_compile.models.reference import reference_forward
from tw_compile.testing import fake_process_group
from tw_compile.testing.capture import capture_graphs

SPEC = LayerSpec("layer", "llama-3.3-70b", 4, "cuda", "bfloat16", (1024, 4096))
MIB = 2**20


def row(
    label: str, kind: str, p50: float | None, tokens: int = 1024, outcome: Outcome = "timed", reason: str | None = None
) -> LayerRow:
    numerics = "failed" if outcome == "numerics failed" else "not checked" if kind == "bound" else "ok"
    times = {} if p50 is None else {"p20_us": 0.9 * p50, "p50_us": p50, "p80_us": 1.2 * p50}
    return LayerRow(label, kind, tokens, tokens * 2**14, outcome, reason, numerics, 8, 8, 1e-3, 1e-4, MIB, **times)


def measured(tokens: int = 1024) -> list[LayerRow]:
    rows = [
        row("fused", "ours", 800.0, tokens),
        row("inductor+nccl", "peer", 1000.0, tokens),
        row("inductor+symm-one-shot", "peer", None, tokens, "not served", "messages too large"),
        row("inductor+symm-two-shot", "peer", 900.0, tokens),
        row("no-communication", "bound", 700.0, tokens),
    ]
    return complete(rows, "cuda")


def report_of(rows: list[LayerRow], device: str = "cuda", scope: str = "layer") -> dict[str, Any]:
    return {
        "command": f"bench {scope}",
        "machine": "x86_64 64 cpus",
        "peer_access": "on",
        "model": "llama-3.3-70b",
        "device": device,
        "device_name": "NVIDIA H200",
        "world_size": 4,
        "dtype": "bfloat16",
        "tokens": [1024, 4096],
        "incomplete": None,
        "batch": 2,
        "layers": 4,
        "repeats": 50,
        "seed": 0,
        "short_kernel_us": [1.23, 1.58] if device == "cuda" else None,
        "environment": {"NCCL_NVLS_ENABLE": "0"},
        "rows": [asdict(one) for one in rows],
        "sweeps": sweeps(rows),
        "versions": {"torch": "2.11.0", "nccl": "2.28.9", "flashinfer": None, "commit": "unknown"},
    }


def printed(report: dict[str, Any]) -> str:
    text = io.StringIO()
    print_report(Console(file=text, highlight=False), report)
    return text.getvalue()


def test_speedup_and_share_hidden_are_against_the_best_unfused_variant() -> None:
    by_label = {one.label: one for one in measured()}
    fused = by_label["fused"]
    assert (fused.speedup, fused.best_peer) == (900 / 800, "inductor+symm-two-shot")
    assert fused.communication_hidden == (900 - 800) / (900 - 700)
    others = [one for one in by_label.values() if one is not fused]
    assert all(one.speedup is None and one.communication_hidden is None for one in others)


def test_wrong_results_have_no_speedup_and_are_nobodys_baseline() -> None:
    wrong = row("inductor+symm-two-shot", "peer", 1.0, outcome="numerics failed")
    unequal = row("fused", "ours", 1.0, outcome="numerics failed")
    rows = complete([unequal, row("split", "ours", 500.0), wrong, row("inductor+nccl", "peer", 1000.0)], "cuda")
    assert (rows[0].speedup, rows[1].speedup, rows[1].best_peer) == (None, 2.0, "inductor+nccl")


def test_nothing_is_hidden_where_communication_costs_nothing() -> None:
    rows = [row("fused", "ours", 90.0), row("inductor+nccl", "peer", 99.0), row("no-communication", "bound", 100.0)]
    fused = complete(rows, "cuda")[0]
    assert (fused.speedup, fused.communication_hidden) == (99 / 90, None)


def test_gloo_ranks_have_no_speedup() -> None:
    rows = complete([row("fused", "ours", 1.0), row("inductor+gloo", "peer", 2.0)], "cpu")
    assert rows[0].speedup is None
    text = printed(report_of(rows, "cpu"))
    assert SMOKE_TEST in text and "2.00x" not in text


def test_who_takes_part() -> None:
    unfused = ["inductor+nccl", "inductor+symm-one-shot", "inductor+symm-two-shot", "no-communication"]
    labels = [one.label for one in variants(SPEC, 1024)]
    assert labels[0] == "fused" and labels[-4:] == unfused
    assert [one.label for one in variants(dataclasses.replace(SPEC, device="cpu"), 1024)][-2:] == [
        "inductor+gloo",
        "no-communication",
    ]
    of_model = dataclasses.replace(SPEC, scope="model")
    assert [one.label for one in variants(of_model, 1024)] == ["fused", "split", "fused+split", *unfused]
    only = dataclasses.replace(SPEC, only=("inductor+nccl", "fused"))
    assert [one.label for one in variants(only, 1024)] == ["fused", "inductor+nccl"]
    with pytest.raises(UsageError, match=r"--only: expected some of fused, .*, got 'fuse'"):
        variants(dataclasses.replace(SPEC, only=("fuse",)), 1024)


@pytest.mark.parametrize("scope", ["layer", "gemm-site", "model"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_a_variant_names_is_there(device: str, scope: Scope) -> None:
    """Variants are listed without torch. So they name what is compiled, and do not hold it."""
    spec = dataclasses.replace(SPEC, scope=scope, device=device, wires=("int8",), prefetch=("off", "64"))
    labels = tuple(one.label for one in variants(spec, 1024))
    requested = ("fused-not-fed", "fused-all-fed", "fused+split@768")
    named = variants(dataclasses.replace(spec, only=(*labels, *requested)), 1024)
    extra = [label for label in requested if label not in labels]
    assert [one.label for one in named] == [*labels, *extra]
    for one in named:
        assert isinstance(load(one.make_pass)(), CountAllReduces)
        assert one.module is None or callable(load(one.module))
    kinds = {one.label: load(one.make_pass)().kind for one in named if "-shot" in one.label}
    assert kinds == ({} if device == "cpu" else {f"inductor+symm-{way}-shot": f"{way}_shot" for way in ("one", "two")})


def test_options_of_ours_are_options_that_there_are() -> None:
    for one in variants(SPEC, 1024):
        Config(**one.config)


def test_variants_with_a_wire_are_beside_the_exact_ones() -> None:
    labels = [one.label for one in variants(dataclasses.replace(SPEC, wires=("int8", "int6")), 1024)]
    exact = [one.label for one in variants(SPEC, 1024)]
    coded = ["fused-int8", "fused+split-int8", "fused-int6", "fused+split-int6"]
    assert [label for label in labels if label not in coded] == exact and labels[5:9] == coded
    only = variants(dataclasses.replace(SPEC, wires=("int8",), only=("fused", "fused+split-int8")), 1024)
    assert [(one.label, one.wire) for one in only] == [("fused", "exact"), ("fused+split-int8", "int8")]
    assert only[1].options(1024, 1) == {"wire": "int8", "wire_min_bytes": 0}
    Config(**only[1].config)


def test_a_wire_is_compared_with_exact_rows() -> None:
    coded = row("fused-int8", "ours", 640.0)
    coded.wire = "int8"
    rows = complete([row("fused", "ours", 800.0), coded, row("inductor+nccl", "peer", 1000.0)], "cuda")
    assert [one.of_exact for one in rows] == [None, 1.25, None]
    assert "fused-int8: 1.250x of fused" in printed(report_of(rows))
    assert complete([row("fused", "ours", 800.0), replace(coded, of_exact=None)], "cpu")[1].of_exact is None


@pytest.mark.parametrize("scope", ["layer", "model"])
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--wire", "int5"], "--wire: expected different ones of exact, int8, int6, got 'int5'"),
        (["--wire", "int8,int8"], "--wire: expected different ones of exact, int8, int6, got 'int8,int8'"),
        (["--wire", "auto"], "--wire: expected different ones of exact, int8, int6, got 'auto'"),
        (["--wire", "exact,int4"], "'int4', which gathers normalised rows in 4 bits"),
        (["--wire", "int8", "--dtype", "float32"], "--wire: expected exact with --dtype float32"),
        (["--wire", "int6", "--model", "gpt-oss-20b"], "the hidden size of gpt-oss-20b, 2880, is no multiple of 128"),
    ],
)
def test_wires_that_a_model_cannot_have_are_refused(scope: str, args: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["bench", scope, "--device", "cpu", *args])
    assert result.exit_code == 2 and words in result.output and result.output.count("\n") == 1


def test_split_only_is_halved_and_the_planned_one_is_not_told_where() -> None:
    by_label = {one.label: one for one in variants(SPEC, 1024)}
    assert by_label["split"].options(1040, 1) == {"fuse": False, "split": "512"}
    assert by_label["split"].options(3 * 63, 3)["split"] == "63"
    assert by_label["split"].options(1, 1)["split"] == "1"
    assert by_label["fused+split"].options(1040, 1) == {}  # what a user gets
    assert by_label["fused+split-all-sms"].options(1040, 1) == {"split_gemm_sms": "off"}
    assert by_label["fused"].options(1040, 1) == {"split": "off"}


@pytest.mark.parametrize(
    ("tokens", "step", "count"), [(128, 128, 0), (1024, 128, 7), (2048, 128, 15), (32768, 2048, 15)]
)
def test_sweep_tries_multiples_of_128(tokens: int, step: int, count: int) -> None:
    spec = dataclasses.replace(SPEC, only=("fused+split",), sweep_split=True)
    first, *swept = variants(spec, tokens)
    assert first.label == "fused+split"
    assert [one.config["split"] for one in swept] == [str(step * (number + 1)) for number in range(count)]


def test_only_may_name_places_of_the_split() -> None:
    spec = dataclasses.replace(SPEC, tokens=(512, 1024), only=("fused", "fused+split@768", "fused+split@128"))
    assert [one.label for one in variants(spec, 1024)] == ["fused", "fused+split@768", "fused+split@128"]
    assert [one.label for one in variants(spec, 512)] == ["fused", "fused+split@128"]
    swept = variants(dataclasses.replace(spec, sweep_split=True), 1024)
    assert [one.label for one in swept].count("fused+split@768") == 1 and len(swept) == 1 + 7
    assert swept[1].options(1024, 1) == {"split": "768"}


@pytest.mark.parametrize("place", ["", "x", "0", "-1", "1024"])
def test_a_place_that_no_prefill_has_is_refused(place: str) -> None:
    label = f"fused+split@{place}"
    with pytest.raises(UsageError, match=f"got '{label}'".replace("+", "[+]")):
        variants(dataclasses.replace(SPEC, tokens=(512, 1024), only=(label,)), 1024)


def test_sweep_holds_the_planned_split_against_the_fastest() -> None:
    rows = [
        row("fused+split", "ours", 102.0),
        row("fused+split@128", "ours", 100.0),
        row("fused+split@256", "ours", 110.0),
    ]
    for one, sizes in zip(rows, ("512 + 512 tokens", "128 + 896 tokens", "256 + 768 tokens"), strict=True):
        one.split = sizes
    (found,) = sweeps([*rows, row("fused+split-all-sms", "ours", 1.0), row("fused+split", "ours", 5.0, 2048)])
    assert found.pop("excess") == pytest.approx(0.02)
    assert found == {
        "tokens": 1024,
        "planned": "512 + 512 tokens",
        "planned_us": 102.0,
        "best": "128 + 896 tokens",
        "best_us": 100.0,
        "compared": 3,
    }
    text = printed(report_of(rows))
    assert "planned, 512 + 512 tokens: 2.0% over the fastest of 3, 128 + 896 tokens" in text
    assert "fused+split@256: 256 + 768 tokens" in text


def test_a_planned_split_is_also_held_against_no_split() -> None:
    planned, whole = row("fused+split", "ours", 105.0), row("fused", "ours", 100.0)
    planned.split = "256 + 256 tokens"
    (found,) = sweeps([planned, whole])
    assert (found["best"], found["compared"]) == ("off", 2)
    assert found["excess"] == pytest.approx(0.05)
    assert "planned, 256 + 256 tokens: 5.0% over the fastest of 2, off" in printed(report_of([planned, whole]))


def test_symmetric_memory_serves_what_torch_has_kernels_for() -> None:
    by_label = {one.label: one for one in variants(SPEC, 1024)}
    one_shot, two_shot = by_label["inductor+symm-one-shot"], by_label["inductor+symm-two-shot"]
    assert one_shot.obstacle(2, 32 * MIB, "bfloat16", 2) is None
    assert "up to 32 MiB" in str(one_shot.obstacle(2, 32 * MIB + 2, "bfloat16", 2))
    assert two_shot.obstacle(2, 512 * MIB, "bfloat16", 2) is None
    assert "bfloat16 and float32 only" in str(two_shot.obstacle(2, 1, "float16", 2))
    assert all(one.obstacle(2, 512 * MIB, "float16", 2) is None for one in by_label.values() if not one.symmetric)


def layer(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """An all_reduce of a matmul, through a view, and one of something else."""
    partial = (x.reshape(-1, 8) @ a).reshape(x.shape)
    dist.all_reduce(partial)
    h = x + partial
    gated = (h @ b).relu()
    dist.all_reduce(gated)
    return h + gated


def graph_of(pass_: Any) -> torch.fx.Graph:
    inputs = (torch.randn(2, 3, 8), torch.randn(8, 8), torch.randn(8, 8))
    with fake_process_group(2):
        (captured,) = capture_graphs(layer, inputs, pass_=pass_, dynamic=False)
    return captured.graph


def calls(graph: torch.fx.Graph) -> Counter[str]:
    return Counter(str(node.target) for node in graph.nodes if "all_reduce" in str(node.target))


def test_graph_with_symmetric_memory_has_matmuls_that_write_there() -> None:
    pass_ = UseSymmetricMemory("two_shot")
    graph = graph_of(pass_)
    found = {"tw_compile_bench.mm_all_reduce.default": 1, "tw_compile_bench.all_reduce.default": 1}
    assert pass_.seen == 2 and calls(graph) == found
    sites = [node.args[-3:] for node in graph.nodes if "tw_compile_bench" in str(node.target)]
    assert [(kind, site) for kind, _, site in sites] == [("two_shot", 0), ("two_shot", 1)]
    assert not [node for node in graph.nodes if "wait_tensor" in str(node.target)]


def test_graph_without_communication_keeps_everything_else() -> None:
    baseline, pass_ = CountAllReduces(), DropAllReduces()
    before, after = graph_of(baseline), graph_of(pass_)
    assert (baseline.seen, pass_.seen) == (2, 2)
    assert calls(after) == {} and calls(before) == {"_c10d_functional.all_reduce_.default": 2}
    assert len(before.nodes) - len(after.nodes) == 4


class _OwnMemory(Slots):
    """Slots of plain memory."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.buffers = {
            (kind, site): (torch.empty(capacity, dtype=torch.uint8), None) for kind in "ab" for site in (0, 1)
        }


def test_operators_write_the_message_to_the_slot_of_their_site(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, str]] = []

    def reduce(slot: torch.Tensor, kind: str, group_name: str) -> torch.Tensor:
        seen.append((slot.data_ptr(), group_name))
        return slot * 2

    slots = _OwnMemory(4 * 8 * 4)
    monkeypatch.setattr(symmetric, "reduce_slot", reduce)
    monkeypatch.setitem(symmetric.slots_of_group, "group", slots)
    a, b, x = torch.randn(4, 3), torch.randn(3, 8), torch.randn(2, 2, 8)
    torch.testing.assert_close(symmetric.mm_all_reduce(a, b, "a", "group", 0), 2 * (a @ b))
    torch.testing.assert_close(symmetric.all_reduce(x, "a", "group", 1), 2 * x)
    assert seen == [(slots.buffers["a", site][0].data_ptr(), "group") for site in (0, 1)]
    with pytest.raises(ValueError, match=r"shape: expected at most 128 bytes, got \[5, 8\]"):
        symmetric.mm_all_reduce(torch.randn(5, 3), b, "a", "group", 0)


def test_a_slot_is_no_larger_than_what_its_kernel_is_tried_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def empty(nbytes: int, device: torch.device) -> torch.Tensor:
        made.append(nbytes)
        return torch.empty(16, dtype=torch.uint8)

    monkeypatch.setattr(compat, "symm_mem_empty", empty)
    monkeypatch.setattr(compat, "symm_mem_rendezvous", lambda buffer, group: (None,))
    ranks: Any = SimpleNamespace(together=lambda work: work(), ctx=SimpleNamespace(group_name="group"))
    slots = Slots(ranks, 64 * MIB)
    for kind in ("one_shot", "two_shot", "one_shot"):
        assert slots.view(kind, 0, (2, 2), torch.empty(0)).shape == (2, 2)
    assert made == [32 * MIB, 64 * MIB]


def test_reason_of_a_compile_that_failed_is_its_cause() -> None:
    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        raise ValueError("not captured\nat all")

    with pytest.raises(compat.BackendCompilerFailed) as failed:
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert one_line(failed.value) == "ValueError: not captured"


@pytest.mark.parametrize("masked", [False, True])
def test_reference_attention_head_by_head_is_the_same(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    query, keys, values = (torch.randn(2, heads, 5, 4, generator=generator).double() for heads in (6, 2, 2))
    mask = torch.randn(2, 1, 5, 5, generator=generator).double() if masked else None

    def attention(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.scaled_dot_product_attention(
            x, keys, values, attn_mask=mask, is_causal=not masked, enable_gqa=True, scale=0.3
        ), x

    whole, _ = reference_forward(attention, query)
    shapes: list[tuple[int, ...]] = []
    real = F.scaled_dot_product_attention
    score_bytes = reference.score_bytes
    monkeypatch.setattr(reference, "MOST_SCORE_BYTES", 0)
    monkeypatch.setattr(reference, "score_bytes", lambda q, k: shapes.append(tuple(q.shape)) or score_bytes(q, k))
    by_heads, _ = reference_forward(attention, query)
    assert real is F.scaled_dot_product_attention and shapes == [(2, 6, 5, 4)]
    torch.testing.assert_close(by_heads, whole, rtol=1e-13, atol=1e-13)


class _Event:
    """Of a device whose replays of 400 kernels take ``milliseconds``, one after the other."""

    milliseconds: Iterator[float]

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: _Event) -> float:
        return next(self.milliseconds)


def test_a_short_kernel_takes_what_the_fastest_replay_says_at_first_and_now(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[int] = []

    def capture(calls: list[Any], count: int) -> Any:
        calls[0]()
        captured.append(count)
        return SimpleNamespace(replay=lambda: None)

    monkeypatch.setattr(short_kernels, "capture", capture)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    replays = [[9.0, 0.48, *[0.5] * 18], [0.64, *[0.66] * 19], [0.6, *[0.7] * 19]]
    monkeypatch.setattr(_Event, "milliseconds", itertools.chain(*replays), raising=False)
    short = short_kernels.ShortKernels(torch.device("cpu"))
    assert short.again() == pytest.approx([1.2, 1.6]) and short.again() == pytest.approx([1.2, 1.5])
    assert captured == [400]


def test_table_names_the_baseline_the_reasons_and_who_failed() -> None:
    text = printed(report_of(measured()))
    assert "a short kernel took 1.23 us at first and 1.58 us at the end" in text
    assert "1.12x" in text and "50%" in text and "8 of 8" in text
    assert (
        "PASSED  ours: error budget, and equal bits on all ranks where every all_reduce is fused, at every size" in text
    )
    assert "1024 tokens in 2 sequences, messages of 16.0 MiB" in text
    assert "against inductor+symm-two-shot, the best unfused here" in text
    assert "inductor+symm-one-shot: messages too large" in text
    assert "us a layer" in text
    assert "us a run" in printed(report_of(measured(), scope="model"))
    assert "us a site" in printed(report_of(measured(), scope="gemm-site"))
    failed = row("fused", "ours", None, outcome="numerics failed", reason="hidden: error 2")
    text = printed(report_of([failed, *measured()[1:]]))
    assert "FAILED  fused at 1024 tokens: numerics failed: hidden: error 2" in text and "PASSED" not in text


def test_what_is_not_fed_or_always_takes_part_where_it_is_named() -> None:
    named = dataclasses.replace(SPEC, only=("fused", "fused-not-fed", "fused-all-fed", "fused-gemms-apart"))
    found = {one.label: Config(**one.config) for one in variants(named, 1024)}
    assert {label: config.feed_mm for label, config in found.items()} == {
        "fused": "auto",
        "fused-gemms-apart": "never",
        "fused-not-fed": "never",
        "fused-all-fed": "always",
    }
    assert {config.split for config in found.values()} == {"off"}
    assert not {"fused-not-fed", "fused-all-fed"} & {one.label for one in variants(SPEC, 1024)}


def test_symmetric_memory_is_left_out_where_peers_are_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TW_COMPILE_PEER_ACCESS", "0")
    known = variants(SPEC, 1024)
    off = {one.label for one in known if one.obstacle(2, 2, "bfloat16", 2) == SWITCHED_OFF}
    assert off == {one.label for one in known if one.symmetric} and len(off) == 2
    assert all(one.obstacle(2, 2, "bfloat16", 2) is None for one in known if one.label not in off)


def test_csv_has_a_line_for_each_row() -> None:
    report = report_of([*measured(), *measured(4096)])
    lines = list(csv.DictReader(io.StringIO(as_csv(report))))
    assert [(line["label"], int(line["tokens"])) for line in lines] == [
        (one.label, one.tokens) for one in rows_of(report)
    ]
    assert {(line["model"], line["layers"], line["torch"]) for line in lines} == {("llama-3.3-70b", "4", "2.11.0")}


@pytest.mark.parametrize("scope", ["layer", "gemm-site", "model"])
def test_plot_is_a_picture(scope: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "layer.svg"
    layer_plot.plot(report_of([*measured(), *measured(4096)], scope=scope), str(file))
    assert "<svg" in file.read_text()


@pytest.mark.parametrize(
    ("args", "named", "came"),
    [
        (["--tokens", "1,1"], "--tokens", "'1,1'"),
        (["--tokens", "8,9", "--batch", "2"], "--tokens", "got 9"),
        (["--batch", "0"], "--batch", "0"),
        (["--layers", "0"], "--layers", "0"),
        (["--layers", "99"], "--layers", "99"),
        (["--model", "llama-9"], "--model llama-9", "'llama-9'"),
        (["--repeats", "3"], "--repeats", "3"),
        (["--seed", "-1"], "--seed", "-1"),
        (["--timeout", "0"], "--timeout", "0"),
        (["--tp", "1"], "--tp", "1"),
        (["--device", "tpu"], "--device", "'tpu'"),
        (["--dtype", "int8"], "--dtype", "'int8'"),
        (["--only", "nobody"], "--only", "'nobody'"),
        (["--csv", "/nowhere/rows.csv"], "--csv", "/nowhere/rows.csv"),
        (["--plot", "layer.gif"], "--plot", "layer.gif"),
    ],
)
@pytest.mark.parametrize("scope", ["layer", "model"])
def test_bad_input_is_one_line(scope: str, args: list[str], named: str, came: str) -> None:
    device = [] if "--device" in args else ["--device", "cpu"]
    result = CliRunner().invoke(app, ["bench", scope, *device, *args])
    lines = result.output.strip().splitlines()
    assert result.exit_code == 2
    assert len(lines) == 1 and named in lines[0] and "expected" in lines[0] and came in lines[0]


def _bench(
    monkeypatch: pytest.MonkeyPatch, rows: list[LayerRow], *args: str, incomplete: str | None = None
) -> tuple[Any, LayerSpec]:
    specs: list[LayerSpec] = []

    def run(spec: LayerSpec, progress: Any) -> dict[str, Any]:
        specs.append(spec)
        for number in range(layer_run.steps(spec)):
            progress(f"step {number}")
        return report_of(rows) | {"incomplete": incomplete}

    monkeypatch.setattr(layer_run, "run", run)
    monkeypatch.setattr(common, "gpus", lambda: 4)
    return CliRunner().invoke(app, ["bench", *args]), specs[0]


def test_exit_code_tells_whether_ours_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    args = ("layer", "--tokens", "1024,4096", "--batch", "2")
    result, spec = _bench(monkeypatch, measured(), *args)
    assert result.exit_code == 0 and "PASSED" in result.output
    steps = 3 + 2 * (2 + len(variants(spec, 1024)))
    assert f"{steps}/{steps} step {steps - 1}" in result.output
    assert (spec.model, spec.world_size, spec.layers, spec.batch) == ("llama-3.3-70b", 4, 4, 2)
    wrong = row("fused", "ours", None, outcome="numerics failed", reason="hidden: not finite")
    assert _bench(monkeypatch, [wrong], *args)[0].exit_code == 1


def test_incomplete_run_writes_its_rows_and_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "rows.csv"
    args = ("layer", "--tokens", "1024,4096", "--csv", str(file))
    result, _ = _bench(monkeypatch, measured(), *args, incomplete="no result after 150 s")
    assert result.exit_code == 1 and "PASSED" not in result.output
    assert "INCOMPLETE  missing 4096 tokens: no result after 150 s" in result.output.splitlines()
    assert len(list(csv.DictReader(file.open()))) == len(measured())


def test_model_is_cut_to_16_layers_at_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    result, spec = _bench(monkeypatch, measured(), "model", "--tp", "2", "--model", "qwen2.5-72b")
    assert result.exit_code == 0 and "PASSED" in result.output
    assert (spec.scope, spec.model, spec.world_size, spec.layers) == ("model", "qwen2.5-72b", 2, 16)
    assert (min(spec.tokens), max(spec.tokens), len(spec.tokens), spec.sweep_split) == (512, 32768, 7, False)


@pytest.mark.parametrize("scope", ["layer", "gemm-site", "model"])
def test_report_says_what_was_asked_for(scope: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"device_name": "d", "hidden_size": 8, "rows": [asdict(one) for one in measured()]}
    monkeypatch.setattr(start, "spawn_ranks", lambda spec, progress, entry: found)
    spec = dataclasses.replace(SPEC, scope=scope, only=("fused", "no-communication"))
    report = layer_run.run(spec, lambda what: None)
    assert report.items() >= (dataclasses.asdict(spec) | found | {"command": f"bench {scope}", "sweeps": []}).items()
    assert report["environment"]["NCCL_NVLS_ENABLE"] == "0"
