"""Benchmarks with prefetched weights beside the same without: the operator with a matmul behind it, layers, vLLM."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_bench_kernel import SPEC, completed, row
from test_bench_layer import SPEC as LAYERS
from test_bench_vllm import SMALL, ran, vllm
from test_bench_vllm import SPEC as ENGINES
from typer.testing import CliRunner

from tw_compile import Config
from tw_compile.benchmark.contenders import contenders
from tw_compile.benchmark.layer import variants as of_layers
from tw_compile.benchmark.layer import worker as layer_worker
from tw_compile.benchmark.layer.results import LayerRow
from tw_compile.benchmark.ours import Operator
from tw_compile.benchmark.spec import MessageSize
from tw_compile.benchmark.vllm import spec as of_engines
from tw_compile.benchmark.vllm.results import rows_of
from tw_compile.cli.app import app
from tw_compile.harness.problems import Form, Problem
from tw_compile.kernels.collective.spec import Request
from tw_compile.report import GraphReport, PassReport, Site

__all__ = ["vllm"]  # a fixture
ASKED = dataclasses.replace(SPEC, gemms=(3072, 14336), prefetch=("off", "4096"))


def test_each_matmul_adds_those_that_prefetch_with_each_value_and_no_table_names_them() -> None:
    plain = [one.label for one in contenders(SPEC)]
    everyone = contenders(ASKED)
    added = [one for one in everyone if one.gemm_columns]
    assert [one.label for one in everyone if not one.gemm_columns] == plain
    able = ("tw-push-one-shot", "tw-push-two-shot", "tw-host-words")
    assert [one.label for one in added] == [
        f"{label}-gemm-{columns}-prefetch-{value}"
        for columns in (3072, 14336)
        for label in able
        for value in ("off", "4096")
    ]
    assert {one.algorithm for one in added} == {None} and {one.prefetch_bytes for one in added} == {0, 4096}


def test_what_has_a_matmul_behind_it_has_no_speed_up() -> None:
    ours = dataclasses.replace(row("tw-push-one-shot-gemm-8-prefetch-off", "ours", 20.0), gemm_columns=8)
    found = completed(ours, row("nccl+norm", "peer", 33.0))[ours.label]
    assert found.speedup is None and not found.gives_what_peers_give


@pytest.mark.parametrize(("value", "budget"), [("off", 0), ("4096", 4096)])
def test_each_call_has_weights_that_have_left_the_cache(
    monkeypatch: pytest.MonkeyPatch, value: str, budget: int
) -> None:
    spec = dataclasses.replace(
        SPEC, gemms=(64,), prefetch=(value,), only=(f"tw-push-one-shot-gemm-64-prefetch-{value}",)
    )
    (operator,) = contenders(spec)
    assert isinstance(operator, Operator)
    cache = 20_000
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=cache))
    x, asked, multiplied = torch.ones(4, 32), list[Request](), list[torch.Tensor]()

    def start(request: Request) -> Any:
        asked.append(request)
        return SimpleNamespace(finish=None, hidden=x, residual=x)

    monkeypatch.setattr(operator.transport, "start", start)
    monkeypatch.setattr(torch, "mm", lambda rows, weight: multiplied.append(weight.t()))
    ranks: Any = SimpleNamespace(ctx=SimpleNamespace(group_name="group", device=torch.device("cpu")))
    run = operator.prepare(ranks, Problem(Form(), x, x, x[0], x[0], x[0]))
    for _ in range(9):
        run()
    weights = list(dict.fromkeys(weight.data_ptr() for weight in multiplied))
    assert all(weight.shape == (64, 32) for weight in multiplied)
    assert (len(weights) - 1) * multiplied[0].nbytes >= cache and len(weights) < 9
    assert all(one.data_ptr() != other.data_ptr() for one, other in pairwise(multiplied))
    assert {request.prefetch_bytes for request in asked} == {budget}
    for request, weight in zip(asked, multiplied, strict=True):
        given = [] if request.prefetch is None else [one.data_ptr() for one in request.prefetch]
        assert given == ([weight.data_ptr()] if budget else []), "who prefetches nothing has the plain kernel"


def test_long_messages_are_not_timed_with_what_they_do_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tw_compile.benchmark.ours.node_facts", lambda *facts: SimpleNamespace(peer_access=True))
    off, on = (one for one in contenders(ASKED) if one.label.startswith("tw-push-one-shot-gemm-3072"))
    assert on.obstacle(MessageSize(64, 4096, "bfloat16"), 2) is None
    assert on.obstacle(MessageSize(65, 4096, "bfloat16"), 2) == "calls of more than 64 tokens prefetch nothing"
    assert off.obstacle(MessageSize(257, 4096, "bfloat16"), 2) is None


def test_layers_and_engines_have_variants_for_each_value() -> None:
    spec = dataclasses.replace(LAYERS, prefetch=("off", "4096"))
    layers = of_layers.variants(spec, 64)
    plain = [one.label for one in of_layers.variants(LAYERS, 64)]
    added = {one.label: one for one in layers if "prefetch" in one.label}
    assert [one.label for one in layers if one.label not in added] == plain
    names = ("fused", "fused+split")
    assert [*added] == [f"{name}-prefetch-{value}" for value in ("off", "4096") for name in names]
    assert [one.prefetches for one in added.values()] == [False, False, True, True]
    engines = [one for one in of_engines.variants(dataclasses.replace(ENGINES, prefetch=("4096",))) if one.prefetches]
    assert [one.label for one in engines] == ["fuse-prefetch-4096", "fuse+split-prefetch-4096"]
    for config in (
        *(one.config for one in added.values()),
        *(one.arguments["additional_config"]["tw_compile"] for one in engines),
    ):
        assert Config(**config).prefetch in ("off", "4096")


def test_a_layer_that_prefetches_nothing_is_no_time_of_prefetching(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_worker, "fallback", lambda ranks, transport: None)
    site = Site(0, None, "all_reduce", "fused", "", None, None, "", "")
    (variant,) = (one for one in of_layers.with_prefetch(("4096",)) if one.label == "fused-prefetch-4096")

    def deviation(counts: dict[str, int]) -> str | None:
        passes = [PassReport("prefetch_weights", "changed", 0.0, counts)]
        entry = layer_worker.VariantAtTokens(variant, LayerRow(variant.label, "ours", 64, 64, "timed"))
        ranks: Any = None
        return layer_worker.deviation_of(ranks, entry, [GraphReport([site], None, passes=passes)])

    assert deviation({"prefetching": 3}) is None
    assert deviation({"many_tokens": 3}) == "no call prefetches anything"


def test_an_engine_that_prefetches_nothing_is_not_one_that_does(vllm: Path) -> None:
    only = ("fuse-prefetch-off", "fuse-prefetch-4096")
    spec = dataclasses.replace(SMALL, prefetch=("off", "4096"), only=only)
    assert {row.reason for row in rows_of(ran(spec))} == {None}
    nothing = rows_of(ran(dataclasses.replace(spec, engine={"exact": True})))
    assert {row.label: row.reason for row in nothing}["fuse-prefetch-4096"] == "no call prefetches anything"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["kernel", "--gemm", "64"], "--gemm: expected --prefetch with it"),
        (["kernel", "--prefetch", "64"], "--prefetch: expected --gemm with it"),
        (["kernel", "--prefetch", "on", "--gemm", "64"], "--prefetch: expected off and numbers of bytes"),
        (["kernel", "--prefetch", "64", "--gemm", "0"], "--gemm: expected"),
        (["kernel", "--prefetch", "64", "--gemm", "64", "--only", "nccl+norm"], "as no contender of --only nccl+norm"),
        (["kernel", "--prefetch", "64", "--gemm", "64", "--device", "cpu"], "as no contender of --device cpu"),
        (["layer", "--prefetch", "64,64"], "--prefetch: expected off and numbers of bytes, all different, got '64,64'"),
        (["model", "--prefetch", "0"], "--prefetch: expected off and numbers of bytes"),
        (["vllm", "--prefetch", "auto", "--dry-run"], "--prefetch: expected off and numbers of bytes"),
    ],
)
def test_bad_requests_are_refused(args: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["bench", *args])
    assert result.exit_code == 2 and words in " ".join(result.stderr.split())
