"""Plans count the bytes of rows in codes: rates, layers, decisions, and what the commands make of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tw_compile.cli.app import app
from tw_compile.kernels.algorithms import ALGORITHMS
from tw_compile.kernels.collective.planned_wires import planned_wires, row_shares
from tw_compile.kernels.collective.spec import MAX_OVERLAP_SMS
from tw_compile.models.config import load_config, tensor_parallel_plan
from tw_compile.passes.reasons import SplitRefusal
from tw_compile.passes.split.analysis import choose
from tw_compile.passes.split.analysis.choose import NotSplit
from tw_compile.passes.split.analysis.layer import GraphLayer
from tw_compile.passes.split.analysis.token_axis import TokenAxis
from tw_compile.planning import (
    DeviceProfile,
    LayerShape,
    Link,
    Mode,
    Plan,
    Wires,
    layer_shape,
    load_profile,
    plan_layer,
)
from tw_compile.planning.communication import EXACT_ROWS, beside_us, fused_us, link_us, sm_us, traffic_bytes
from tw_compile.planning.device import CODED_KERNELS, MOST_SMS_BESIDE
from tw_compile.planning.links import shipped_link

B200, H100, H200 = (load_profile(name) for name in ("B200", "H100", "H200"))
LINK = shipped_link()
TOKENS = 4096


def layer_of(model: str, world_size: int) -> LayerShape:
    config = load_config(model)
    return layer_shape(config, tensor_parallel_plan(config), world_size)


LAYER = layer_of("llama-3.1-8b", 2)
INT8 = planned_wires(LAYER.hidden_size, "int8", "int8")
MLP_INT8 = planned_wires(LAYER.hidden_size, mlp="int8")


def test_rows_are_as_long_as_their_codes_scales_and_offsets() -> None:
    int8, int6 = row_shares("int8", 4096), row_shares("int6", 4096)
    assert (int8.sums, int8.results) == ((4096 + 32 * 4) / 8192,) * 2
    assert (int6.sums, int6.results) == ((2048 + 128 * 4) / 8192, int8.results)
    assert row_shares("exact", 4096) == EXACT_ROWS
    assert traffic_bytes("two_shot", 8192, 4, int6) == 3 / 4 * (2560 + 4224)
    assert traffic_bytes("one_shot", 8192, 4, int8) == traffic_bytes("one_shot", 8192, 4)


def test_calls_in_codes_have_fewer_bytes_on_links_and_for_sms() -> None:
    push, rows = H200.fused["push"], row_shares("int8", 8192)
    assert sm_us(push, TOKENS, 8192, 2, rows=rows) < sm_us(push, TOKENS, 8192, 2)
    stream = H200.fused["stream"]
    assert sm_us(stream, TOKENS, 8192, 2, in_slot=True, rows=rows) == sm_us(stream, TOKENS, 8192, 2, rows=rows)
    exact, coded = (fused_us(push, 16384, 8192, 2, 128, rows=each) - push.latency_us for each in (EXACT_ROWS, rows))
    assert coded / exact == pytest.approx(rows.sums, rel=0.1)
    host = LINK.transport("host")
    two_shot = host.ways["two_shot"]
    nbytes = 2 * TOKENS * 8192
    assert link_us(host, nbytes, 2, rows) == pytest.approx(
        two_shot.latency_us + nbytes * rows.sums / (two_shot.gb_per_s * 1e3)
    )
    assert link_us(host, 2, 2, rows) > two_shot.latency_us > link_us(host, 2, 2)  # codes have no one-shot way


def test_the_kernels_that_are_planned_for_codes_are_those_that_have_wires() -> None:
    coded = {entry.name for entry in ALGORITHMS if entry.wires and entry.transport == "p2p"}
    assert coded and {name.removesuffix("_two_shot") for name in coded} == set(CODED_KERNELS)


@pytest.mark.parametrize(("transport", "link"), [("host", LINK), ("nccl", LINK), (None, None)])
def test_a_layer_has_its_calls_in_codes_and_nothing_else(transport: str | None, link: Link | None) -> None:
    exact, coded = (
        plan_layer(H200, LAYER, TOKENS, kernel=transport, link=link, wires=wires) for wires in (Wires(), INT8)
    )
    assert exact == plan_layer(H200, LAYER, TOKENS, kernel=transport, link=link)
    assert coded.predicted.unfused_us == exact.predicted.unfused_us
    assert coded.predicted.no_communication_us == exact.predicted.no_communication_us
    saved = exact.predicted.fused_us - coded.predicted.fused_us
    one = plan_layer(H200, LAYER, TOKENS, kernel=transport, link=link, wires=MLP_INT8)
    assert exact.predicted.fused_us - one.predicted.fused_us == pytest.approx(saved / 2)
    if link is not None:
        assert transport is not None
        rates, nbytes = link.transport(transport), LAYER.message_bytes(TOKENS)
        rows = row_shares("int8", LAYER.hidden_size)
        assert saved == pytest.approx(2 * (link_us(rates, nbytes, 2) - link_us(rates, nbytes, 2, rows)))


def test_each_window_has_the_rows_of_the_sum_that_travels_in_it() -> None:
    exact, mlp = (
        plan_layer(
            H200, LAYER, TOKENS, kernel="host", link=LINK, wires=wires, first=2048, attention="split", min_gain=0.0
        )
        for wires in (Wires(), MLP_INT8)
    )
    shorter = [
        ours.communication_us < 0.7 * theirs.communication_us
        for ours, theirs in zip(mlp.windows, exact.windows, strict=True)
    ]
    assert shorter == [True, False, False, True]


def test_calls_in_codes_beside_compute_are_those_of_the_kernel_that_has_wires() -> None:
    plan = plan_layer(H200, LAYER, TOKENS, wires=INT8, first=2048, min_gain=0.0)
    push, rows = H200.fused["push"], row_shares("int8", LAYER.hidden_size)

    def of_push(plan: Plan) -> list[bool]:
        return [
            window.communication_us == beside_us(H200, push, 2048, LAYER.hidden_size, 2, window.ctas, False, rows)
            for window in plan.windows
        ]

    assert of_push(plan) == [True] * len(plan.windows) and plan.windows
    assert {window.ctas for window in plan.windows} <= {4, 8, 16, 32}, "what a call beside compute can have"
    mixed = plan_layer(H200, LAYER, TOKENS, wires=MLP_INT8, first=2048, attention="split", min_gain=0.0)
    assert of_push(mixed) == [True, False, False, True]


def test_calls_beside_compute_are_planned_for_the_sms_that_they_can_have() -> None:
    assert MOST_SMS_BESIDE == MAX_OVERLAP_SMS
    for profile in (H100, H200):
        push = profile.fused["push"]
        assert push.ctas == (4, 8, 16, 32, 64, 128) and push.ctas_beside == (4, 8, 16, 32)
    assert replace(push, ctas=(64, 128)).ctas_beside == (MOST_SMS_BESIDE,)


@pytest.mark.parametrize(("kernel", "words"), [("multimem", "with multicast"), (None, "with B200's kernels")])
def test_what_has_no_codes_is_not_planned_with_them(kernel: str | None, words: str) -> None:
    with pytest.raises(ValueError, match=f"wire: expected exact {words}.*, got int8"):
        plan_layer(H100 if kernel else B200, LAYER, TOKENS, kernel=kernel, wires=INT8)


@pytest.mark.parametrize(
    ("profile", "transport"), [(H200, "host"), (H200, "p2p"), (H100, "p2p"), (B200, "p2p"), (B200, "host")]
)
def test_graphs_are_planned_with_the_wires_of_their_calls(
    profile: DeviceProfile, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = GraphLayer(LAYER, transport, peer_access=transport == "p2p", wires=INT8)
    monkeypatch.setattr(choose, "layer_of_graph", lambda graph, axis: layer)
    monkeypatch.setattr(choose, "_attention", lambda question, axis: "auto")
    question: Any = choose._Question(None, choose.Config(), profile, None, choose._compute, LINK)  # type: ignore[arg-type]
    planners = choose._planners(question, [TokenAxis("token", TOKENS, 1, {})])
    if (profile, transport) == (B200, "p2p"):
        assert isinstance(planners, NotSplit) and planners.reason == SplitRefusal.TRANSPORT_NOT_PLANNED
        assert "no kernel whose rows travel in codes" in planners.detail and "int8" in planners.detail
        return
    assert not isinstance(planners, NotSplit)
    named = {"kernel": "host", "link": LINK} if transport == "host" else {"kernel": profile.kernel}
    assert planners[0].plan(TOKENS) == plan_layer(profile, LAYER, TOKENS, wires=INT8, **named)  # type: ignore[arg-type]


def told(args: list[str], file: Path) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*args, "--json", str(file)])
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(file.read_text())
    return report


def test_plan_has_the_wire_that_it_is_asked_for(tmp_path: Path) -> None:
    args = ["plan", "--model", "llama-3.1-8b", "--tp", "2", "--tokens", "4096", "--transport", "host"]
    exact, coded = (told([*args, *more], tmp_path / "plan.json") for more in ([], ["--wire", "int8"]))
    assert (exact["wire"], coded["wire"]) == ("exact", "int8")
    (plan,) = coded["plans"]
    expected = plan_layer(H200, LAYER, 4096, kernel="host", link=LINK, wires=INT8)
    assert plan["predicted"]["fused_us"] == expected.predicted.fused_us
    assert plan["predicted"]["fused_us"] < 0.75 * exact["plans"][0]["predicted"]["fused_us"]
    text = CliRunner().invoke(app, [*args, "--wire", "int8"]).output
    assert "rows of fused sums in int8: their bytes are counted" in text


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--wire", "int5"], "--wire: expected one of exact, int8, int6, got 'int5'"),
        (["--wire", "auto"], "--wire: expected one of exact, int8, int6, got 'auto'"),
        (["--wire", "int4"], "'int4', which gathers normalised rows in 4 bits"),
        (["--wire", "int8", "--model", "gpt-oss-20b"], "the hidden size 2880 is no multiple of 128, got 'int8'"),
        (["--wire", "int8", "--device-profile", "B200"], "B200's profile has no kernel whose rows travel in codes"),
        (
            ["--wire", "int8", "--device-profile", "H100", "--kernel", "multimem"],
            "--kernel multimem, whose switch adds rows as they are",
        ),
    ],
)
def test_plan_refuses_wires_that_its_sums_cannot_have(args: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["plan", "--tp", "2", "--tokens", "4096", *args])
    assert (result.exit_code, result.output.count("\n")) == (2, 1) and words in result.output, result.output


def test_explain_plans_messages_with_the_wire_that_they_get(tmp_path: Path) -> None:
    args = ["explain", "--model", "llama-3.1-8b", "--tp", "2", "--tokens", "512,4096", "--wire", "int8"]
    report = told([*args, "--wire-min-bytes", str(2**24)], tmp_path / "explain.json")
    small, large = report["messages"]
    assert (small["wire"]["wire"], large["wire"]["wire"]) == ("exact", "int8")
    for message, wires in ((small, Wires()), (large, INT8)):
        planned = plan_layer(H200, LAYER, message["tokens"], kernel="stream", wires=wires)
        assert message["split"]["plan"]["predicted"]["fused_us"] == planned.predicted.fused_us
    b200 = told([*args, "--wire-min-bytes", "0", "--device-profile", "B200"], tmp_path / "explain.json")
    assert {message["split"]["reason"] for message in b200["messages"]} == {SplitRefusal.TRANSPORT_NOT_PLANNED}
    assert {message["split"]["mode"] for message in b200["messages"]} == {Mode.OFF}
