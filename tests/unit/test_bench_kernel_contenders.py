"""Contenders of ``tw-compile bench kernel`` that need more than others: rows in codes, and NVLink multicast."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_bench_kernel import SPEC, completed, report_of, row

from tw_compile import compat
from tw_compile.benchmark import labels
from tw_compile.benchmark.contender import form
from tw_compile.benchmark.contenders import OTHERS, contenders
from tw_compile.benchmark.gated import set_regret
from tw_compile.benchmark.ours import NO_MULTICAST, Operator
from tw_compile.benchmark.results import as_csv
from tw_compile.benchmark.spec import MessageSize
from tw_compile.benchmark.variants import taking_part
from tw_compile.harness.problems import Form, Problem
from tw_compile.kernels.collective import peer_access
from tw_compile.kernels.collective.spec import Request
from tw_compile.kernels.transports.p2p import P2PTransport
from tw_compile.kernels.transports.selection import Insist


@pytest.mark.parametrize(
    ("device", "options"),
    [
        ("cpu", {}),
        ("cpu", {"norms": ("rms_norm", "layer_norm")}),
        ("cuda", {"wires": ("exact", "int8", "int6", "int4")}),
        ("cuda", {"norms": ("layer_norm",)}),
        ("cuda", {"gemms": (64, 128), "prefetch": ("off", "4096"), "wires": ("int6", "exact")}),
        ("cuda", {"only": labels.IF_NAMED}),
    ],
)
def test_the_labels_that_are_known_without_torch_are_those_of_the_contenders(
    device: str, options: dict[str, Any]
) -> None:
    spec = replace(SPEC, device=device, **options)
    known = (*(one.label for one in taking_part(spec)), *labels.others(spec))
    assert [one.label for one in contenders(replace(spec, only=known))] == [*known]
    if not spec.only:
        assert [one.label for one in contenders(spec)] == [*known]


def test_every_label_has_a_contender() -> None:
    assert OTHERS.keys() == {labels.GLOO, *labels.ON_GPUS, *labels.IF_NAMED}


def test_each_wire_adds_those_that_have_it_and_no_table_names_them() -> None:
    exact = [one.label for one in contenders(SPEC)]
    everyone = contenders(replace(SPEC, wires=("exact", "int8", "int4")))
    added = [one for one in everyone if one.wire != "exact"]
    assert [one.label for one in everyone if one.wire == "exact"] == exact
    coded = [f"{label}-{wire}" for wire in ("int8", "int4") for label in ("tw-push-two-shot", "tw-host-two-shot")]
    assert [one.label for one in added] == coded
    assert {one.algorithm for one in added} == {None} and {one.kind for one in added} == {"ours"}
    swept = contenders(replace(SPEC, wires=("int6",), only=("tw-push-two-shot-int6", "nccl+norm"), sms=(16, 64)))
    assert [one.label for one in swept] == ["tw-push-two-shot-int6-16sm", "tw-push-two-shot-int6-64sm", "nccl+norm"]
    assert [one.wire for one in swept] == ["int6", "int6", "exact"]


def test_each_norm_adds_those_of_ours_that_serve_it_and_no_table_names_them() -> None:
    ours, others = (
        [one.label for one in contenders(SPEC) if (one.kind == "ours") is wanted] for wanted in (True, False)
    )
    everyone = contenders(replace(SPEC, norms=("rms_norm", "layer_norm")))
    with_norm = [label for label in ours if not label.endswith(("fp8-token", "fp8-group"))]
    assert len(with_norm) == len(ours) - 6, "no kernel makes scales of results of a norm with a bias"
    assert [one.label for one in everyone] == [*ours, *(f"{label}-layer_norm" for label in with_norm), *others]
    added = [one for one in everyone if one.norm == "layer_norm"]
    assert [one.algorithm for one in added] == [None] * len(with_norm)
    of_form = form(added[0], torch.bfloat16)
    assert of_form.epilogue == "layer_norm" and of_form.norm_bias and of_form.weight == "plain"
    assert not form(everyone[0], torch.bfloat16).norm_bias


def test_float8_made_by_kernels_of_its_own_is_nobodys_best_peer() -> None:
    behind = replace(row("tw+quantise-token", "peer", 11.0), quantises=True)
    found = completed(row("tw-push-two-shot", "ours", 7.0), behind, row("nccl+norm", "peer", 20.0))
    assert found["tw-push-two-shot"].best_peer == "nccl+norm"


def test_another_norm_has_no_speed_up() -> None:
    ours = replace(row("tw-nccl-layer_norm", "ours", 20.0), norm="layer_norm")
    assert not ours.gives_what_peers_give and replace(ours, norm="rms_norm").gives_what_peers_give


@pytest.mark.parametrize(
    ("capability", "kernel", "deviation"),
    [
        ((9, 0), "push_two_shot", None),
        ((7, 0), "two_shot", "fell back to another kernel: needs compute capability 7.5, the device has 7.0"),
    ],
)
def test_rows_that_do_not_travel_in_codes_are_no_time_of_the_wire(
    capability: tuple[int, int], kernel: str, deviation: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    (operator,) = contenders(replace(SPEC, wires=("int8",), only=("tw-push-two-shot-int8",)))
    assert isinstance(operator, Operator)
    asked: list[Request] = []
    transport = operator.transport
    assert isinstance(transport, P2PTransport) and transport.algorithm is not None
    ctx = SimpleNamespace(group_name="group", device=torch.device("meta"))
    state = SimpleNamespace(world_size=2, rank=0, obstacle=None, selector=Insist(transport.algorithm))
    transport.states["group", ctx.device] = state  # type: ignore[assignment]
    monkeypatch.setattr(
        transport, "start", lambda request: asked.append(request) or SimpleNamespace(finish=None, hidden=0, residual=0)
    )
    x, row = torch.empty(4, 256, dtype=torch.bfloat16, device="meta"), torch.empty(256, device="meta")
    monkeypatch.setattr(compat, "resolve_process_group", lambda name: SimpleNamespace(size=lambda: 2, rank=lambda: 0))
    ranks: Any = SimpleNamespace(ctx=ctx)
    operator.prepare(ranks, Problem(Form(), x, x, row, row, row))()
    assert [request.wire for request in asked] == ["int8"]
    assert operator.deviation(ranks) == deviation and operator.kernel_name() == kernel


def test_rows_in_codes_have_no_speedup_and_are_no_choice_of_the_gate() -> None:
    ours = replace(row("tw-push-two-shot-int8", "ours", 20.0), wire="int8")
    gated = row("gated", "ours", 30.0)
    found = completed(ours, gated, row("nccl+norm", "peer", 33.0))["tw-push-two-shot-int8"]
    assert found.speedup is None and found.share_of_bound is not None
    set_regret([ours, gated])
    assert (gated.best, gated.regret) == ("gated", 0.0)
    (line, *_) = csv.DictReader(io.StringIO(as_csv(report_of([found]))))
    assert (line["label"], line["wire"]) == ("tw-push-two-shot-int8", "int8")


def test_multimem_is_a_row_with_the_reason_where_there_is_no_multicast(monkeypatch: pytest.MonkeyPatch) -> None:
    (multimem,) = contenders(replace(SPEC, only=("tw-multimem",)))
    size = MessageSize(512, 8192, "bfloat16")
    missing = f"multimem {NO_MULTICAST}"
    assert multimem.obstacle(size, 2) == missing, "no GPU is in use"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(peer_access, "pair_obstacle", lambda gpu, peer: None)
    for answer, obstacle in ((None, missing), (False, missing), (True, None)):
        monkeypatch.setattr(compat, "multicast_support", {1: answer}.get)
        assert multimem.obstacle(size, 2) == obstacle
    swept = contenders(replace(SPEC, only=("tw-multimem",), sms=(4, 32, 64)))
    assert [one.label for one in swept] == ["tw-multimem-4sm", "tw-multimem-32sm"]
