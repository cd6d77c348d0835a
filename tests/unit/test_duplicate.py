"""The split graph computes what the unsplit one does, for whole decoders."""

from __future__ import annotations

import functools
import operator
from itertools import product
from typing import Any

import pytest
import torch
import torch.fx as fx
from graph_builder import GraphBuilder, aten, copy_of, metadata, propagated_metadata, run_graph
from split_graphs import SPLIT_FAMILIES, UNFUSED, WORLD_SIZE, family_graph, random_values, run_alone

from tw_compile.kernels.collective import ops
from tw_compile.kernels.collective.seam import enter_layers, leave_layers
from tw_compile.passes.reasons import JoinReason, SplitRefusal, SplitRefused
from tw_compile.passes.split import SplitReport, find_token_axis, split_tokens
from tw_compile.passes.split.analysis.token_axis import TokenAxis, Unit
from tw_compile.passes.split.rewrite.sizes import Sizes
from tw_compile.planning.halves import FirstHalf
from tw_compile.testing.capture import fake_process_group
from tw_compile.testing.graphs import annotation, assert_annotation, find_ops

EAGER = ("gemma2", "gpt_oss")
WINDOWED = ("mistral", "gemma2", "gpt_oss")
FEW = ("llama", "gemma2", "olmo2", "mixtral", "gpt_oss")
TWO_OF_FEW = [
    family if family in ("llama", "mixtral") else pytest.param(family, marks=pytest.mark.full) for family in FEW
]
"""A capture takes seconds, so the quick tier has a dense family and one with experts."""


@functools.cache
def captured(
    family: str,
    batch: int,
    seq: int,
    dynamic: bool = False,
    fuse: bool = True,
    dtype: torch.dtype = torch.float32,
    padded: bool = False,
    narrow: bool = False,
) -> fx.Graph:
    config = {"config": UNFUSED} if not fuse else {}
    window: dict[str, Any] = {"sliding_window": 16} if family in WINDOWED else {}
    if narrow:
        window |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    with fake_process_group(WORLD_SIZE):
        return family_graph(family, batch, seq, dynamic=dynamic, dtype=dtype, padded=padded, **config, **window)


def split(graph: fx.Graph, first: int | fx.Node, unit: Unit = "token") -> tuple[fx.Graph, SplitReport]:
    """A split copy."""
    copied = copy_of(graph)
    with fake_process_group(WORLD_SIZE):
        report = split_tokens(copied, first, unit=unit)
    assert isinstance(report, SplitReport), report
    copied.lint()
    return copied, report


def assert_same_results(before: fx.Graph, after: fx.Graph, sizes: dict[str, int] | None = None) -> None:
    values = random_values(before, sizes)
    for expected, found in zip(run_alone(before, values), run_alone(after, values), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=5e-5)


@pytest.mark.full
@pytest.mark.parametrize("family", SPLIT_FAMILIES)
def test_one_request_of_63_tokens(family: str) -> None:
    graph = captured(family, 1, 63)
    for first in (1, 32, 62):
        after, report = split(graph, first)
        assert_same_results(graph, after)
        assert set(report.joins) == ({"contracts_tokens"} if family in EAGER else set())
        assert report.duplicated > report.joined


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "seq"),
    [
        *product(SPLIT_FAMILIES, (1025, 4096)),
        *product(("mistral", "gemma2"), (1000,)),
        *product(("llama", "mixtral", "gpt_oss"), (1024,)),
    ],
)
def test_one_long_request(family: str, seq: int) -> None:
    graph = captured(family, 1, seq, narrow=True)
    after, report = split(graph, seq // 3)
    assert_same_results(graph, after)
    assert set(report.joins) == ({"contracts_tokens"} if family in EAGER else set())


@pytest.mark.full
@pytest.mark.parametrize("family", SPLIT_FAMILIES)
def test_symbolic_token_count(family: str) -> None:
    graph = copy_of(captured(family, 1, 63, dynamic=True, narrow=True))
    seq = next(node for node in graph.nodes if isinstance(node.meta["val"], torch.SymInt))
    last = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last):
        first = graph.call_function(operator.floordiv, (seq, 2))
    first.meta["val"] = seq.meta["val"] // 2
    before = copy_of(graph)
    with fake_process_group(WORLD_SIZE):
        assert isinstance(split_tokens(graph, first), SplitReport)
    by_number, _ = split(before, 40)
    symbol = str(seq.meta["val"])
    assert_same_results(before, graph, {symbol: 63})
    assert_same_results(before, by_number, {symbol: 1000})
    assert_same_results(before, graph, {symbol: 1025})


@pytest.mark.few(1)
@pytest.mark.parametrize("family", TWO_OF_FEW)
def test_halves_that_are_computed_when_the_graph_runs(family: str) -> None:
    """The compiler knows nothing of them but bounds, so nothing becomes a guard."""
    graph = copy_of(captured(family, 1, 63, dynamic=True, narrow=True))
    seq = next(node.meta["val"] for node in graph.nodes if isinstance(node.meta["val"], torch.SymInt))
    before, guards = copy_of(graph), len(seq.node.shape_env.guards)
    with fake_process_group(WORLD_SIZE):
        assert isinstance(split_tokens(graph, FirstHalf(32, 1100, 7, 16, 8)), SplitReport)
    assert len(seq.node.shape_env.guards) == guards
    for tokens in (32, 1025):
        assert_same_results(before, graph, {str(seq): tokens})


@pytest.mark.full
@pytest.mark.parametrize("family", FEW)
def test_a_half_may_end_inside_of_a_request(family: str) -> None:
    graph = captured(family, 3, 21)
    for first in (1, 40):
        after, _ = split(graph, first)
        assert_same_results(graph, after)


@pytest.mark.parametrize("family", TWO_OF_FEW)
def test_whole_requests_have_no_join(family: str) -> None:
    graph = captured(family, 3, 21)
    for first in (1, 2):
        after, report = split(graph, first, "request")
        assert_same_results(graph, after)
        assert report.joins == {}


@pytest.mark.full
@pytest.mark.parametrize("family", SPLIT_FAMILIES)
def test_padding_of_ragged_requests_is_respected(family: str) -> None:
    """Requests of 21, 13 and 5 tokens, padded behind them or before."""
    graph = captured(family, 3, 21, padded=True)
    halves = [split(graph, first, unit) for first, unit in ((30, "token"), (2, "request"))]
    for _, report in halves:
        assert family in EAGER or report.joins == {"selects_tokens": 1}, "the padding's rows are looked up once"
    lengths = torch.tensor([[21], [13], [5]])
    results = []
    for seen in (torch.arange(21) < 21, torch.arange(21) < lengths, torch.arange(21) >= 21 - lengths):
        values = [seen.expand(3, 21).long() if is_mask else one for is_mask, one in padding_and_others(graph)]
        results.append(run_alone(graph, values))
        for after, _ in halves:
            for expected, found in zip(results[-1], run_alone(after, values), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=5e-5)
    assert not any(torch.allclose(results[0][0], one[0], rtol=1e-2) for one in results[1:]), "the padding is read"


def padding_and_others(graph: fx.Graph) -> list[tuple[bool, Any]]:
    """Values of the placeholders, and which is the padding's: the second of the integer ones."""
    values = random_values(graph)
    integer = [
        index for index, one in enumerate(values) if isinstance(one, torch.Tensor) and not one.is_floating_point()
    ]
    return [(index == integer[1], value) for index, value in enumerate(values)]


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["llama", "mixtral", pytest.param("olmo2", marks=pytest.mark.full)])
def test_unfused_all_reduces_are_split(family: str) -> None:
    graph = captured(family, 1, 63, fuse=False)
    after, _ = split(graph, 20)
    assert_same_results(graph, after)
    reduces = len(find_ops(graph, "all_reduce"))
    assert len(find_ops(after, "all_reduce")) == 2 * reduces > 0


@pytest.mark.parametrize("family", ["llama", pytest.param("olmo2", marks=pytest.mark.full)])
def test_bfloat16_is_no_further_from_float32_than_the_unsplit_graph(family: str) -> None:
    graph = captured(family, 1, 63, dtype=torch.bfloat16)
    after, _ = split(graph, 24)
    values = random_values(graph)
    exact = [one.float() if isinstance(one, torch.Tensor) and one.is_floating_point() else one for one in values]
    reference = run_alone(captured(family, 1, 63), exact)
    for want, plain, halves in zip(reference, run_alone(graph, values), run_alone(after, values), strict=True):
        assert (halves.float() - want).norm() <= 1.1 * (plain.float() - want).norm()


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_metadata_of_the_halves_is_what_running_them_gives(family: str) -> None:
    after, _ = split(captured(family, 1, 63), 20)
    with fake_process_group(WORLD_SIZE):
        assert metadata(after) == propagated_metadata(after)


def test_both_halves_have_a_slot_of_their_own() -> None:
    after, _ = split(captured("llama", 1, 63), 20)
    starts = [node for node in after.nodes if node.target in (ops.start, ops.mm_start)]
    by_half = {half: [node for node in starts if annotation(node)["split"] == half] for half in (1, 2)}  # type: ignore[index]
    assert len(by_half[1]) == len(by_half[2]) == 5
    for half, nodes in by_half.items():
        assert all(node.args[13] == half - 1 for node in nodes)
        assert all(node.meta["val"][0].shape[0] == (20, 43)[half - 1] for node in nodes)


def test_every_operator_says_which_half_it_belongs_to() -> None:
    after, report = split(captured("llama", 1, 63), 20)
    parts = [annotation(node)["split"] for node in after.nodes if node.op == "call_function"]  # type: ignore[index]
    assert set(parts) == {1, 2, "joined", "shared"}
    keys_and_values = [node for node in find_ops(after, "aten.cat.default") if annotation(node).get("role") == "cat"][
        :4
    ]  # type: ignore[union-attr]
    assert parts.count(1) == parts.count(2) - 4 == report.duplicated + report.slices
    for node in keys_and_values:
        assert_annotation(node, split=2)
    attention = find_ops(after, "_scaled_dot_product_flash_attention_for_cpu")
    assert [annotation(node)["split"] for node in attention] == [1, 2, 1, 2]  # type: ignore[index]


def test_attention_that_joins_says_so() -> None:
    after = copy_of(captured("llama", 1, 63))
    with fake_process_group(WORLD_SIZE):
        report = split_tokens(after, 20, join_attention=True)
    assert isinstance(report, SplitReport) and report.joins == {"attention_planned": 2}
    attention = find_ops(after, "_scaled_dot_product_flash_attention_for_cpu")
    assert len(attention) == 2
    assert_annotation(attention[0], split="joined", reason="attention_planned")
    assert_same_results(captured("llama", 1, 63), after)


def test_positions_and_weights_are_computed_once() -> None:
    after, _ = split(captured("llama", 1, 63), 20)
    assert len(find_ops(after, "aten.cos.default")) == 1
    assert len(find_ops(after, "aten.mm.default")) == 2 * 14


def test_one_token_is_refused() -> None:
    graph = captured("llama", 1, 1)
    count = len(graph.nodes)
    with fake_process_group(WORLD_SIZE):
        refused = split_tokens(graph, 1)
    assert isinstance(refused, SplitRefused) and refused.reason is SplitRefusal.TOO_FEW_TOKENS
    assert len(graph.nodes) == count


@pytest.mark.parametrize("first", [0, 63, -1])
def test_an_empty_half_is_bad_input(first: int) -> None:
    with pytest.raises(ValueError, match="first: expected 1 to 62 tokens, got"):
        split_tokens(copy_of(captured("llama", 1, 63)), first)


def test_a_half_whose_size_is_known_too_late_is_bad_input() -> None:
    b = GraphBuilder()
    h = b.call(aten.relu.default, b.input(6, 4))
    first = b.call(aten.sym_size.int, h, 1)
    b.finish(h)
    axis = find_token_axis(b.graph, tokens=6)
    assert isinstance(axis, TokenAxis)
    with pytest.raises(ValueError, match=r"expected a node before every tensor's, got sym_size.*, after relu"):
        split_tokens(b.graph, first, axis=axis)


def test_an_error_leaves_the_graph_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from tw_compile.passes.split.rewrite import duplicate

    graph = copy_of(captured("llama", 1, 63))
    before = str(graph)

    def fail(*args: object) -> None:
        raise RuntimeError("late")

    monkeypatch.setattr(duplicate.Duplicator, "joined", fail)
    with fake_process_group(WORLD_SIZE), pytest.raises(RuntimeError, match="late"):
        split_tokens(graph, 20)
    assert str(graph) == before


def split_by_hand(b: GraphBuilder, first: int, *outputs: fx.Node) -> SplitReport | SplitRefused:
    b.finish(*outputs)
    axis = find_token_axis(b.graph, tokens=6)
    assert isinstance(axis, TokenAxis), axis
    return split_tokens(b.graph, first, axis=axis)


def test_an_operator_that_writes_to_a_split_value_is_refused() -> None:
    b = GraphBuilder()
    h = b.call(aten.relu.default, b.input(6, 4))
    refused = split_by_hand(b, 2, b.call(aten.add_.Tensor, h, 1.0))
    assert isinstance(refused, SplitRefused) and refused.reason is SplitRefusal.TOKENS_MUTATED


def test_strides_of_a_token_dependent_value_are_not_relied_upon() -> None:
    b = GraphBuilder()
    h = b.call(aten.relu.default, b.input(6, 4))
    refused = split_by_hand(b, 2, b.call(aten.as_strided.default, h, [4, 6], [1, 4]))
    assert isinstance(refused, SplitRefused) and refused.reason is SplitRefusal.STRIDES_READ


def test_outputs_that_share_memory_share_it_still() -> None:
    """A caller that writes to one of them changes the others."""
    b = GraphBuilder()
    x = b.input(6, 4)
    rows = b.call(aten.relu.default, x)
    turned = b.call(aten.permute.default, rows, [1, 0])
    left, right = (b.call(operator.getitem, b.call(aten.split.Tensor, rows, 2, 1), index) for index in (0, 1))
    others = b.view(b.call(aten.neg.default, rows), 6, 2, 2), b.view(x, 3, 2, 4)
    outputs = rows, turned, left, b.call(aten.unsqueeze.default, right, 0), *others
    whole = copy_of_finished(b, *outputs)
    assert isinstance(split_by_hand(b, 2, *outputs), SplitReport)
    values = torch.randn(6, 4)
    for graph in (whole, b.graph):
        *found, _, given = run_graph(graph, [values])
        assert len({one.untyped_storage().data_ptr() for one in found}) == 1
        assert given.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
    torch.testing.assert_close(run_graph(b.graph, [values]), run_graph(whole, [values]))


def test_after_a_join_the_next_matmul_is_split_again() -> None:
    b = GraphBuilder()
    x, w = b.input(6, 4), b.input(4, 4)
    flipped = b.call(aten.flip.default, b.call(aten.relu.default, x), [0])
    out = b.call(aten.mm.default, flipped, w)
    before = copy_of_finished(b, out)
    report = split_by_hand(b, 2, out)
    assert isinstance(report, SplitReport) and report.joins == {"selects_tokens": 1}
    assert len(find_ops(b.graph, "aten.mm.default")) == 2 and len(find_ops(b.graph, "flip")) == 1
    values = [torch.randn(6, 4), torch.randn(4, 4)]
    torch.testing.assert_close(run_graph(b.graph, values), run_graph(before, values))


@pytest.mark.parametrize("first", [3, 8, 10])
def test_whole_keys_of_several_requests_are_cut_though_heads_lie_before_their_tokens(first: int) -> None:
    b = GraphBuilder()
    rows, key = b.call(aten.relu.default, b.input(3, 8, 8)), b.input(3, 2, 8, 4)
    query = b.call(aten.permute.default, b.view(rows, 3, 8, 2, 4), [0, 2, 1, 3])
    attention = b.call(aten.scaled_dot_product_attention.default, query, key, key, is_causal=True)
    b.finish(b.call(aten.permute.default, attention, [0, 2, 1, 3]))
    before = copy_of(b.graph)
    axis = find_token_axis(b.graph, tokens=24)
    assert isinstance(axis, TokenAxis)
    report = split_tokens(b.graph, first, axis=axis)
    assert isinstance(report, SplitReport) and report.joins == {}
    values = [torch.randn(3, 8, 8), torch.randn(3, 2, 8, 4)]
    torch.testing.assert_close(run_graph(b.graph, values), run_graph(before, values))


@pytest.mark.parametrize("masks", [1, 3], ids=["one mask", "a mask each"])
def test_whole_requests_take_their_part_of_what_is_whole(masks: int) -> None:
    b = GraphBuilder()
    rows, key, mask = b.call(aten.relu.default, b.input(3, 8, 8)), b.input(3, 2, 8, 4), b.input(masks, 1, 8, 8)
    query = b.call(aten.permute.default, b.view(rows, 3, 8, 2, 4), [0, 2, 1, 3])
    attention = b.call(aten.scaled_dot_product_attention.default, query, key, key, mask)
    b.finish(b.call(aten.permute.default, attention, [0, 2, 1, 3]))
    before = copy_of(b.graph)
    axis = find_token_axis(b.graph, tokens=24, unit="request")
    assert isinstance(axis, TokenAxis)
    report = split_tokens(b.graph, 2, axis=axis)
    assert isinstance(report, SplitReport) and report.joins == {}
    given = [node.args[3].meta["val"].shape[0] for node in find_ops(b.graph, "scaled_dot_product_attention")]  # type: ignore[union-attr]
    assert given == ([2, 1] if masks == 3 else [1, 1])
    values = [torch.randn(3, 8, 8), torch.randn(3, 2, 8, 4), torch.randn(masks, 1, 8, 8)]
    torch.testing.assert_close(run_graph(b.graph, values), run_graph(before, values))


def copy_of_finished(b: GraphBuilder, *outputs: fx.Node) -> fx.Graph:
    copied = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    copied.graph_copy(b.graph, mapping)
    copied.output([mapping[node] for node in outputs])
    return copied


def test_what_is_like_a_permutation_is_none() -> None:
    b = GraphBuilder()
    scores = b.input(6, 4)
    x = b.call(aten.relu.default, scores)
    experts = b.call(operator.getitem, b.call(aten.topk.default, scores, 2), 1)
    flat = b.call(aten.clone.default, b.call(aten.reshape.default, experts, [12]))
    order = b.call(operator.getitem, b.call(aten.sort.stable, flat, stable=True, dim=0, descending=False), 1)
    first = b.call(aten.div.Tensor_mode, b.call(aten.zeros_like.default, order), 2, rounding_mode="floor")
    undone = b.call(operator.getitem, b.call(aten.sort.default, order), 1)
    rows = b.call(aten.index.Tensor, b.call(aten.index.Tensor, x, [first]), [undone])
    graph = b.finish(rows)
    values = random_values(graph)
    expected = run_alone(graph, values)
    report = split_tokens(graph, 2, axis=find_token_axis(graph, tokens=6))
    assert isinstance(report, SplitReport) and JoinReason.ROUTING_NOT_UNDONE in report.joins
    torch.testing.assert_close(run_alone(graph, values), expected)


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("enters", [False, True])
def test_halves_are_left_only_by_a_graph_that_enters_with_them(enters: bool) -> None:
    """Before the first of several groups that are alike there may be layers of another kind."""
    b = GraphBuilder()
    left = b.input(6, 4)
    entered = b.call(enter_layers, left, "0") if enters else None
    residual = b.call(aten.neg.default, left if entered is None else b.call(operator.getitem, entered, 0))
    b.call(leave_layers, b.call(aten.relu.default, residual), residual, "0")
    graph = b.finish(list(b.graph.nodes)[-1])
    report = split_tokens(graph, 2, axis=find_token_axis(graph, tokens=6))
    assert isinstance(report, SplitReport)
    leaves = graph.find_nodes(op="call_function", target=leave_layers)
    assert len(leaves) == (2 if enters else 1) and (JoinReason.LEFT_WHOLE in report.joins) is not enters


def test_sizes_are_computed_by_nodes_of_their_own() -> None:
    graph = copy_of(captured("llama", 1, 63, dynamic=True, narrow=True))
    seq = next(node.meta["val"] for node in graph.nodes if isinstance(node.meta["val"], torch.SymInt))
    sizes = Sizes(graph, seq, 5)
    node = sizes.argument(seq * seq * seq + 3 * (seq // 4))
    assert int(node.meta["val"].node.expr.subs({seq.node.expr: 63})) == 63**3 + 3 * 15
    with pytest.raises(NotImplementedError, match="no node computes Max"):
        sizes.argument(torch.sym_max(seq, 64))
