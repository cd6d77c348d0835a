"""Where the tokens are said to be, operator by operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.fx as fx
from graph_builder import GraphBuilder, aten
from torch.library import Library

from tw_compile.passes.reasons import JoinReason, SplitRefusal, SplitRefused
from tw_compile.passes.split import (
    Join,
    Local,
    OperatorCall,
    Rows,
    RowWise,
    analyse,
    declare_attention,
    find_token_axis,
    token_rule,
)
from tw_compile.passes.split.analysis.token_axis import Analysis, TokenAxis

TOKENS = 6


def analysed(b: GraphBuilder, *outputs: fx.Node, **axis: object) -> Analysis:
    b.finish(*outputs)
    found = find_token_axis(b.graph, tokens=TOKENS, **axis)  # type: ignore[arg-type]
    assert isinstance(found, TokenAxis), found
    return analyse(b.graph, found)


def ids_to_rows(b: GraphBuilder, *shape: int) -> fx.Node:
    """``[*shape, 8]`` from token ids."""
    return b.call(aten.embedding.default, b.input(50, 8), b.input(*shape, dtype=torch.int64))


def test_ids_make_an_embedding_row_wise() -> None:
    b = GraphBuilder()
    rows = ids_to_rows(b, 1, TOKENS)
    assert analysed(b, rows).layouts[rows] == Rows(1)


def test_a_view_may_flatten_batch_and_sequence_and_part_them_again() -> None:
    b = GraphBuilder()
    rows = ids_to_rows(b, 2, 3)
    flat = b.view(rows, TOKENS, 8)
    heads = b.view(flat, 2, 3, 2, 4)
    first = b.call(aten.permute.default, heads, [0, 2, 1, 3])
    found = analysed(b, first).layouts
    assert found[rows] == Rows(1, 1, 0)
    assert found[flat] == Rows(0)
    assert found[heads] == Rows(1, 1, 0)
    assert found[first] == Rows(2, 1, 0)


def test_the_tokens_of_requests_of_one_token_are_in_the_dim_of_the_requests() -> None:
    """A dim of one token is broadcast against others, so it can't hold all tokens of a half."""
    b = GraphBuilder()
    ids = b.input(TOKENS, 1, dtype=torch.int64)
    wide = b.call(aten.mul.Tensor, ids, b.input(TOKENS, 5))
    expanded = b.call(aten.expand.default, ids, [TOKENS, 5])
    found = analysed(b, wide, expanded).layouts
    assert found[ids] == found[wide] == found[expanded] == Rows(0)


def test_entries_of_a_token_are_counted() -> None:
    b = GraphBuilder()
    rows = ids_to_rows(b, 1, TOKENS)
    entries = b.view(rows, TOKENS * 2, 4)
    assert analysed(b, entries).layouts[entries] == Rows(0, 2)


def test_requests_are_units_of_their_tokens() -> None:
    b = GraphBuilder()
    rows = ids_to_rows(b, 2, 3)
    flat = b.view(rows, TOKENS, 8)
    heads = b.call(aten.permute.default, b.view(rows, 2, 3, 2, 4), [0, 2, 1, 3])
    heads = b.call(aten.reshape.default, heads, [4, 3, 4])
    found = analysed(b, flat, heads, unit="request").layouts
    assert found[rows] == Rows(0)
    assert found[flat] == Rows(0, 3)
    assert found[heads] == Rows(0, 2)


def joins(b: GraphBuilder, node: fx.Node) -> JoinReason:
    verdict = analysed(b, node).verdicts[node]
    assert isinstance(verdict, Join) and node.name in verdict.detail
    return verdict.reason


def test_reasons_of_joins() -> None:
    def reason(target: object, *args: object, **kwargs: object) -> JoinReason:
        b = GraphBuilder()
        rows = b.view(ids_to_rows(b, 1, TOKENS), TOKENS, 8)
        given = [rows if one is ... else one for one in args]
        return joins(b, b.call(target, *given, **kwargs))

    assert reason(aten.sum.dim_IntList, ..., [0]) is JoinReason.REDUCES_TOKENS
    assert reason(aten._softmax.default, ..., 0, False) is JoinReason.REDUCES_TOKENS
    assert reason(aten.slice.Tensor, ..., 0, 5, 6) is JoinReason.SELECTS_TOKENS
    assert reason(aten.view.default, ..., [3, 16]) is JoinReason.RESHAPES_TOKENS
    assert reason(aten.view.default, ..., [4, 12]) is JoinReason.RESHAPES_TOKENS
    assert reason(aten.cumsum.default, ..., 0) is JoinReason.REDUCES_TOKENS
    assert reason(aten.tril.default, ...) is JoinReason.UNKNOWN_OPERATOR
    assert reason(aten.bernoulli.p, ..., 0.5) is JoinReason.UNKNOWN_OPERATOR


def test_tokens_times_tokens_contracts_them() -> None:
    b = GraphBuilder()
    rows = b.view(ids_to_rows(b, 1, TOKENS), TOKENS, 8)
    assert joins(b, b.call(aten.mm.default, b.call(aten.permute.default, rows, [1, 0]), rows)) is (
        JoinReason.CONTRACTS_TOKENS
    )


def test_tokens_in_different_dims_disagree() -> None:
    b = GraphBuilder()
    rows = b.view(ids_to_rows(b, 1, TOKENS), TOKENS, 8)
    scores = b.call(aten.sum.dim_IntList, rows, [1], True)
    assert joins(b, b.add(scores, b.call(aten.permute.default, scores, [1, 0]))) is JoinReason.OPERANDS_DISAGREE


def routed(b: GraphBuilder, *, bins: int = 4) -> tuple[fx.Node, fx.Node, fx.Node]:
    """The sort, the rows in its order and the sizes of the groups, two of four experts for each token."""
    import operator

    rows = b.view(ids_to_rows(b, 1, TOKENS), TOKENS, 8)
    chosen = b.call(operator.getitem, b.call(aten.topk.default, b.call(aten.mm.default, rows, b.input(8, 4)), 2), 1)
    sort = b.call(aten.sort.default, b.view(chosen, TOKENS * 2))
    keys, permutation = (b.call(operator.getitem, sort, index) for index in (0, 1))
    token = b.call(aten.div.Tensor_mode, permutation, 2, rounding_mode="floor")
    counts = b.call(aten.histc.default, b.cast(keys, torch.float32), bins, 0, bins - 1)
    return sort, b.call(aten.index.Tensor, rows, [token]), counts


def test_rows_in_the_order_of_a_sort_stay_in_their_half() -> None:
    b = GraphBuilder()
    sort, ordered, counts = routed(b)
    analysis = analysed(b)
    assert analysis.layouts[ordered] == Rows(0, 2, None, sort)
    assert isinstance(analysis.layouts[counts], Local)
    assert analysis.joins == {}


def test_a_sort_whose_order_escapes_runs_joined() -> None:
    b = GraphBuilder()
    sort, ordered, _ = routed(b)
    analysis = analysed(b, ordered)
    assert isinstance(analysis.verdicts[sort], Join)
    assert analysis.layouts.get(ordered) is None
    assert analysis.joins["routing_not_undone"] == 1


def test_groups_that_are_not_the_experts_are_not_routed() -> None:
    b = GraphBuilder()
    sort, _, _ = routed(b, bins=3)
    assert isinstance(analysed(b).verdicts[sort], Join)


def test_a_weight_as_large_as_the_tokens_is_no_input_of_tokens() -> None:
    b = GraphBuilder()
    x, weight = b.input(TOKENS, 4), b.input(TOKENS, 4)
    out = b.call(aten.mm.default, x, b.call(aten.permute.default, weight, [1, 0]))
    assert set(analysed(b, out).axis.inputs) == {x}


def test_without_a_size_or_an_all_reduce_there_is_no_axis() -> None:
    b = GraphBuilder()
    b.finish(b.call(aten.relu.default, b.input(TOKENS, 4)))
    refused = find_token_axis(b.graph)
    assert isinstance(refused, SplitRefused) and refused.reason is SplitRefusal.NO_TOKEN_AXIS


def test_the_size_of_the_message_tells_the_tokens() -> None:
    b = GraphBuilder()
    x = b.input(TOKENS, 4)
    b.finish(b.call(torch.ops._c10d_functional.all_reduce.default, x, "sum", "0"))
    found = find_token_axis(b.graph)
    assert isinstance(found, TokenAxis) and found.size == TOKENS and set(found.inputs) == {x}


def test_of_messages_of_several_sizes_the_most_frequent_tells_the_tokens() -> None:
    b = GraphBuilder()
    x, fewer = b.input(TOKENS, 4), b.input(TOKENS // 2, 4)
    b.finish(b.all_reduce(b.all_reduce(x)), b.all_reduce(fewer))
    found = find_token_axis(b.graph)
    assert isinstance(found, TokenAxis) and found.size == TOKENS and set(found.inputs) == {x}


@pytest.fixture
def library() -> Iterator[Library]:
    library = Library("tw_compile_test_rules", "DEF")
    library.define("experts(Tensor x, Tensor weight) -> Tensor")
    torch.library.register_fake("tw_compile_test_rules::experts", lambda x, weight: x.clone(), lib=library)
    yield library
    library._destroy()


def test_one_decorator_declares_an_operator(library: Library) -> None:
    experts = torch.ops.tw_compile_test_rules.experts.default

    def layout() -> object:
        b = GraphBuilder()
        rows = b.view(ids_to_rows(b, 1, TOKENS), TOKENS, 8)
        out = b.call(experts, rows, b.input(8, 8))
        return analysed(b, out).layouts.get(out)

    assert layout() is None

    @token_rule("tw_compile_test_rules::experts")
    def _experts(call: OperatorCall) -> RowWise | Join:
        return call.row_wise_over(0, dim=0)

    assert layout() == Rows(0)


def test_an_operand_that_a_rule_forgets_joins(library: Library) -> None:
    experts = torch.ops.tw_compile_test_rules.experts.default

    @token_rule(experts)
    def _experts(call: OperatorCall) -> RowWise | Join:
        return call.row_wise_over(0, dim=0)

    b = GraphBuilder()
    rows = b.view(ids_to_rows(b, 1, TOKENS), TOKENS, 8)
    forgotten = b.call(aten.relu.default, rows)
    call = b.call(experts, rows, forgotten)
    verdict = analysed(b, call).verdicts[call]
    assert isinstance(verdict, Join) and verdict.reason is JoinReason.UNKNOWN_OPERATOR
    assert f"its token rule did not look at {forgotten.name}," in verdict.detail


def test_a_rule_without_a_verdict_is_refused_by_the_name_of_its_operator(library: Library) -> None:
    experts = torch.ops.tw_compile_test_rules.experts.default

    @token_rule(experts)
    def _experts(call: OperatorCall) -> RowWise | Join:
        call.row_wise_over(0, dim=0)  # type: ignore[return]

    b = GraphBuilder()
    rows = b.view(ids_to_rows(b, 1, TOKENS), TOKENS, 8)
    call = b.call(experts, rows, b.input(8, 8))
    with pytest.raises(TypeError, match=r"token rule of tw_compile_test_rules\.experts\.default: .* got None"):
        analysed(b, call)


@pytest.mark.parametrize("declare", [token_rule, declare_attention])
def test_targets_that_no_graph_calls_are_refused(library: Library, declare: Callable[..., object]) -> None:
    for target in ("tw_compile_test_rules.experts", torch.ops.tw_compile_test_rules.experts):
        with pytest.raises(ValueError, match=r"targets: expected an overload .* got .*experts"):
            declare(target)
