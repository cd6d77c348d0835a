"""Attention in which the tokens that are split are the batch: each half attends for its own, with its part of the mask."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.fx as fx
from graph_builder import GraphBuilder, aten, copy_of, run_graph

from tw_compile.passes.split import SplitReport, find_token_axis, split_tokens
from tw_compile.passes.split.analysis.token_axis import TokenAxis

ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
HEADS, WIDTH = 2, 4


def halves_of(first: int, tokens: int, *mask: int) -> tuple[fx.Graph, fx.Graph, SplitReport]:
    """Each token attends in a sequence of its own, as long as there are tokens; the mask is made of the tokens."""
    b = GraphBuilder()
    rows = b.call(aten.relu.default, b.input(tokens, HEADS, tokens, WIDTH))
    shown = b.call(aten.relu.default, b.input(*mask))
    attended = b.call(ATTENTION, rows, rows, rows, 0.0, False, attn_mask=shown)
    b.finish(b.call(operator.getitem, attended, 0))
    whole = copy_of(b.graph)
    axis = find_token_axis(b.graph, tokens=tokens)
    assert isinstance(axis, TokenAxis)
    report = split_tokens(b.graph, first, axis=axis)
    assert isinstance(report, SplitReport)
    return whole, b.graph, report


@pytest.mark.parametrize("tokens", [2, 5])
@pytest.mark.parametrize("requests", [True, False], ids=["of requests", "of queries"])
def test_rows_of_a_mask_are_those_of_requests_only_if_it_has_their_dim(tokens: int, requests: bool) -> None:
    """Without a dim of requests the first dim is that of the queries, which here are as many as the requests."""
    mask = (tokens, 1, tokens, tokens) if requests else (tokens, tokens)
    whole, halves, report = halves_of(1, tokens, *mask)
    assert report.joins == ({} if requests else {"attention": 1})
    values = [torch.randn(tokens, HEADS, tokens, WIDTH), torch.randn(mask) * 4]
    torch.testing.assert_close(run_graph(halves, values), run_graph(whole, values))
