"""The token split as part of the passes: what is chosen, what is left alone, what is reported."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from graph_builder import copy_of
from split_graphs import family_graph
from torch._inductor import config as inductor_config
from torch._inductor.scheduler import Scheduler
from torch._inductor.virtualized import V

from tw_compile import Config, TWCompilePass, agree, collect_reports, compat, current
from tw_compile.graph.snapshot import snapshot
from tw_compile.kernels.collective import ops
from tw_compile.kernels.collective.planned_wires import planned_wires
from tw_compile.models.config import config_from_dict, load_config, tensor_parallel_plan
from tw_compile.models.decoder import build_decoder
from tw_compile.passes.reasons import SplitRefusal, SplitRefused
from tw_compile.passes.split import HostGraph, layer_of_graph
from tw_compile.passes.split.analysis import choose
from tw_compile.passes.split.analysis.layer import GraphLayer
from tw_compile.passes.split.analysis.token_axis import TokenAxis, find_token_axis
from tw_compile.passes.split.rewrite.duplicate import Duplicator
from tw_compile.passes.split.rules import attention as rules_attention
from tw_compile.planning import layer_shape, load_profile, plan, plan_layer
from tw_compile.report import GraphReport, Split
from tw_compile.testing import fake_cuda, fake_process_group, find_ops, rewrite

WORLD_SIZE = 8
H200 = load_profile("H200")


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with fake_process_group(WORLD_SIZE):
        yield


WINDOWED = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32768,
    "sliding_window": 1024,
}
"""Mistral-7B but for its window, which is 4096 tokens."""


def inspected(
    model: str | dict[str, Any] = "llama-3.1-8b",
    batch: int = 1,
    seq: int = 4096,
    bounds: tuple[int, int] | None = None,
    **options: Any,
) -> tuple[Split, fx.Graph]:
    """What the passes make of one layer on fake GPUs; ``bounds`` are those of a symbolic ``seq``."""
    with fake_cuda():
        config = load_config(model) if isinstance(model, str) else config_from_dict(model)
        decoder = build_decoder(config, device="cuda", dtype=torch.bfloat16, num_layers=1)
        ids = torch.zeros(batch, seq, dtype=torch.long, device="cuda")
        if bounds is not None:
            torch._dynamo.mark_dynamic(ids, 1, min=bounds[0], max=bounds[1])
        given = Config(**{"split": "auto", "device_profile": "H200", "strict": True, **options})
        seen = rewrite(decoder, (ids,), world_size=WORLD_SIZE, config=given)
    assert seen.report.split is not None
    return seen.report.split, seen.after.graph


@pytest.mark.parametrize("model", ["llama-3.1-8b", "mixtral-8x22b"])
def test_layer_of_the_graph_is_that_of_the_configuration(model: str) -> None:
    _, graph = inspected(model, split="999999")
    axis = find_token_axis(graph)
    assert isinstance(axis, TokenAxis)
    config = load_config(model)
    expected = layer_shape(config, tensor_parallel_plan(config), WORLD_SIZE)
    expected = replace(expected, attention=replace(expected.attention, kernel="flash"))
    assert layer_of_graph(graph, axis) == GraphLayer(expected, "p2p")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("sites", "wires"),
    [("all", ("int8", "int8")), ("mlp", ("exact", "int8")), ("attention", ("int8", "exact"))],
)
def test_plans_are_for_the_wires_of_the_graph(sites: str, wires: tuple[str, str]) -> None:
    split, graph = inspected(split="999999", wire="int8", wire_sites=sites, wire_min_bytes=0)
    axis = find_token_axis(graph)
    assert isinstance(axis, TokenAxis) and split.mode == "off"
    layer = layer_of_graph(graph, axis)
    assert isinstance(layer, GraphLayer) and layer.wires == planned_wires(layer.shape.hidden_size, *wires)
    auto, _ = inspected(wire="int8", wire_sites=sites, wire_min_bytes=0)
    expected = plan_layer(H200, layer.shape, 4096, kernel="stream", wires=layer.wires)
    assert auto.plan is not None and auto.plan.predicted == expected.predicted


@pytest.mark.full
def test_groups_of_halves_are_rounded_up_to_fewer_rows_and_those_of_the_whole_are_torchs() -> None:
    split, graph = inspected("mixtral-8x22b", split="1800")
    assert split.mode == "split" and len(find_ops(graph, "grouped_mm_leaving_sms")) == 4
    assert not find_ops(graph, "aten._grouped_mm")
    assert {sort.args[0].meta["val"].dtype for sort in find_ops(graph, "aten.sort")} == {torch.uint8}
    split, graph = inspected("mixtral-8x22b", split="999999")
    assert split.mode == "off" and len(find_ops(graph, "aten._grouped_mm")) == 2
    assert {sort.args[0].meta["val"].dtype for sort in find_ops(graph, "aten.sort")} == {torch.int64}


def test_outer_products_are_no_gemms_of_a_layer() -> None:
    _, graph = inspected(split="999999")
    axis = find_token_axis(graph)
    assert isinstance(axis, TokenAxis)
    before = layer_of_graph(graph, axis)
    with graph.inserting_before(next(node for node in graph.nodes if node.op == "call_function")):
        frequencies, positions = (graph.call_function(torch.ops.aten.empty.memory_format, (size,)) for size in (64, 1))
        product = graph.call_function(torch.ops.aten.mm.default, (frequencies, positions))
    for node, size in ((frequencies, (64, 1)), (positions, (1, 4096)), (product, (64, 4096))):
        node.meta["val"] = torch.empty(size, device="meta")
    assert isinstance(before, GraphLayer) and layer_of_graph(graph, axis) == before


def test_one_request_is_cut_into_prefix_and_suffix_in_four_windows_a_layer() -> None:
    split, graph = inspected()
    assert split.plan is not None and split.mode == split.plan.mode == "split" and split.plan.cuts_sequence
    assert split.sizes == split.plan.sizes and sum(split.plan.sizes) == 4096
    assert split.joins == {} and len(split.plan.windows) == 4
    first, second = split.sizes
    assert isinstance(first, int) and isinstance(second, int)
    attention = find_ops(graph, "_scaled_dot_product_flash_attention")
    shapes = [[tuple(one.meta["val"].shape)[2] for one in node.args[:3]] for node in attention]  # type: ignore[union-attr]
    assert shapes == [[first, first, first], [second, 4096, 4096]]
    assert all(node.args[3:] == (0.0, True) for node in attention)


def test_attention_joins_where_the_plan_says_that_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "weave", lambda costs, first, tokens: ())
    split, _ = inspected("llama-3.3-70b", seq=8192)
    assert split.plan is not None and split.mode == split.plan.mode == "join"
    assert split.joins == {"attention_planned": 1} and len(split.join_details) == 1


def test_attention_that_cannot_be_cut_is_planned_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules_attention, "suffix_of", lambda call: None)
    split, _ = inspected("llama-3.3-70b", seq=8192)
    assert split.plan is not None and split.mode == split.plan.mode == "join"
    assert split.joins == {"attention_kernel": 1}


def test_several_requests_are_split_between_them() -> None:
    split, _ = inspected(batch=4, seq=1024)
    assert (split.mode, split.unit, split.sizes, split.joins) == ("split", "request", (2, 2), {})
    assert split.plan is not None and split.plan.sizes == (2048, 2048)


def test_plan_says_why_a_graph_is_left() -> None:
    split, graph = inspected(seq=64)
    assert (split.mode, split.reason) == ("off", "not_faster")
    assert split.plan is not None and split.plan.predicted.split_us is not None and split.detail == split.plan.reason
    with fake_cuda():
        decoder = build_decoder(load_config("llama-3.1-8b"), device="cuda", dtype=torch.bfloat16, num_layers=1)
        ids = torch.zeros(1, 64, dtype=torch.long, device="cuda")
        fused = rewrite(decoder, (ids,), world_size=WORLD_SIZE).after.graph
    assert snapshot(graph) == snapshot(fused)


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"model": "gemma-2-9b", "seq": 64}, SplitRefusal.ATTENTION_NOT_MEASURED),
        ({"fuse": False}, SplitRefusal.LAYER_NOT_RECOGNISED),
        ({"transport": "nccl"}, SplitRefusal.TRANSPORT_NOT_PLANNED),
        ({"device_profile": "auto"}, SplitRefusal.NO_DEVICE_PROFILE),
        ({"split": "4096"}, SplitRefusal.TOO_FEW_TOKENS),
        ({"split": "600", "bounds": (600, 8192)}, SplitRefusal.TOO_FEW_TOKENS),
        ({"split": "600", "bounds": (600, 8192), "batch": 2, "seq": 1024}, SplitRefusal.TOKEN_COUNT_UNKNOWN),
        ({"bounds": (16, 8192)}, SplitRefusal.TOKEN_COUNT_UNKNOWN),
    ],
    ids=str,
)
def test_graph_that_cannot_be_planned_is_left(
    options: dict[str, Any], reason: SplitRefusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    if options.get("transport") == "nccl":  # with a profile that was found by the device, not named
        monkeypatch.setattr("tw_compile.pipeline.current_profile", lambda config: H200)
        options = {**options, "device_profile": "auto"}
    split, _ = inspected(**options)
    assert (split.mode, split.reason) == ("off", reason), split.detail


@pytest.mark.full
def test_bounds_that_a_refusal_names_make_a_graph_that_is_split() -> None:
    refused, _ = inspected(bounds=(16, 8192))
    named = re.search(r"mark_dynamic\(min=(\d+), max=(\d+)\)", refused.detail)
    assert refused.mode == "off" and named is not None, refused.detail
    low, high = map(int, named.groups())
    assert 16 < low < high == 8192
    split, _ = inspected(bounds=(low, high))
    assert split.mode == "split" and str(split.sizes[0]).startswith("s*"), split.detail


@pytest.mark.full
@pytest.mark.parametrize("marked", [True, False])
def test_a_graph_without_bounds_gets_those_of_the_counts_that_are_split_as_its_own(marked: bool) -> None:
    """Also where a user has marked the dim as dynamic: torch.compile takes other bounds for no breach of that."""

    def guards(seq: int) -> tuple[str, set[str]]:
        with fake_cuda():
            decoder = build_decoder(load_config("llama-3.1-8b"), device="cuda", dtype=torch.bfloat16, num_layers=1)
            ids = torch.zeros(1, seq, dtype=torch.long, device="cuda")
            if marked:
                torch._dynamo.mark_dynamic(ids, 1)
            given = Config(split="auto", device_profile="H200", strict=True)
            seen = rewrite(decoder, (ids,), world_size=WORLD_SIZE, config=given, dynamic=None if marked else True)
        assert seen.report.split is not None
        environment = compat.graph_fake_mode(seen.after.graph).shape_env
        of_tokens = [str(guard.expr) for guard in environment.guards if re.search(r"s\d+ [<>]", str(guard.expr))]
        return seen.report.split.mode, {re.sub(r"s\d+", "s", guard) for guard in of_tokens}

    if marked:  # what a user says that the size is like is not what it is
        with fake_cuda():
            decoder = build_decoder(load_config("llama-3.1-8b"), device="cuda", dtype=torch.bfloat16, num_layers=1)
            ids = torch.zeros(1, 64, dtype=torch.long, device="cuda")
            torch._dynamo.mark_dynamic(ids, 1, hint_override=4096)
            given = Config(split="auto", device_profile="H200", strict=True)
            split = rewrite(decoder, (ids,), world_size=WORLD_SIZE, config=given).report.split
        assert split is not None and split.reason == SplitRefusal.TOKEN_COUNT_UNKNOWN and "bound it" in split.detail
    mode, of_short = guards(64)
    assert mode == "off" and len(of_short) == 1
    low = int(re.fullmatch(r"s <= (\d+)", of_short.pop()).group(1)) + 1  # type: ignore[union-attr]
    assert guards(4096) == ("split", {f"s >= {low}", "s <= 16384"})
    assert guards(20000) == ("off", {"s >= 16385"})


@pytest.mark.full
def test_masked_attention_is_planned_where_the_profile_has_its_time(tmp_path: Path) -> None:
    split, graph = inspected(model=WINDOWED)
    assert split.plan is not None and split.mode == split.plan.mode == "split", split.detail
    assert split.joins == {}
    first, second = split.sizes
    attention = find_ops(graph, "_scaled_dot_product_efficient_attention")
    masks = [tuple(node.args[3].meta["val"].shape)[2:] for node in attention]  # type: ignore[union-attr]
    assert masks == [(first, first), (second, 4096)]
    shipped = (resources.files("tw_compile.configs") / "devices" / "h200.toml").read_text()
    own = tmp_path / "own.toml"
    own.write_text(shipped.replace("[attention.efficient_masked]", "[attention.another]"))
    split, _ = inspected(model=WINDOWED, device_profile=str(own))
    assert (split.mode, split.reason) == ("off", SplitRefusal.ATTENTION_NOT_MEASURED), split.detail


@pytest.mark.full
def test_any_number_of_tokens_is_cut_where_one_share_of_them_pays_for_all() -> None:
    split, graph = inspected(bounds=(4096, 8192))
    first, second = split.sizes
    assert split.mode == "split" and split.joins == {} and str(first).startswith("s*") and second == f"s-({first})"
    assert split.overlap is not None and split.overlap.exposed == {"nothing_left": 1}
    environment = compat.graph_fake_mode(graph).shape_env
    assert not environment.guards and not any(environment.deferred_runtime_asserts.values())
    fixed, _ = inspected(bounds=(2048, 8192), split="600")
    assert (fixed.mode, fixed.sizes) == ("split", (600, "s-(600)"))


@pytest.mark.full
@pytest.mark.parametrize("tokens", [{"seq": 8192}, {"bounds": (4096, 8192)}])
def test_kernels_of_halves_are_not_combined(tokens: dict[str, Any]) -> None:
    with inductor_config.patch(combo_kernels=True, benchmark_combo_kernel=True):
        inspected(seq=64)
        assert inductor_config.combo_kernels, "a graph that is not split"
        split, _ = inspected(**tokens)
        assert split.mode == "split" and not inductor_config.combo_kernels
    assert not inductor_config.combo_kernels


@pytest.mark.full
@pytest.mark.parametrize("seq", [8192, 5000])
def test_kernels_are_tuned_with_halves_that_are_no_more_than_the_whole(
    seq: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor runs them to that end where vLLM calls it, and without examples takes the most that each half may have."""
    hints: list[tuple[int, int]] = []
    codegen = Scheduler.codegen

    def noted(scheduler: Scheduler) -> None:
        sizes = V.graph.sizevars
        halves = [symbol for symbol in sizes.shape_env.var_to_range if str(symbol).startswith("u")]
        for first, second in zip(halves[::2], halves[1::2], strict=True):
            hints.append((sizes.optimization_hint(first + second), sizes.optimization_hint(7 * second)))
        codegen(scheduler)

    monkeypatch.setattr(Scheduler, "codegen", noted)
    code_of_layer(seq, (4096, 8192))
    assert hints and all(whole == seq and 0 < scaled < 7 * seq for whole, scaled in hints)


@pytest.mark.full
def test_examples_are_no_hints_of_what_is_compiled_next() -> None:
    """Those are part of the keys by which vLLM finds that a piece is the same as an earlier one."""
    _, graph = inspected(bounds=(4096, 8192))
    assert not compat.graph_fake_mode(graph).shape_env.var_to_hint_override


@pytest.mark.full
def test_requests_of_any_length_are_split_where_the_plan_does_not_change() -> None:
    split, _ = inspected(batch=4, seq=1024, bounds=(512, 2048))
    assert (split.mode, split.unit, split.sizes) == ("split", "request", (2, 2))


def test_a_layer_is_split_without_being_asked_for() -> None:
    """With the options of a user who gives none but the device that is not there."""
    with fake_cuda():
        decoder = build_decoder(load_config("llama-3.1-8b"), device="cuda", dtype=torch.bfloat16, num_layers=1)
        ids = torch.zeros(1, 2048, dtype=torch.long, device="cuda")
        seen = rewrite(decoder, (ids,), world_size=WORLD_SIZE, config=Config(device_profile="H200"))
    assert seen.report.split is not None
    assert (seen.report.split.asked, seen.report.split.mode, sum(seen.report.split.sizes)) == ("auto", "split", 2048)


def test_a_graph_without_sums_over_ranks_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tw_compile.passes.split.steps.choose_split", lambda *given: pytest.fail("asked for a split"))
    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    with collect_reports() as reports:
        TWCompilePass(Config(device_profile="H200"))(graph)
    assert [report.split for report in reports] == [None]


def test_without_a_profile_a_graph_is_not_analysed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "find_token_axis", lambda *given, **more: pytest.fail("looked for tokens"))
    for found in (
        choose.choose_split(fx.Graph(), Config(), None),
        choose.choose_split_of_host(piece_with_a_call(), Config(), None, HostGraph((1, 64))),
    ):
        assert isinstance(found, choose.NotSplit) and found.reason == "no_device_profile"


def test_a_hosts_refusal_is_the_reason_even_where_a_size_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "find_token_axis", lambda *given, **more: pytest.fail("looked for tokens"))
    host = HostGraph((1, 64), refused=SplitRefused(SplitRefusal.STATE_SPACE, "it has a state"))
    found = choose.choose_split_of_host(piece_with_a_call(), Config(split="8"), None, host)
    assert found == choose.NotSplit(SplitRefusal.STATE_SPACE, "it has a state")


def piece_with_a_call() -> fx.Graph:
    graph = fx.Graph()
    graph.output(graph.call_function(ops.start, (graph.placeholder("x"),)))
    return graph


def compiled_passes(config: Config, monkeypatch: pytest.MonkeyPatch) -> tuple[GraphReport, str, str]:
    """Report, the fused graph, and the graph that the passes left."""
    fused = family_graph("llama", 1, 64)
    graph = copy_of(fused)
    monkeypatch.setattr("tw_compile.passes.fusion.fuse.fuse_all_reduce_rms_norm", lambda *args: [])
    with collect_reports() as reports:
        TWCompilePass(config)(graph)
    return reports[0], snapshot(fused), snapshot(graph)


def failing(self: Duplicator, node: fx.Node, verdict: object) -> None:
    if self.report.duplicated == 5:
        raise RuntimeError("no more")
    _duplicate(self, node, verdict)  # type: ignore[arg-type]


_duplicate = Duplicator.duplicate


@pytest.mark.full
def test_exception_leaves_the_fused_graph_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, tw_log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Duplicator, "duplicate", failing)
    report, before, after = compiled_passes(Config(split="20", strict=False), monkeypatch)
    assert before == after
    assert report.split is not None and (report.split.mode, report.split.reason) == ("off", "split_failed")
    assert report.warning == "RuntimeError: no more"
    warnings = [record for record in tw_log.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and "RuntimeError: no more" in warnings[0].message


def test_exception_raises_when_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Duplicator, "duplicate", failing)
    with pytest.raises(RuntimeError, match="no more"):
        compiled_passes(Config(split="20", strict=True), monkeypatch)


def test_refusal_leaves_the_fused_graph_and_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tw_log: pytest.LogCaptureFixture
) -> None:
    report, before, after = compiled_passes(Config(split="64", strict=True), monkeypatch)
    assert before == after and not report.warning
    lines = [record.getMessage() for record in tw_log.records if "not split" in record.getMessage()]
    assert lines == ["tw_compile: tokens not split, too_few_tokens: a first half of 64 leaves none of 64 tokens"]


def test_graph_that_could_not_be_fused_is_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = family_graph("llama", 1, 64)

    def fail(*args: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("tw_compile.passes.fusion.fuse.fuse_all_reduce_rms_norm", fail)
    before = snapshot(graph)
    with collect_reports() as reports:
        TWCompilePass(Config(split="20", strict=False))(graph)
    assert snapshot(graph) == before
    assert reports[0].split is not None and reports[0].split.reason == "fusion_failed"


def test_nothing_is_split_or_reported_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    report, before, after = compiled_passes(Config(), monkeypatch)
    assert report.split is None and report.as_dict()["split"] is None and before == after


def test_report_survives_json(monkeypatch: pytest.MonkeyPatch) -> None:
    split, _ = inspected()
    found = json.loads(json.dumps(GraphReport(split=split).as_dict()))["split"]
    assert (tuple(found["sizes"]), found["mode"], found["joins"]) == (split.sizes, split.mode, split.joins)
    assert split.plan is not None
    assert (found["plan"]["us"], found["plan"]["gain"]) == (split.plan.us, split.plan.gain)
    assert found["plan"]["predicted"]["no_communication_us"] == split.plan.predicted.no_communication_us
    assert [window["ctas"] for window in found["plan"]["windows"]] == [one.ctas for one in split.plan.windows]


def test_profile_that_is_none_names_its_option() -> None:
    with pytest.raises(ValueError, match=r"tw_compile.device_profile: device profile: expected one of B200, .*'H2'"):
        TWCompilePass(Config(split="auto", device_profile="H2"))(fx.Graph())


def test_identity_of_the_pass_covers_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = TWCompilePass(Config(split="auto", device_profile="H200"))
    before = passes.uuid()
    monkeypatch.setattr(current, "load_profile", lambda name: load_profile("H100"))
    assert passes.uuid() != before


def test_ranks_plan_for_the_profile_of_the_first(
    monkeypatch: pytest.MonkeyPatch, tw_log: pytest.LogCaptureFixture
) -> None:
    config = Config(split="auto", device_profile="H100")
    store = dist.HashStore()
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr("tw_compile.agree.compat.default_store", lambda: store)
    found = []
    for name in ("H200", "H100"):
        agree.forget()
        monkeypatch.setattr(current, "own_profile", lambda config, calibrated, name=name: load_profile(name))
        found.append(current.current_profile(config))
    assert [one.name for one in found if one] == ["H200", "H200"]
    assert "device profiles differ between ranks" in tw_log.text


def code_of_layer(seq: int, bounds: tuple[int, int] | None) -> str:
    with fake_cuda():
        decoder = build_decoder(load_config("llama-3.3-70b"), device="cuda", dtype=torch.bfloat16, num_layers=1)
        ids = torch.zeros(1, seq, dtype=torch.long, device="cuda")
        if bounds is not None:
            torch._dynamo.mark_dynamic(ids, 1, min=bounds[0], max=bounds[1])
        split = str(seq // 2) if bounds is None else "auto"  # a range is split in equal halves
        passes = TWCompilePass(Config(split=split, device_profile="H200", strict=True))
        return compat.inductor_code(decoder, (ids,), passes, "cuda", None, {})


@pytest.mark.full
def test_kernels_of_halves_of_unknown_size_are_tuned_for_as_many_tokens() -> None:
    def tuned_for(bounds: tuple[int, int] | None) -> list[int]:
        code = code_of_layer(8192, bounds)
        sizes = {int(size) for size in re.findall(r"size_hints=\{'x': (\d+)\}", code)}
        return sorted(sizes)[-3:]  # in numbers both halves may have one kernel

    assert tuned_for((4096, 8192)) == tuned_for(None)
