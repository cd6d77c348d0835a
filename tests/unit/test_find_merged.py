"""Which all_reduces travel as one message, and which share a norm but no message."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from graph_builder import GraphBuilder, aten

from tw_compile import Config, TWCompilePass
from tw_compile.gating.facts import Node
from tw_compile.own_gate import own_gate
from tw_compile.passes.fusion.find import FoundSite, FusionSite, MergedSite, RefusedSite, find_sites
from tw_compile.passes.reasons import Refusal
from tw_compile.testing import fake_cuda, fake_process_group

T, H = 6, 8


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with fake_process_group(4):
        yield


def find(b: GraphBuilder, *outputs: fx.Node) -> list[FoundSite]:
    return find_sites(b.output(*outputs).graph)


def test_summed_all_reduces_of_one_group_travel_together() -> None:
    b = GraphBuilder()
    x, shared, residual, weight = b.input(T, H), b.input(2, 3, H), b.input(T, H), b.input(H)
    h = b.add(b.add(b.all_reduce(x), b.view(b.all_reduce(shared), T, H)), residual)
    first, second = find(b, b.rms_norm(h, weight), h)
    assert isinstance(first, FusionSite) and isinstance(second, MergedSite)
    assert second.into is first and first.partials() == (x, shared)
    assert first.form == "all_reduce+all_reduce+residual+rms_norm[fp32]"


def test_summed_all_reduces_travel_together_and_are_scaled() -> None:
    """Granite 4 has shared experts beside the others, and scales both."""
    b = GraphBuilder()
    x, shared, residual, weight = b.input(T, H), b.input(T, H), b.input(T, H), b.input(H)
    both = b.call(aten.mul.Tensor, b.add(b.all_reduce(x), b.all_reduce(shared)), 0.22)
    h = b.add(residual, both)
    first, second = find(b, b.rms_norm(h, weight), h)
    assert isinstance(first, FusionSite) and isinstance(second, MergedSite)
    assert (first.partials(), first.scale, first.residuals) == ((x, shared), 0.22, (residual,))
    assert first.form == "all_reduce+all_reduce+scale+residual+rms_norm[fp32]"


@pytest.mark.parametrize("addend", ["bias", "bias of the second", "residual"])
def test_what_is_scaled_with_more_than_the_messages_is_left(addend: str) -> None:
    """The operator scales the messages, and adds biases and residuals as they are."""
    b = GraphBuilder()
    one, other = b.all_reduce(b.input(T, H)), b.all_reduce(b.input(T, H))
    if addend == "bias of the second":
        other = b.add(other, b.input(H))
    both = b.add(one, other)
    if addend != "bias of the second":
        both = b.add(both, b.input(H) if addend == "bias" else b.input(T, H))
    scaled = b.call(aten.mul.Tensor, both, 0.22)
    sites = find(b, b.rms_norm(b.add(b.input(T, H), scaled), b.input(H)))
    assert len(sites) == 2
    for site in sites:
        assert isinstance(site, RefusedSite) and site.refused.reason == Refusal.RESIDUAL_NOT_PROVABLE
        assert "scales the sum" in site.refused.detail


def test_summed_all_reduces_of_two_groups_share_one_norm() -> None:
    b = GraphBuilder()
    other = dist.new_group([0, 1, 2, 3]).group_name
    x, y, weight = b.input(T, H), b.input(T, H), b.input(H)
    h = b.add(b.all_reduce(x), b.all_reduce(y, other))
    first, second = find(b, b.rms_norm(h, weight))
    assert isinstance(first, FusionSite) and isinstance(second, RefusedSite)
    assert second.refused.reason == Refusal.NORM_ALREADY_FUSED


def scaled(b: GraphBuilder, wait: fx.Node) -> tuple[fx.Node, fx.Node]:
    return b.call(aten.mul.Tensor, wait, 2.0), b.all_reduce(b.input(T, H))


def maximum_of_ranks(b: GraphBuilder, wait: fx.Node) -> tuple[fx.Node, ...]:
    return wait, b.all_reduce(b.input(T, H), op="max")


def partial_sum_used(b: GraphBuilder, wait: fx.Node) -> tuple[fx.Node, ...]:
    partial = b.call(aten.relu.default, b.input(T, H))
    return wait, b.all_reduce(partial), partial


def sum_used(b: GraphBuilder, wait: fx.Node) -> tuple[fx.Node, ...]:
    other = b.all_reduce(b.input(T, H))
    return wait, other, other


def view_of_the_sum_used(b: GraphBuilder, wait: fx.Node) -> tuple[fx.Node, ...]:
    other = b.view(b.all_reduce(b.input(2, T // 2, H)), T, H)
    return wait, other, other


def another_dtype(b: GraphBuilder, wait: fx.Node) -> tuple[fx.Node, ...]:
    return wait, b.all_reduce(b.input(T, H, dtype=torch.bfloat16))


def another_width(b: GraphBuilder, wait: fx.Node) -> tuple[fx.Node, ...]:
    return wait, b.view(b.all_reduce(b.input(2 * T, H // 2)), T, H)


@pytest.mark.parametrize(
    "build",
    [scaled, maximum_of_ranks, partial_sum_used, sum_used, view_of_the_sum_used, another_dtype, another_width],
)
def test_all_reduces_whose_messages_are_no_summands_do_not_travel_together(
    build: Callable[[GraphBuilder, fx.Node], tuple[fx.Node, ...]],
) -> None:
    b = GraphBuilder()
    one, other, *outputs = build(b, b.all_reduce(b.input(T, H)))
    first, second = find(b, b.rms_norm(b.add(one, other), b.input(H)), *outputs)
    assert isinstance(first, FusionSite) and first.merged == () and first.residuals == (other,)
    assert isinstance(second, RefusedSite)


def float32_residual_first(b: GraphBuilder, one: fx.Node, other: fx.Node) -> fx.Node:
    return b.add(b.add(b.input(T, H), one), other)


def float32_bias_of_the_first(b: GraphBuilder, one: fx.Node, other: fx.Node) -> fx.Node:
    return b.add(b.add(one, b.input(H)), other)


def float32_bias_of_the_second(b: GraphBuilder, one: fx.Node, other: fx.Node) -> fx.Node:
    return b.add(one, b.add(other, b.input(H)))


def float32_sum(b: GraphBuilder, one: fx.Node, other: fx.Node) -> fx.Node:
    return b.add(b.cast(one, torch.float32), other)


@pytest.mark.parametrize(
    "add", [float32_residual_first, float32_bias_of_the_first, float32_bias_of_the_second, float32_sum]
)
def test_bfloat16_sums_that_are_added_in_float32_do_not_travel_together(
    add: Callable[[GraphBuilder, fx.Node, fx.Node], fx.Node],
) -> None:
    """Their messages would be added in bfloat16, which is one rounding more than the graph has."""
    b = GraphBuilder()
    one, other = (b.all_reduce(b.input(T, H, dtype=torch.bfloat16)) for _ in range(2))
    first, second = find(b, b.rms_norm(add(b, one, other), b.input(H)))
    assert isinstance(first, FusionSite) and first.merged == ()
    assert isinstance(second, RefusedSite) and second.refused.reason == Refusal.NORM_ALREADY_FUSED


def test_bfloat16_sums_that_are_added_in_bfloat16_travel_together_with_a_float32_residual() -> None:
    b = GraphBuilder()
    both = b.add(*(b.all_reduce(b.input(T, H, dtype=torch.bfloat16)) for _ in range(2)))
    first, second = find(b, b.rms_norm(b.add(both, b.input(T, H)), b.input(H)))
    assert isinstance(first, FusionSite) and isinstance(second, MergedSite)


def test_a_message_that_has_no_norm_to_itself_travels_with_a_later_one() -> None:
    b = GraphBuilder()
    row = b.call(aten.unsqueeze.default, b.all_reduce(b.input(H)), 0)
    first, second = find(b, b.rms_norm(b.add(row, b.all_reduce(b.input(1, H))), b.input(H)))
    assert isinstance(first, MergedSite) and first.into is second


@pytest.mark.parametrize("fuse", [False, True])
def test_what_travels_along_is_decided_with_what_it_travels_with(fuse: bool) -> None:
    config = Config(fuse=fuse, strict=True)
    with fake_cuda():
        b = GraphBuilder()
        b.device = "cuda"
        both = b.add(b.all_reduce(b.input(T, H)), b.all_reduce(b.input(T, H)))
        graph = b.finish(b.rms_norm(both, b.input(H)))
        first, second = TWCompilePass(config).rewrite(graph, own_gate(config, Node((9, 0), False))).sites
    assert first.decision == second.decision == ("fused" if fuse else "gated")
    assert (first.backend, first.entry, first.source) == (second.backend, second.entry, second.source)
    assert bool(second.entry) is fuse
    assert second.detail == (f"travels with {first.node}" if fuse else first.detail)
