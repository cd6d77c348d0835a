"""Which fused calls get a wire, which do not and why, and what becomes of the graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.fx as fx
from graph_builder import GraphBuilder, aten
from torch._inductor import config as inductor_config

from tw_compile import Config, TWCompilePass, collect_reports
from tw_compile.gating.facts import Node
from tw_compile.gating.gate import Gate
from tw_compile.gating.table import Source, Table, WireEntry, read_table, table_text
from tw_compile.graph.predicates import operator_name
from tw_compile.kernels.collective import ops
from tw_compile.kernels.collective.transport import registered
from tw_compile.kernels.collective.transports import TRANSPORTS
from tw_compile.own_gate import own_gate
from tw_compile.passes.contract import TokenRange
from tw_compile.passes.fusion.feeds import feeds_of
from tw_compile.passes.fusion.wire import Threshold, message_refusal, wire_threshold
from tw_compile.passes.reasons import WireRefusal, WireRefused
from tw_compile.report import GraphReport
from tw_compile.testing import fake_process_group

T, H, HEADS = 8, 256, 4
BF16 = torch.bfloat16
MEBI = 1 << 20


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with fake_process_group(2):
        yield


class Layers(GraphBuilder):
    """Attention and MLP one behind the other, each with its sum, residual and norm."""

    def __init__(self, hidden: int = H, dtype: torch.dtype = BF16) -> None:
        super().__init__()
        self.columns, self.dtype = hidden, dtype
        self.stream = self.rows()
        self.hidden = self.rms_norm(self.stream, self.input(hidden, dtype=dtype))

    def rows(self) -> fx.Node:
        return self.input(T, self.columns, dtype=self.dtype)

    def weight(self) -> fx.Node:
        return self.input(self.columns, self.columns, dtype=self.dtype)

    def mm(self, x: fx.Node) -> fx.Node:
        return self.call(aten.mm.default, x, self.weight())

    def heads(self, x: fx.Node) -> fx.Node:
        return self.call(aten.permute.default, self.view(x, 1, T, HEADS, self.columns // HEADS), [0, 2, 1, 3])

    def attention(self) -> fx.Node:
        q, k, v = (self.heads(self.mm(self.hidden)) for _ in range(3))
        out = self.call(aten.scaled_dot_product_attention.default, q, k, v)
        return self.view(self.call(aten.clone.default, self.call(aten.permute.default, out, [0, 2, 1, 3])), T, -1)

    def activations(self) -> fx.Node:
        gate, up = self.mm(self.hidden), self.mm(self.hidden)
        return self.call(aten.mul.Tensor, self.call(aten.silu.default, gate), up)

    def add(self, left: Any, right: Any, **kwargs: Any) -> fx.Node:
        return super().add(left, right, **kwargs)

    def summed(self, partial: fx.Node) -> fx.Node:
        """The message; what follows it is the layer's next part."""
        self.stream = self.add(self.stream, self.all_reduce(partial))
        self.hidden = self.rms_norm(self.stream, self.input(self.columns, dtype=self.dtype))
        return partial

    def attention_part(self) -> fx.Node:
        return self.summed(self.mm(self.attention()))

    def mlp_part(self) -> fx.Node:
        return self.summed(self.mm(self.activations()))

    def finished(self) -> fx.Graph:
        return self.output(self.hidden, self.stream).graph


def rewritten(layers: Layers, **options: Any) -> tuple[list[str], GraphReport, fx.Graph]:
    """The wires of the starts, in graph order; the report; the graph."""
    graph = layers.finished()
    with collect_reports() as reports:
        TWCompilePass(Config(strict=True, **{"split": "off", **options}))(graph)
    starts = [node for node in graph.nodes if operator_name(node) == operator_name_of(ops.start)]
    return [node.kwargs.get("wire", "exact") for node in starts], reports[0], graph


def operator_name_of(overload: Any) -> str:
    return str(overload._schema.name)


def one_layer(**changes: Any) -> Layers:
    layers = Layers(**changes)
    layers.attention_part()
    layers.mlp_part()
    return layers


def test_nobody_is_given_a_wire_unasked() -> None:
    wires, report, _ = rewritten(one_layer(), wire_min_bytes=0)
    assert wires == ["exact", "exact"]
    assert report.wires == {}
    assert [(site.wire, site.wire_refusal, site.feeds) for site in report.sites] == [("exact", "", "")] * 2


@pytest.mark.parametrize("wire", ("int8", "int6"))
def test_all_sites_get_what_is_asked_for(wire: str) -> None:
    wires, report, _ = rewritten(one_layer(), wire=wire, wire_min_bytes=0)
    assert wires == [wire, wire]
    assert report.wires == {wire: 2}
    assert [site.feeds for site in report.sites] == ["attention", "mlp"]
    assert all("tw_compile.wire_min_bytes" in site.detail for site in report.sites)


@pytest.mark.parametrize(("sites", "expected"), (("attention", ["int8", "exact"]), ("mlp", ["exact", "int8"])))
def test_sites_are_chosen_by_what_feeds_them(sites: str, expected: list[str]) -> None:
    wires, report, _ = rewritten(one_layer(), wire="int8", wire_sites=sites, wire_min_bytes=0)
    assert wires == expected
    assert report.wires == {"int8": 1, WireRefusal.SITE_EXCLUDED: 1}


def test_halves_have_the_wire_of_the_whole() -> None:
    graph = one_layer().finished()
    with collect_reports() as reports:
        TWCompilePass(Config(strict=True, split="4", wire="int8", wire_sites="mlp", wire_min_bytes=0))(graph)
    assert reports[0].split is not None and reports[0].split.mode != "off", reports[0].split
    starts = [node for node in graph.nodes if operator_name(node) == operator_name_of(ops.start)]
    assert sorted(node.kwargs.get("wire", "exact") for node in starts) == ["exact", "exact", "int8", "int8"]
    tokens = {node.args[0].meta["val"].shape[0] for node in starts}
    assert tokens == {4}


def refused(layers: Layers, **options: Any) -> tuple[str, str]:
    """Of the last site: why it keeps exact rows. The graph is that of no wire at all."""
    wires, report, graph = rewritten(layers, **{"wire": "int8", "wire_min_bytes": 0, **options})
    assert wires[-1] == "exact" and report.sites[-1].decision == "fused" and report.sites[-1].wire == "exact"
    assert "wire" not in str(graph)
    return report.sites[-1].wire_refusal, report.sites[-1].detail


def test_rows_that_are_no_whole_groups_are_left() -> None:
    reason, detail = refused(one_layer(hidden=192))
    assert reason == WireRefusal.HIDDEN_NOT_IN_GROUPS and "192 is no multiple of 128" in detail


def test_messages_of_32_bits_are_left() -> None:
    assert refused(one_layer(dtype=torch.float32))[0] == WireRefusal.DTYPE_NOT_SUPPORTED


def test_small_messages_are_left() -> None:
    nbytes = T * H * 2
    reason, detail = refused(one_layer(), wire_min_bytes=nbytes + 1)
    assert reason == WireRefusal.MESSAGE_TOO_SMALL and "4 KiB < 4097 bytes" in detail
    assert rewritten(one_layer(), wire="int8", wire_min_bytes=nbytes)[0] == ["int8", "int8"]


def test_without_an_option_messages_below_a_mebibyte_are_left() -> None:
    reason, detail = refused(one_layer(), wire_min_bytes=None)
    assert reason == WireRefusal.MESSAGE_TOO_SMALL and "1 MiB" in detail and "not measured" in detail


def test_auto_is_exact_where_no_table_says_more() -> None:
    assert refused(one_layer(), wire="auto", wire_min_bytes=None)[0] == WireRefusal.NOT_MEASURED


def test_precision_casts_are_kept() -> None:
    with inductor_config.patch(emulate_precision_casts=True):
        assert refused(one_layer())[0] == WireRefusal.PRECISION_CASTS_KEPT


def test_a_transport_that_serves_no_wire_keeps_exact_rows() -> None:
    with registered(replace(TRANSPORTS["gloo"], name="plain", wires=(), preference=None)):
        assert refused(one_layer(), transport="plain")[0] == WireRefusal.TRANSPORT_WITHOUT_WIRE


def test_decoding_over_nvlink_stays_exact_whatever_wire_is_asked_for() -> None:
    gate = own_gate(Config(), Node((9, 0), False))
    for wire in ("int8", "int6", "auto"):
        for world_size in (2, 4, 8):
            left = message_refusal(Config(wire=wire), gate, world_size, "p2p", 8192, BF16, (64, 64))
            reason = (
                "NOT_MEASURED"
                if world_size == 8
                else "ACCURACY_NOT_MEASURED"
                if wire == "auto"
                else "MESSAGE_TOO_SMALL"
            )
            assert isinstance(left, WireRefused) and left.reason == WireRefusal[reason]
            assert ("at 1 MiB codes take 1." in left.detail) is (reason == "MESSAGE_TOO_SMALL")
    assert message_refusal(Config(wire="int8", wire_min_bytes=2 * MEBI), gate, 8, "p2p", 8192, BF16, (128, None)) == (
        Threshold(2 * MEBI, "tw_compile.wire_min_bytes")
    )
    left = message_refusal(Config(wire="int8"), gate, 8, "multimem", 8192, BF16, (16384, 16384))
    assert isinstance(left, WireRefused) and left.reason == WireRefusal.TRANSPORT_WITHOUT_WIRE


@pytest.mark.parametrize(
    ("rows", "options", "wire"),
    [
        ((767, 767), {}, True),
        ((768, 768), {}, False),
        ((512, 767), {}, True),
        ((512, 768), {}, False),
        ((512, None), {}, False),  # for any number of tokens: long ones get a graph of their own, which is split
        ((512, None), {"split": "off"}, True),
        ((768, 768), {"split": "off"}, True),
        ((768, 768), {"split": "512"}, False),
        ((768, 768), {"wire_min_bytes": 0}, True),
    ],
)
def test_over_nvlink_rows_stay_exact_where_halves_may_hide_them(
    rows: TokenRange, options: dict[str, Any], wire: bool
) -> None:
    gate = own_gate(Config(), Node((9, 0), False))
    answer = message_refusal(Config(wire="int8", **options), gate, 4, "p2p", 8192, BF16, rows)
    if wire:
        assert isinstance(answer, Threshold)
    else:
        assert isinstance(answer, WireRefused) and answer.reason == WireRefusal.EXACT_HALVES_FASTER
        assert "from 12 MiB on" in answer.detail and "744 us in exact halves" in answer.detail


def test_only_over_peer_memory_do_halves_keep_rows_exact() -> None:
    assert [entry.name for entry in TRANSPORTS if entry.exact_halves is not None] == ["p2p"]
    gate = own_gate(Config(), Node((9, 0), False))
    assert isinstance(message_refusal(Config(wire="int8"), gate, 2, "host", 8192, BF16, (4096, 4096)), Threshold)


def test_a_graph_for_all_token_counts_goes_by_its_smallest_message() -> None:
    gate = own_gate(Config(), Node((9, 0), False))
    left = message_refusal(Config(wire="int8"), gate, 2, "nccl", 4096, BF16, (2, None))
    assert isinstance(left, WireRefused) and left.reason == WireRefusal.MESSAGE_TOO_SMALL
    assert "one graph for all token counts" in left.detail
    assert isinstance(message_refusal(Config(wire="int8"), gate, 2, "nccl", 4096, BF16, (128, None)), Threshold)


MEASURED = Source("h200", "measured", ("2x H200", "torch 2.11", "2026-11-24", "tw-compile bench kernel --wire"))


def measured(*wires: WireEntry) -> Table:
    return Table("mine.toml", "sm90", (), wires)


def test_tables_say_from_which_size_on() -> None:
    shipped = own_gate(Config(), Node((9, 0), False))
    table = measured(
        WireEntry("int8", "any", "p2p", 4 * MEBI, MEASURED), WireEntry("int8", 8, "p2p", 2 * MEBI, MEASURED)
    )
    gate = Gate(shipped.node, shipped.settings, (table, *shipped.tables))
    assert wire_threshold(Config(wire="int8"), gate, 8, "p2p").nbytes == 2 * MEBI
    assert wire_threshold(Config(wire="auto"), gate, 4, "p2p").nbytes == 4 * MEBI
    assert "mine.toml: int8, world_size any, p2p, from 4 MiB; measured on 2x H200" in (
        wire_threshold(Config(wire="auto"), gate, 4, "p2p").why
    )
    assert wire_threshold(Config(wire="int6"), gate, 8, "p2p").nbytes is None
    assert wire_threshold(Config(wire="int8", wire_min_bytes=5), gate, 8, "p2p").nbytes == 5
    assert gate.digest() != shipped.digest()


def test_tables_are_read_as_they_are_written() -> None:
    table = measured(WireEntry("int8", 8, "p2p", 2 * MEBI, MEASURED), WireEntry("int6", "any", "host", 0, MEASURED))
    table = replace(table, wires=(*table.wires, WireEntry("int8", 4, "p2p", MEBI, MEASURED, "slower below")))
    assert read_table(table_text(table), "mine.toml") == table


@pytest.mark.parametrize(
    ("change", "message"),
    (
        (('wire = "int8"', 'wire = "int5"'), "wires[0].wire: expected one of int8, int6, int4, got 'int5'"),
        (('transport = "p2p"', 'transport = "pcie"'), "wires[0].transport: expected one of"),
        (('transport = "p2p"', 'transport = "multimem"'), "wires[0].wire: expected one of , got 'int8'"),
        (("from_bytes = 2097152", "from_bytes = -1"), "wires[0].from_bytes: expected a number of bytes, got -1"),
        (("world_size = 8", "world_size = 1"), "wires[0].world_size: expected a number of at least 2"),
        (("world_size = 8", "ranks = 8"), "wires[0]: expected the keys"),
    ),
)
def test_tables_of_wires_that_are_wrong_are_refused(change: tuple[str, str], message: str) -> None:
    text = table_text(measured(WireEntry("int8", 8, "p2p", 2 * MEBI, MEASURED)))
    with pytest.raises(ValueError, match=r"^mine\.toml: ") as error:
        read_table(text.replace(*change), "mine.toml")
    assert message in str(error.value)


def test_one_wire_has_one_threshold() -> None:
    entry = WireEntry("int8", 8, "p2p", 2 * MEBI, MEASURED)
    with pytest.raises(ValueError, match="wires\\[1\\]: expected one entry for int8, 8, p2p"):
        read_table(table_text(measured(entry, replace(entry, from_bytes=0))), "mine.toml")


class TestFeeds:
    """What makes a message, by the shape of the graph behind it."""

    def test_a_piece_that_begins_behind_attention(self) -> None:
        layers = Layers()
        heads = layers.input(T, HEADS, H // HEADS, dtype=BF16)
        assert feeds_of([layers.mm(layers.view(heads, T, H))]) == {"attention"}

    def test_attention_of_matmuls(self) -> None:
        layers = Layers()
        q, k, v = (layers.view(layers.mm(layers.hidden), 1, T, H) for _ in range(3))
        scores = layers.call(aten.bmm.default, q, layers.call(aten.permute.default, k, [0, 2, 1]))
        out = layers.call(aten.bmm.default, layers.call(aten._softmax.default, scores, -1, False), v)
        assert feeds_of([layers.mm(layers.view(out, T, H))]) == {"attention"}

    def test_experts_in_batches(self) -> None:
        layers = Layers()
        both = [layers.input(2, H, H, dtype=BF16) for _ in range(2)]
        rows = layers.call(aten.expand.default, layers.view(layers.hidden, 1, T, H), [2, T, H])
        inner = layers.call(aten.relu.default, layers.call(aten.bmm.default, rows, both[0]))
        out = layers.call(aten.bmm.default, inner, both[1])
        assert feeds_of([layers.call(aten.sum.dim_IntList, out, [0])]) == {"mlp"}

    def test_a_router_is_no_part_of_the_answer(self) -> None:
        layers = Layers()
        layers.attention_part()
        weights = layers.call(aten._softmax.default, layers.mm(layers.hidden), -1, False)
        assert feeds_of([layers.call(aten.mul.Tensor, layers.mm(layers.activations()), weights)]) == {"mlp"}

    def test_a_gate_on_attention_is_attention(self) -> None:
        layers = Layers()
        gate = layers.call(aten.sigmoid.default, layers.mm(layers.hidden))
        assert feeds_of([layers.mm(layers.call(aten.mul.Tensor, layers.attention(), gate))]) == {"attention"}

    def test_both_in_one_message(self) -> None:
        layers = Layers()
        both = layers.add(layers.mm(layers.attention()), layers.mm(layers.activations()))
        layers.summed(both)
        assert feeds_of([both]) == {"attention", "mlp"}
        wires, report, _ = rewritten(layers, wire="int8", wire_sites="mlp", wire_min_bytes=0)
        assert wires == ["exact"] and "that of attention+mlp" in report.sites[0].detail

    def test_what_nobody_recognises(self) -> None:
        layers = Layers()
        assert feeds_of([layers.call(aten.relu.default, layers.rows())]) == frozenset()
