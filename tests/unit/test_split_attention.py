"""Attention of a sequence that is cut: which operators the halves get, and that they compute what the whole did."""

from __future__ import annotations

import operator
import random
from typing import Any

import pytest
import torch
import torch.fx as fx
from graph_builder import GraphBuilder, aten, copy_of, prims, run_graph
from torch._higher_order_ops.flex_attention import flex_attention

from tw_compile.kernels.attention.suffix import attention_suffix
from tw_compile.passes.split import SplitReport, analyse, find_token_axis, split_tokens
from tw_compile.passes.split.analysis.causal_mask import objection_to
from tw_compile.passes.split.analysis.token_axis import TokenAxis
from tw_compile.passes.split.rules.attention import CAUSAL_FROM_BOTTOM_RIGHT
from tw_compile.planning import suffix as own_kernel
from tw_compile.testing.graphs import find_ops

TOKENS, HEADS, WIDTH = 24, 4, 16
FLASH = aten._scaled_dot_product_flash_attention.default
CUDNN = aten._scaled_dot_product_cudnn_attention.default
EFFICIENT = aten._scaled_dot_product_efficient_attention.default
ON_CPU = aten._scaled_dot_product_flash_attention_for_cpu.default
UNDECOMPOSED = aten.scaled_dot_product_attention.default


class Attention:
    """One attention operator between views of ``[batch, TOKENS, HEADS * WIDTH]``."""

    def __init__(
        self,
        target: Any,
        *args: Any,
        batch: int = 1,
        kv_heads: int = HEADS,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        mask: Any = None,
        **kwargs: Any,
    ) -> None:
        self.b = b = GraphBuilder()
        rows = [
            b.input(batch, TOKENS, heads * WIDTH, dtype=dtype, device=device) for heads in (HEADS, kv_heads, kv_heads)
        ]
        operands = [
            b.call(
                aten.permute.default, b.view(b.call(aten.relu.default, one), batch, TOKENS, heads, WIDTH), [0, 2, 1, 3]
            )
            for one, heads in zip(rows, (HEADS, kv_heads, kv_heads), strict=True)
        ]
        given = [mask(b) if one is ... else one for one in args]
        named = {name: mask(b) if one is ... else one for name, one in kwargs.items()}
        made = b.call(target, *operands, *given, **named)
        out = made if isinstance(made.meta["val"], torch.Tensor) else b.call(operator.getitem, made, 0)
        self.whole = fx.Graph()
        b.finish(b.view(b.call(aten.permute.default, out, [0, 2, 1, 3]), batch, TOKENS, HEADS * WIDTH))
        self.whole.output(self.whole.graph_copy(b.graph, {}))

    def split(self, first: int, **options: Any) -> tuple[fx.Graph, SplitReport]:
        batch = self.b.inputs[0].meta["val"].shape[0]
        axis = find_token_axis(self.b.graph, tokens=batch * TOKENS)
        assert isinstance(axis, TokenAxis)
        report = split_tokens(self.b.graph, first, axis=axis, **options)
        assert isinstance(report, SplitReport)
        self.b.graph.lint()
        return self.b.graph, report

    def values(self, seed: int = 0) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(one.meta["val"].shape, generator=generator) * 2 for one in self.b.inputs]

    def assert_same(self, after: fx.Graph, rtol: float = 1e-5) -> None:
        values = self.values()
        (expected,), (found,) = run_graph(self.whole, values), run_graph(after, values)
        torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-6)


def positions(b: GraphBuilder, start: int = 0, device: str = "cpu") -> fx.Node:
    options = {"step": 1, "dtype": torch.int64, "device": torch.device(device), "requires_grad": False}
    return b.call(prims.iota.default, TOKENS, start=start, **options)


def window(b: GraphBuilder, size: int = 7, device: str = "cpu") -> fx.Node:
    """A sliding window as transformers builds it."""
    keys = b.call(aten.unsqueeze.default, b.call(aten.unsqueeze.default, positions(b, device=device), 0), 1)
    queries = b.call(aten.unsqueeze.default, keys, 3)
    keys = b.call(aten.unsqueeze.default, keys, 2)
    near = b.call(aten.gt.Tensor, keys, b.call(aten.sub.Tensor, queries, size))
    return b.call(aten.bitwise_and.Tensor, near, b.call(aten.le.Tensor, keys, queries))


def filled(b: GraphBuilder, number: float, dtype: torch.dtype, device: str) -> fx.Node:
    return b.call(aten.full.default, [], number, dtype=dtype, device=torch.device(device), pin_memory=False)


def additive(
    b: GraphBuilder,
    seen: fx.Node,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    hidden: float = float("-inf"),
) -> fx.Node:
    return b.call(aten.where.self, seen, filled(b, 0.0, dtype, device), filled(b, hidden, dtype, device))


def padded(b: GraphBuilder, seen: fx.Node, batch: int = 1) -> fx.Node:
    """What is not padding either, of which each request has its own."""
    padding = b.call(aten.gt.Scalar, b.input(batch, 1, 1, TOKENS), -2.0)
    return b.call(aten.bitwise_and.Tensor, padding, seen)


def shapes(node: fx.Node) -> list[tuple[int, ...]]:
    return [tuple(one.meta["val"].shape) for one in node.args[:3]]  # type: ignore[union-attr]


def causal(target: Any, **options: Any) -> Attention:
    grouped = {"kv_heads": 2, "enable_gqa": True} if target is UNDECOMPOSED else {}
    return Attention(target, is_causal=True, scale=0.3, **grouped, **options)


@pytest.mark.parametrize("first", [1, 9, 23])
@pytest.mark.parametrize("target", [ON_CPU, UNDECOMPOSED], ids=["flash_for_cpu", "undecomposed"])
def test_causal_attention_on_a_cpu_gets_a_mask_of_sizes(target: Any, first: int) -> None:
    attention = causal(target)
    after, report = attention.split(first)
    assert report.joins == {}
    attention.assert_same(after)
    prefix, suffix = find_ops(after, target)
    assert prefix.kwargs["is_causal"] is True
    mask = suffix.kwargs["attn_mask"]
    assert isinstance(mask, fx.Node) and tuple(mask.meta["val"].shape) == (TOKENS - first, TOKENS)
    assert suffix.kwargs["is_causal"] is False


@pytest.mark.parametrize("first", [1, 24, 30, 48, 60, 71])
@pytest.mark.parametrize("target", [ON_CPU, UNDECOMPOSED], ids=["flash_for_cpu", "undecomposed"])
def test_of_several_requests_whole_ones_are_one_call_and_the_cut_one_another(target: Any, first: int) -> None:
    attention = causal(target, batch=3)
    after, report = attention.split(first)
    assert report.joins == {}
    attention.assert_same(after)
    whole, part = divmod(first, TOKENS)
    calls = [(count, TOKENS) for count in (whole, 3 - whole - bool(part)) if count]
    calls += [(1, part), (1, TOKENS - part)] if part else []
    found = [(shape[0], shape[2]) for shape in (shapes(node)[0] for node in find_ops(after, target))]
    assert sorted(found) == sorted(calls)


@pytest.mark.parametrize("first", [1, 9, 23])
@pytest.mark.parametrize("target", [ON_CPU, UNDECOMPOSED], ids=["flash_for_cpu", "undecomposed"])
def test_a_sliding_window_is_sliced(target: Any, first: int) -> None:
    def mask(b: GraphBuilder) -> fx.Node:
        return window(b) if target is UNDECOMPOSED else additive(b, window(b))

    attention = Attention(target, attn_mask=..., mask=mask)
    after, report = attention.split(first)
    assert report.joins == {}
    attention.assert_same(after)
    sizes = [tuple(node.kwargs["attn_mask"].meta["val"].shape[-2:]) for node in find_ops(after, target)]  # type: ignore[union-attr]
    assert sizes == [(first, first), (TOKENS - first, TOKENS)]


def test_padding_is_kept_where_the_mask_is_causal_besides() -> None:
    attention = Attention(ON_CPU, attn_mask=..., mask=lambda b: additive(b, padded(b, window(b, TOKENS))))
    after, report = attention.split(9)
    assert report.joins == {}
    attention.assert_same(after)


def test_padding_that_is_split_like_tokens_is_put_together_for_a_mask() -> None:
    def mask(b: GraphBuilder) -> fx.Node:
        padding = b.view(b.call(aten.gt.Scalar, b.input(1, TOKENS), -2.0), 1, 1, 1, TOKENS)
        return additive(b, b.call(aten.bitwise_and.Tensor, padding, window(b, TOKENS)))

    attention = Attention(ON_CPU, attn_mask=..., mask=mask)
    after, report = attention.split(9)
    assert report.joins == {}
    assert len(find_ops(after, "aten.gt.Scalar")) == 2
    attention.assert_same(after)


@pytest.mark.parametrize("first", [1, 24, 30, 48, 60, 71])
@pytest.mark.parametrize("own", [True, False], ids=["a mask each", "one mask"])
@pytest.mark.parametrize("target", [ON_CPU, UNDECOMPOSED], ids=["flash_for_cpu", "undecomposed"])
def test_of_several_requests_with_a_mask_each_call_gets_its_part(target: Any, own: bool, first: int) -> None:
    def mask(b: GraphBuilder) -> fx.Node:
        seen = padded(b, window(b), 3) if own else window(b)
        return seen if target is UNDECOMPOSED else additive(b, seen)

    attention = Attention(target, attn_mask=..., mask=mask, batch=3)
    after, report = attention.split(first)
    assert report.joins == {}
    attention.assert_same(after)


@pytest.mark.parametrize("first", [1, 9, 23])
@pytest.mark.parametrize("size", [7, TOKENS], ids=["window", "causal"])
def test_a_mask_may_hide_by_the_smallest_number(size: int, first: int) -> None:
    """As the masks of transformers for eager attention do."""
    smallest = torch.finfo(torch.float32).min
    attention = Attention(ON_CPU, attn_mask=..., mask=lambda b: additive(b, window(b, size), hidden=smallest))
    after, report = attention.split(first)
    assert report.joins == {}
    attention.assert_same(after)


def test_where_the_smallest_number_may_hide_all_tokens_of_one_attention_joins() -> None:
    """Padding on the left does: softmax is the mean of all tokens then, later ones included."""
    smallest = torch.finfo(torch.float32).min

    def mask(b: GraphBuilder) -> fx.Node:
        return additive(b, padded(b, window(b, TOKENS)), hidden=smallest)

    attention = Attention(ON_CPU, attn_mask=..., mask=mask)
    after, report = attention.split(9)
    assert report.joins == {"attention_mask": 1} and "may hide all tokens from one" in report.details[0]
    values = attention.values()
    values[3][..., :3] = -3.0
    torch.testing.assert_close(run_graph(after, values), run_graph(attention.whole, values))


def test_flash_is_causal_from_the_bottom_right_itself() -> None:
    attention = Attention(FLASH, 0.0, True, kv_heads=2, device="cuda", dtype=torch.bfloat16, scale=0.25)
    after, report = attention.split(9)
    prefix, suffix = find_ops(after, FLASH)
    assert shapes(prefix) == [(1, HEADS, 9, WIDTH), (1, 2, 9, WIDTH), (1, 2, 9, WIDTH)]
    assert shapes(suffix) == [(1, HEADS, 15, WIDTH), (1, 2, TOKENS, WIDTH), (1, 2, TOKENS, WIDTH)]
    for node in (prefix, suffix):
        assert node.args[3:] == (0.0, True) and node.kwargs == {"scale": 0.25}
    assert report.joins == {} and not find_ops(after, "iota")


CUDNN_ARGS: tuple[Any, ...] = (None, False, 0.0, True)
"""attn_bias, compute_log_sumexp, dropout_p, is_causal"""


@pytest.fixture
def no_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with halves of too many tokens for it."""
    monkeypatch.setattr(own_kernel, "MOST_KEYS", 0)


def test_halves_of_cudnn_are_a_kernel_of_our_own_that_joins_no_keys() -> None:
    attention = Attention(CUDNN, *CUDNN_ARGS, kv_heads=2, device="cuda", dtype=torch.bfloat16, scale=0.25)
    after, report = attention.split(9)
    prefix, suffix = find_ops(after, attention_suffix)
    assert not find_ops(after, CUDNN) and report.joins == {} and report.cats == 1, "of the graph's output alone"
    assert shapes(prefix) == [(1, HEADS, 9, WIDTH), (1, 2, 9, WIDTH), (1, 2, 9, WIDTH)] and len(prefix.args) == 3
    assert shapes(suffix) == [(1, HEADS, 15, WIDTH), (1, 2, 15, WIDTH), (1, 2, 15, WIDTH)]
    assert suffix.args[3:] == prefix.args[1:3], "the earlier keys and values"
    assert prefix.kwargs == suffix.kwargs == {"scale": 0.25}


@pytest.mark.usefixtures("cudnn_on_cpu")
@pytest.mark.parametrize("first", [1, 9, 22, 23])
def test_results_of_our_own_kernel_are_those_of_the_whole(first: int) -> None:
    attention = Attention(CUDNN, *CUDNN_ARGS, kv_heads=2, device="cuda", dtype=torch.bfloat16, scale=0.3)
    after, report = attention.split(first)
    assert report.joins == {} and len(find_ops(after, attention_suffix)) == 2
    attention.assert_same(after)


@pytest.mark.usefixtures("cudnn_on_cpu")
@pytest.mark.parametrize("first", [1, 24, 30, 47, 71])
def test_our_own_kernel_attends_for_the_request_that_is_cut(first: int) -> None:
    attention = Attention(CUDNN, *CUDNN_ARGS, batch=3, kv_heads=2, device="cuda", dtype=torch.bfloat16)
    after, report = attention.split(first)
    assert report.joins == {}
    attention.assert_same(after)
    assert len(find_ops(after, attention_suffix)) == (2 if first % TOKENS else 0)
    assert all(shapes(node)[0][2] == TOKENS for node in find_ops(after, CUDNN)), "whole requests"


@pytest.mark.parametrize(
    ("options", "limits", "found"),
    [
        ({}, {}, (True, True)),
        ({}, {"MOST_KEYS": TOKENS}, (True, True)),
        ({}, {"MOST_KEYS": TOKENS - 1}, (True, False)),
        ({}, {"MOST_KEYS": 8}, (False, False)),
        ({}, {"MOST_HEAD_DIM": WIDTH - 1}, (False, False)),
        ({"dtype": torch.float16}, {}, (True, True)),
        ({"dtype": torch.float32}, {}, (False, False)),
        ({"scale": -0.5}, {}, (False, False)),
        ({"scale": 0.0}, {}, (False, False)),
    ],
)
def test_our_own_kernel_is_taken_where_it_pays(
    options: dict[str, Any], limits: dict[str, int], found: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, limit in limits.items():
        monkeypatch.setattr(own_kernel, name, limit)
    attention = Attention(CUDNN, *CUDNN_ARGS, **({"device": "cuda", "dtype": torch.bfloat16} | options))
    after, report = attention.split(9)
    assert report.joins == {}
    rows = {shapes(node)[0][2] for node in find_ops(after, attention_suffix)}
    assert (9 in rows, TOKENS - 9 in rows) == found
    assert len(find_ops(after, CUDNN)) == (not found[0]) + 2 * (not found[1])


@pytest.mark.usefixtures("no_own_kernel")
def test_the_suffix_of_cudnn_is_cudnn_on_earlier_and_on_own_keys() -> None:
    attention = Attention(CUDNN, *CUDNN_ARGS, kv_heads=2, device="cuda", dtype=torch.bfloat16, scale=0.25)
    after, report = attention.split(9)
    prefix, earlier, own = find_ops(after, CUDNN)
    assert prefix.args[3:] == (None, False, 0.0, True)
    assert earlier.args[3:] == (None, True, 0.0, False) and own.args[3:] == (None, True, 0.0, True)
    assert all(node.kwargs == {"scale": 0.25} for node in (prefix, earlier, own))
    assert earlier.args[0] is own.args[0] and earlier.args[1:3] == prefix.args[1:3]
    assert shapes(earlier) == [(1, HEADS, 15, WIDTH), (1, 2, 9, WIDTH), (1, 2, 9, WIDTH)]
    assert shapes(own) == [(1, HEADS, 15, WIDTH), (1, 2, 15, WIDTH), (1, 2, 15, WIDTH)]
    operators = [str(node.target) for node in after.nodes]
    between = [one.removeprefix("aten.") for one in operators[operators.index("aten.sub.Tensor") :]][:7]
    names = "sub.Tensor neg.default sigmoid.default sigmoid.default mul.Tensor mul.Tensor add.Tensor"
    assert between == names.split()
    (rounded,) = find_ops(after, "convert_element_type")
    (total,) = rounded.all_input_nodes
    assert total.meta["val"].dtype == torch.float32 and rounded.meta["val"].dtype == torch.bfloat16
    assert report.joins == {} and report.cats == 1, "of the graph's output alone"


@pytest.mark.usefixtures("cudnn_on_cpu")
@pytest.mark.parametrize("first", [1, 9, 22, 23])
def test_merged_results_of_cudnn_are_those_of_the_whole(first: int) -> None:
    attention = Attention(CUDNN, *CUDNN_ARGS, kv_heads=2, device="cuda", scale=0.3)
    after, report = attention.split(first)
    assert report.joins == {}
    attention.assert_same(after)


@pytest.mark.usefixtures("cudnn_on_cpu")
def test_a_merge_holds_where_exponentials_would_overflow() -> None:
    """Log-sum-exps of thousands have few digits behind the point."""
    attention = Attention(CUDNN, *CUDNN_ARGS, device="cuda", scale=100.0)
    after, _ = attention.split(9)
    attention.assert_same(after, rtol=1e-3)


@pytest.mark.usefixtures("cudnn_on_cpu")
@pytest.mark.parametrize("first", [1, 24, 30, 47, 71])
def test_cudnn_cuts_one_of_several_requests(first: int) -> None:
    attention = Attention(CUDNN, *CUDNN_ARGS, batch=3, kv_heads=2, device="cuda")
    after, report = attention.split(first)
    assert report.joins == {}
    attention.assert_same(after)


@pytest.mark.usefixtures("no_own_kernel")
def test_a_single_query_of_cudnn_sees_all_keys_in_one_call() -> None:
    attention = Attention(CUDNN, *CUDNN_ARGS, device="cuda", dtype=torch.bfloat16)
    after, _ = attention.split(TOKENS - 1)
    prefix, suffix = find_ops(after, CUDNN)
    assert [shape[2] for shape in shapes(suffix)] == [1, TOKENS, TOKENS]
    assert suffix.args[3:] == (None, False, 0.0, False) and prefix.args[6] is True


def test_cudnn_joins_where_its_log_sum_exps_are_laid_out_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "1")
    attention = Attention(CUDNN, *CUDNN_ARGS, device="cuda", dtype=torch.bfloat16)
    _, report = attention.split(9)
    assert report.joins == {"attention_kernel": 1}


def test_the_suffix_of_efficient_attention_is_its_inner_operator() -> None:
    attention = Attention(EFFICIENT, None, False, 0.0, True, device="cuda", scale=0.25)
    after, report = attention.split(9)
    (prefix,) = find_ops(after, EFFICIENT)
    (suffix,) = find_ops(after, "_efficient_attention_forward")
    assert prefix.args[3:] == (None, False, 0.0, True)
    assert shapes(suffix) == [(1, 15, HEADS, WIDTH), (1, TOKENS, HEADS, WIDTH), (1, TOKENS, HEADS, WIDTH)]
    assert suffix.args[3:] == (None, None, None, None, None, 0.0, CAUSAL_FROM_BOTTOM_RIGHT)
    assert suffix.kwargs == {"scale": 0.25} and report.joins == {}


@pytest.mark.parametrize("target", [EFFICIENT, CUDNN], ids=["efficient", "cudnn"])
def test_masks_of_cuda_kernels_are_sliced_once_for_all_layers(target: Any) -> None:
    def mask(b: GraphBuilder) -> fx.Node:
        whole = additive(b, window(b, device="cuda"), torch.bfloat16, "cuda")
        padded = b.call(aten.slice.Tensor, b.call(aten.constant_pad_nd.default, whole, [0, 8], 0.0), -1, 0, TOKENS)
        return b.call(aten.expand.default, padded, [1, HEADS, TOKENS, TOKENS])

    attention = Attention(target, ..., False, mask=mask, device="cuda", dtype=torch.bfloat16)
    after, report = attention.split(9)
    assert report.joins == {}
    masks = [node.args[3] for node in find_ops(after, target)]
    assert [tuple(one.meta["val"].shape) for one in masks] == [(1, HEADS, 9, 9), (1, HEADS, 15, TOKENS)]  # type: ignore[union-attr]
    copied = [one.target is aten.clone.default for one in masks]  # type: ignore[union-attr]
    assert copied == [target is CUDNN] * 2


@pytest.mark.parametrize(
    ("args", "options", "reason"),
    [
        ((ON_CPU,), {}, "attention"),
        ((ON_CPU, 0.5, True), {}, "attention"),
        (
            (ON_CPU, 0.0, False),
            {"attn_mask": ..., "mask": lambda b: additive(b, window(b), hidden=-1e4)},
            "attention_mask",
        ),
        ((ON_CPU, 0.0, True), {"attn_mask": ..., "mask": lambda b: additive(b, window(b))}, "attention_mask"),
        (
            (aten._scaled_dot_product_fused_attention_overrideable.default, None, 0.0, True),
            {"device": "cuda"},
            "attention_kernel",
        ),
    ],
    ids=["not causal", "dropout", "outweighed", "causal twice", "unknown kernel"],
)
def test_what_cannot_be_cut_joins(args: tuple[Any, ...], options: dict[str, Any], reason: str) -> None:
    attention = Attention(*args, **options)
    after, report = attention.split(9)
    assert report.joins == {reason: 1}
    if options.get("device") != "cuda" and args[1:2] != (0.5,):
        attention.assert_same(after)


def attended(query: tuple[int, ...], key: tuple[int, ...], *dims: int) -> tuple[fx.Graph, fx.Graph, SplitReport]:
    """Causal attention of inputs with ``dims`` permuted: the whole, its halves and their report."""
    b = GraphBuilder()
    rows = [b.call(aten.relu.default, b.input(*shape)) for shape in (query, key, key)]
    out = b.call(UNDECOMPOSED, *(b.call(aten.permute.default, one, list(dims)) for one in rows), is_causal=True)
    b.finish(b.call(aten.permute.default, out, list(dims)))
    whole = copy_of(b.graph)
    axis = find_token_axis(b.graph, tokens=TOKENS)
    assert isinstance(axis, TokenAxis)
    report = split_tokens(b.graph, 9, axis=axis)
    assert isinstance(report, SplitReport)
    return whole, b.graph, report


@pytest.mark.parametrize(
    ("query", "key", "dims", "joins"),
    [
        ((TOKENS, HEADS, WIDTH), (TOKENS, HEADS, WIDTH), (1, 0, 2), {}),
        ((TOKENS, WIDTH), (TOKENS, WIDTH), (0, 1), {"attention": 1}),
        ((TOKENS, HEADS, WIDTH), (TOKENS + 4, HEADS, WIDTH), (1, 0, 2), {"attention": 1}),
    ],
    ids=["no dim of requests", "no dim of heads", "keys of other tokens"],
)
def test_a_sequence_is_cut_only_where_its_dims_are_known(
    query: tuple[int, ...], key: tuple[int, ...], dims: tuple[int, ...], joins: dict[str, int]
) -> None:
    whole, halves, report = attended(query, key, *dims)
    assert report.joins == joins
    values = [torch.randn(shape) for shape in (query, key, key)]
    torch.testing.assert_close(run_graph(halves, values), run_graph(whole, values))


def test_a_mask_of_sizes_has_the_dtype_of_the_queries() -> None:
    after, _ = causal(ON_CPU, dtype=torch.bfloat16).split(9)
    mask = find_ops(after, ON_CPU)[1].kwargs["attn_mask"]
    assert isinstance(mask, fx.Node) and mask.meta["val"].dtype == torch.bfloat16


def test_whole_requests_are_given_the_mask_itself() -> None:
    attention = Attention(
        CUDNN, ..., False, batch=3, device="cuda", mask=lambda b: additive(b, window(b, device="cuda"), device="cuda")
    )
    after, _ = attention.split(30)
    masks = {shapes(node)[0][2]: node.args[3] for node in find_ops(after, CUDNN)}
    assert masks[TOKENS].target is aten.where.self  # type: ignore[union-attr]
    assert masks[6].target is masks[TOKENS - 6].target is aten.clone.default  # type: ignore[union-attr]


def test_a_mask_that_is_an_input_joins() -> None:
    attention = Attention(ON_CPU, attn_mask=..., mask=lambda b: b.input(1, 1, TOKENS, TOKENS))
    after, report = attention.split(9)
    assert report.joins == {"attention_mask": 1}
    attention.assert_same(after)


def test_flex_attention_joins_with_a_reason_of_its_own() -> None:
    attention = causal(ON_CPU)
    (operator_,) = find_ops(attention.b.graph, ON_CPU)
    operator_.target = flex_attention
    axis = find_token_axis(attention.b.graph, tokens=TOKENS)
    assert isinstance(axis, TokenAxis)
    assert analyse(attention.b.graph, axis).joins["attention_mask"] == 1


# Proofs about masks


class Masks:
    """Random masks that are made of comparisons of positions."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.b = GraphBuilder()

    def vector(self) -> fx.Node:
        found = positions(self.b, self.rng.choice((0, 0, 0, 1, -1)))
        return self.b.call(aten.div.Tensor_mode, found, 4, rounding_mode="floor") if self.rng.random() < 0.1 else found

    def comparison(self) -> fx.Node:
        b, rng = self.b, self.rng
        keys, queries = (
            b.call(aten.unsqueeze.default, self.vector(), 0),
            b.call(aten.unsqueeze.default, self.vector(), 1),
        )
        name = rng.choice(("le", "lt", "ge", "gt"))
        a, c = rng.choice(((keys, queries), (queries, keys)))
        if rng.random() < 0.3:
            return b.call(getattr(aten, name).Scalar, b.call(aten.sub.Tensor, a, c), rng.choice((-1, 0, 0, 1)))
        return b.call(getattr(aten, name).Tensor, a, c)

    def condition(self, depth: int = 2) -> fx.Node:
        kind = self.rng.randrange(5) if depth else 0
        if kind <= 1:
            return self.comparison()
        if kind == 2:
            return self.b.call(aten.bitwise_not.default, self.condition(depth - 1))
        target = aten.bitwise_and.Tensor if kind == 3 else aten.logical_or.default
        return self.b.call(target, self.condition(depth - 1), self.condition(depth - 1))

    def mask(self) -> fx.Node:
        """A bool, or numbers of which the smaller hide."""
        b, rng = self.b, self.rng
        condition = self.condition()
        if rng.random() < 0.3:
            return condition
        hidden = rng.choice((float("-inf"), SMALLEST, SMALLEST, -1e4))
        if rng.random() < 0.3:
            share = b.call(aten.sub.Tensor, 1.0, b.cast(condition, torch.float32))
            return b.call(aten.mul.Tensor, share, SMALLEST)
        numbers = [filled(b, number, torch.float32, "cpu") for number in (0.0, hidden)]
        rng.shuffle(numbers)
        found = b.call(aten.where.self, condition, *numbers)
        if rng.random() < 0.3:
            found = b.call(aten.where.self, self.condition(), found, filled(b, SMALLEST, torch.float32, "cpu"))
        if rng.random() < 0.3:
            found = b.call(aten.mul.Tensor, found, b.cast(self.comparison(), torch.float32))
        if rng.random() < 0.3:
            found = b.call(aten.add.Tensor, found, additive(b, self.comparison(), hidden=SMALLEST))
        if rng.random() < 0.2:
            found = b.call(aten.where.self, b.call(aten.eq.Scalar, found, 0), *numbers)
        return b.call(aten.expand.default, found, [1, 2, TOKENS, TOKENS])


SMALLEST = torch.finfo(torch.float32).min


def shown_later(mask: torch.Tensor) -> bool:
    """Whether any token's attention depends on a later one, by the numbers; a row of NaN stays one without them."""
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, float("-inf"))
    scores = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0))
    return bool((scores + mask).softmax(-1).nan_to_num(0.0).triu(1).any())


@pytest.mark.full
def test_masks_are_called_causal_only_if_they_are() -> None:
    proven: dict[bool, int] = {True: 0, False: 0}
    causal: dict[bool, int] = {True: 0, False: 0}
    for seed in range(600):
        masks = Masks(seed)
        mask = masks.mask()
        graph = masks.b.finish(mask)
        (values,) = run_graph(graph, [])
        hides = not shown_later(values)
        found = objection_to(mask) is None
        assert hides or not found, seed
        finite = bool(values.isfinite().all())
        causal[finite] += hides
        proven[finite] += found
    for finite in (True, False):
        assert proven[finite] > 20 and proven[finite] > 0.7 * causal[finite], (proven, causal)


@pytest.mark.parametrize(
    ("dtype", "proven"), [(torch.float32, True), (torch.bfloat16, True), (torch.float16, False)], ids=str
)
def test_the_smallest_number_hides_if_no_score_outweighs_it(dtype: torch.dtype, proven: bool) -> None:
    b = GraphBuilder()
    mask = additive(b, window(b), dtype, hidden=torch.finfo(dtype).min)
    assert (objection_to(mask) is None) is proven


def test_a_number_that_becomes_minus_infinity_hides_as_that() -> None:
    """The smallest of float32 has no bfloat16: tokens that see nothing are NaN with later ones and without."""
    b = GraphBuilder()
    hidden = additive(b, padded(b, window(b)), hidden=SMALLEST)
    assert objection_to(hidden) is not None
    assert objection_to(b.cast(hidden, torch.bfloat16)) is None


def test_rows_that_are_shown_all_tokens_where_they_would_see_none_are_not_causal() -> None:
    """What transformers once did for padding on the left."""
    b = GraphBuilder()
    mask = additive(b, padded(b, window(b)), hidden=SMALLEST)
    none = b.call(aten.logical_not.default, b.call(aten.any.dim, b.call(aten.eq.Scalar, mask, 0), -1, True))
    assert objection_to(b.call(aten.where.self, none, filled(b, 0.0, torch.float32, "cpu"), mask)) is not None
