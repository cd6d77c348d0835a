"""``bench layer`` and ``bench model`` on gloo ranks, and variants that fail on one rank or compute nonsense."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from reference import assert_keys_are_listed
from typer.testing import CliRunner

from tw_compile import compat
from tw_compile.benchmark.layer import worker
from tw_compile.benchmark.layer.spec import LayerSpec, Scope
from tw_compile.benchmark.layer.subject import CompiledRun, HiddenAndResidual, Subject
from tw_compile.benchmark.layer.subjects import build_subject
from tw_compile.benchmark.layer.variants import LayerVariant, with_wires
from tw_compile.benchmark.layer.worker import TokensReference, VariantAtTokens, bench_tokens
from tw_compile.cli.app import app
from tw_compile.harness.problems import Context
from tw_compile.harness.ranks import Ranks
from tw_compile.kernels.collective.codes import decode
from tw_compile.kernels.transports import wire_rows
from tw_compile.report import GraphReport, Site
from tw_compile.testing import GlooRanks

SPEC = LayerSpec("layer", "tiny-llama", 2, "cpu", "bfloat16", (6,), batch=2, layers=1, repeats=20)


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("scope", "all_reduces"), [("layer", 2), ("gemm-site", 1), ("model", 3)])
def test_smoke_test_on_gloo_ranks(scope: str, all_reduces: int, tmp_path: Path) -> None:
    files = {name: tmp_path / f"rows.{name}" for name in ("csv", "json")}
    args = ["--device", "cpu", "--repeats", "20", "--only", "fused,no-communication"]
    args += [part for name, file in files.items() for part in (f"--{name}", str(file))]
    result = CliRunner().invoke(app, ["bench", scope, *args])
    assert result.exit_code == 0, result.output
    assert "say nothing about speed" in result.output and "PASSED" in result.output
    assert "7/7 8 tokens: timing" in result.output
    report = json.loads(files["json"].read_text())
    assert_keys_are_listed("bench layer", report)
    assert (report["command"], report["world_size"], report["layers"]) == (f"bench {scope}", 2, 1)
    assert (report["tokens"], report["hidden_size"]) == ([8], 512)
    fused, alone = report["rows"]
    assert (fused["label"], fused["numerics"]) == ("fused", "ok")
    assert fused["all_reduces"] == fused["fused"] == all_reduces  # a model's first is the embedding's
    assert (alone["label"], alone["all_reduces"], alone["numerics"]) == ("no-communication", all_reduces, "not checked")
    assert all(0 < row["p20_us"] <= row["p50_us"] <= row["p80_us"] for row in report["rows"])
    assert fused["speedup"] is None and 1e-4 < fused["hidden_error"] < 1e-1
    lines = list(csv.DictReader(files["csv"].open()))
    assert [float(line["p50_us"]) for line in lines] == [row["p50_us"] for row in report["rows"]]


def _on_ranks(rank: int, check: Callable[[Ranks], Any]) -> Any:
    world = dist.group.WORLD
    assert world is not None
    with torch.no_grad():
        return check(Ranks(Context(rank, 2, torch.device("cpu"), compat.group_name(world)), world))


OURS = {"ours fused unequal": 2, "ours partly fused unequal": 1, "ours unfused unequal": 0}
LABELS = ("raises", "wrong", "unequal", "wrong later", "not finite", "no graph", "good", *OURS)


def _instead_of_compiling(rank: int) -> Callable[..., tuple[CompiledRun, int]]:
    def compiled(variant: LayerVariant, subject: Subject, inputs: torch.Tensor) -> tuple[CompiledRun, int]:
        label, runs = variant.label, iter(range(1000))

        def forward(x: torch.Tensor) -> HiddenAndResidual:
            hidden, h = subject(x)
            is_bad = rank == 1 and (label != "wrong later" or next(runs) > 5)
            if is_bad and label == "raises":
                raise RuntimeError("lost\nwith all its hands")
            if is_bad and label in ("wrong", "wrong later"):
                hidden[-1, -1, -1] += 10
            if is_bad and label.endswith("unequal"):
                hidden[-1, -1, -1] *= 1 + 2**-7
            if is_bad and label == "not finite":
                h[0, 0, 0] = float("nan")
            return hidden, h

        run = CompiledRun(forward, inputs)
        run()
        return run, 0 if label == "no graph" else 2

    return compiled


def _bench_broken(ranks: Ranks, scope: Scope) -> list[dict[str, Any]]:
    spec = replace(SPEC, scope=scope)
    subject = build_subject(spec, torch.device("cpu"))
    everyone = [LayerVariant(label, "ours" if label in OURS else "peer") for label in LABELS]
    deviation = worker.deviation_of

    def deviation_of_peers(ranks: Ranks, entry: VariantAtTokens, reports: list[GraphReport]) -> str | None:
        if entry.variant.kind == "peer":
            return deviation(ranks, entry, reports)
        entry.row.fused = OURS[entry.variant.label]
        return None

    with (
        mock.patch.object(worker, "compile_variant", _instead_of_compiling(ranks.ctx.rank)),
        mock.patch.object(worker, "deviation_of", deviation_of_peers),
    ):
        (reference,) = worker.references_of(spec, ranks, subject, lambda what: None)
        rows = bench_tokens(spec, ranks, everyone, subject, reference, lambda what: None)
    return [vars(row) for row in rows]


@pytest.mark.full
@pytest.mark.parametrize("scope", ["layer", "model"])
def test_variant_that_is_not_good_enough_has_its_reason_and_no_time(gloo_ranks: GlooRanks, scope: Scope) -> None:
    results = gloo_ranks.run(_on_ranks, partial(_bench_broken, scope=scope))
    assert results[0] == results[1]
    rows = {row["label"]: row for row in results[0]}
    outcomes = {label: (row["outcome"], row["numerics"], row["p50_us"] is not None) for label, row in rows.items()}
    failed = ("numerics failed", "failed", False)
    assert outcomes == {
        "raises": ("error", "not checked", False),
        "wrong": failed,
        "unequal": ("timed", "ok", True),
        "ours fused unequal": failed,
        "ours partly fused unequal": ("timed", "ok", True),
        "ours unfused unequal": ("timed", "ok", True),
        "wrong later": failed,
        "not finite": failed,
        "no graph": ("error", "not checked", False),
        "good": ("timed", "ok", True),
    }
    assert rows["raises"]["reason"] == "rank 1: RuntimeError: lost"
    assert rows["wrong"]["reason"].startswith("hidden: error ")
    for label in ("unequal", "ours partly fused unequal", "ours unfused unequal"):
        assert "within budget, but rank 1: hidden: differs from rank 0" in rows[label]["reason"]
    assert rows["ours fused unequal"]["reason"] == "rank 1: hidden: differs from rank 0"
    assert rows["not finite"]["residual_error"] is None
    assert rows["good"]["reason"] is None and rows["good"]["hidden_error"] > 0


def _off_by_a_level(packed: torch.Tensor, codes: Any, hidden_size: int) -> torch.Tensor:
    """As a kernel would decode that takes the wrong code for zero."""
    rows = decode(packed, codes, hidden_size)
    scale = (packed[:, hidden_size * codes.bits // 8 :].contiguous().view(torch.int32) & -0x10000).view(torch.float32)
    return rows + scale.repeat_interleave(codes.group, 1)


def _bench_wire(ranks: Ranks) -> list[tuple[str, str, str | None]]:
    spec = replace(SPEC, tokens=(32,), wires=("int8",))
    subject = build_subject(spec, torch.device("cpu"))
    (reference,) = worker.references_of(spec, ranks, subject, lambda what: None)
    found = []
    for broken in (False, True):
        with compat.cold_compile(None), mock.patch.object(wire_rows, "decode", _off_by_a_level if broken else decode):
            (row,) = bench_tokens(spec, ranks, with_wires(("int8",))[:1], subject, reference, lambda what: None)
        found.append((row.outcome, row.numerics, row.reason))
    (error, _), (unfused, _) = reference.coded_errors["int8"], reference.unfused_errors
    assert 1.5 * unfused < error < 0.02
    return found


@pytest.mark.full
@pytest.mark.timeout(400)
def test_codes_are_held_to_the_error_of_the_same_codes(gloo_ranks: GlooRanks) -> None:
    """A kernel that is off by one level is as near as 5 bits would be: no budget of bfloat16 would tell it from a good one."""
    good, broken = gloo_ranks.run(_on_ranks, _bench_wire)[0]
    assert good == ("timed", "ok", None)
    assert broken[:2] == ("numerics failed", "failed")
    assert broken[2] is not None and "torch in int8" in broken[2]


def _without_reference(ranks: Ranks) -> list[tuple[str, str | None]]:
    subject = build_subject(SPEC, torch.device("cpu"))

    def forward(subject: Any, inputs: torch.Tensor) -> HiddenAndResidual:
        raise torch.OutOfMemoryError("out of memory")

    steps: list[str] = []
    with mock.patch.object(worker, "reference_forward", forward):
        (reference,) = worker.references_of(SPEC, ranks, subject, steps.append)
        rows = bench_tokens(SPEC, ranks, [LayerVariant("fused", "ours")], subject, reference, steps.append)
    assert len(steps) == 3
    return [(row.outcome, row.reason) for row in rows]


@pytest.mark.full
def test_what_cannot_be_checked_is_not_timed(gloo_ranks: GlooRanks) -> None:
    row = ("error", "no reference: OutOfMemoryError: out of memory")
    assert gloo_ranks.run(_on_ranks, _without_reference) == [[row], [row]]


def _kept(ranks: Ranks) -> list[list[int]]:
    def rows(
        spec: LayerSpec,
        ranks: Ranks,
        everyone: Any,
        subject: Any,
        reference: TokensReference,
        progress: Any,
        forced: Any,
    ) -> list[Any]:
        assert forced == {}  # no kernel was asked for
        return [worker.LayerRow("fused", "ours", reference.tokens, 96, "timed")]

    kept: list[list[int]] = []
    with mock.patch.object(worker, "bench_tokens", rows):
        found = worker.run_rank(
            replace(SPEC, tokens=(6, 2)),
            ranks,
            lambda what: None,
            lambda so_far: kept.append([row["tokens"] for row in so_far["rows"]]),
        )
    assert [row["tokens"] for row in found["rows"]] == [6, 2] and found["hidden_size"] == 512
    return kept


def test_rows_are_kept_token_count_by_token_count(gloo_ranks: GlooRanks) -> None:
    assert gloo_ranks.run(_on_ranks, _kept) == [[[6], [6, 2]]] * 2


def _site(wire: str, decision: str = "fused") -> Site:
    refusal = {"wire_refusal": "not_measured"} if wire == "exact" else {}
    return Site(0, 0, "all_reduce", decision, "", 96, "gloo", "no table says it", wire=wire, **refusal)  # type: ignore[arg-type]


def _deviations_of_wires(ranks: Ranks) -> list[str | None]:
    (variant, _) = with_wires(("int8",))
    found = []
    for wires in (("int8", "int8"), ("int8", "exact"), ()):
        entry = VariantAtTokens(variant, worker.LayerRow(variant.label, "ours", 6, 96, "timed"))
        sites = [_site(wire) for wire in wires] or [_site("exact", "gated")]
        found.append(worker.deviation_of(ranks, entry, [GraphReport(sites)]))
    return found


def test_rows_that_stay_exact_are_not_shown_as_rows_in_codes(gloo_ranks: GlooRanks) -> None:
    assert gloo_ranks.run(_on_ranks, _deviations_of_wires)[0] == [
        None,
        "rows of 1 of 2 fused sums are exact, not_measured: no table says it",
        "nothing is fused, so no rows travel in int8, : no table says it",
    ]


def _deviations(ranks: Ranks) -> list[str | None]:
    entry = VariantAtTokens(LayerVariant("fused", "ours"), worker.LayerRow("fused", "ours", 6, 96, "timed"))
    return [worker.deviation_of(ranks, entry, reports) for reports in ([], [GraphReport()])]


def test_graph_without_all_reduces_is_not_what_was_asked_for(gloo_ranks: GlooRanks) -> None:
    reason = "the graph that was compiled has no all_reduce"
    assert gloo_ranks.run(_on_ranks, _deviations) == [[reason, reason]] * 2
