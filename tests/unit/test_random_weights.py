"""A norm whose weight is made of random numbers: a second draw would give another weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from graph_builder import GraphBuilder, aten, prims
from torch import nn

from tw_compile import collect_reports, make_backend
from tw_compile.config import Config
from tw_compile.graph.predicates import draws_random_numbers
from tw_compile.passes.fusion.find import FusionSite, RefusedSite, find_sites
from tw_compile.passes.reasons import Refusal
from tw_compile.passes.split.schedule.dependences import predecessors
from tw_compile.testing import fake_process_group

H = 16
TORCH_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with fake_process_group(2):
        yield


class RandomWeight(nn.Module):
    """A norm with a noisy weight that something else reads, too; ``first`` says where the first numbers are drawn."""

    def __init__(self, first: str) -> None:
        super().__init__()
        self.first = first
        self.partial = nn.Parameter(torch.randn(H, H))
        self.weight = nn.Parameter(torch.ones(H))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.first == "before the sum":
            x = x + torch.rand_like(x)
        summed = x @ self.partial
        dist.all_reduce(summed)
        h = residual + summed
        drawn = (torch.multinomial(h.softmax(-1), 1),) if self.first == "from h" else ()
        weight = self.weight + 0.5 * torch.rand(H)
        normalised = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return normalised * weight, weight * 3, h, *drawn


@pytest.mark.parametrize(
    ("first", "fused"), [("before the sum", True), ("behind the sum", TORCH_VERSION >= (2, 12)), ("from h", False)]
)
def test_the_weight_that_is_used_is_the_one_that_is_returned(first: str, fused: bool) -> None:
    """Inductor makes one tensor of seeds where the program first draws, and a seed gives the same numbers each time.

    So a weight can be computed twice if the seeds are there before ``h``. Inductor moves ``h`` to its first reader, behind
    the seeds. Torch 2.11 moves the seeds to their first reader, too, which is behind ``h``. Later versions move no draw.
    ``multinomial`` draws without seeds. Where it reads ``h``, the seeds come behind ``h`` in all versions.
    """
    torch.manual_seed(0)
    module, x = RandomWeight(first), torch.randn(5, H)
    torch._dynamo.reset()
    with torch.no_grad(), collect_reports() as reports:
        compiled = torch.compile(module, backend=make_backend(Config(strict=True, transport="gloo")))
        hidden, tripled, h, *_ = compiled(x, torch.randn(5, H))
    normalised = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(hidden, normalised * (tripled / 3))
    ((site,),) = (report.sites for report in reports)
    if fused:
        assert site.decision == "fused"
    else:
        assert site.reason == Refusal.WEIGHT_NOT_PROVABLE and "random numbers" in site.detail


def seeded(b: GraphBuilder) -> Any:
    """A vector of random numbers, as Inductor has them once its graph is made."""
    seeds = b.graph.call_function(prims.inductor_seeds.default, (1, torch.device("cpu")))
    with b.fake_mode:
        values = torch.empty(1, dtype=torch.int64), torch.empty((), dtype=torch.int64), torch.empty(H)
    seeds.meta["val"] = values[0]
    seed = b.graph.call_function(prims.inductor_lookup_seed.default, (seeds, 0))
    seed.meta["val"] = values[1]
    numbers = b.graph.call_function(prims.inductor_random.default, ([H], seed, "rand"))
    numbers.meta["val"] = values[2]
    return seeds, numbers


@pytest.mark.parametrize("late", [True, False])
def test_numbers_that_are_drawn_before_the_sum_are_a_weight_like_any_other(late: bool) -> None:
    b = GraphBuilder(fake=True)
    early = None if late else seeded(b)[1]
    y = b.scale(b.all_reduce(b.input(5, H)))
    weight = early if early is not None else seeded(b)[1]
    (site,) = find_sites(b.output(b.call(aten.mul.Tensor, y, weight)).graph)
    if late:
        assert isinstance(site, RefusedSite) and site.refused.reason is Refusal.WEIGHT_NOT_PROVABLE
    else:
        assert isinstance(site, FusionSite)


def test_seeds_are_drawn_in_their_order() -> None:
    b = GraphBuilder(fake=True)
    (first, numbers), (second, more) = seeded(b), seeded(b)
    b.finish(numbers, more)
    assert first in predecessors(b.graph, [])[second]


def test_a_number_that_is_read_from_a_tensor_is_not_read_twice() -> None:
    """A second ``item()`` would bind another symbol."""
    b = GraphBuilder(fake=True)
    y = b.scale(b.all_reduce(b.input(5, H)))
    factor = b.call(aten.mul.Tensor, b.input(H), 2.0)
    factor.meta["unbacked_bindings"] = {"u0": ()}
    b.call(aten.mul.Tensor, factor, 3.0)
    (site,) = find_sites(b.output(b.call(aten.mul.Tensor, y, factor)).graph)
    assert isinstance(site, RefusedSite) and site.refused.reason is Refusal.WEIGHT_NOT_PROVABLE


def test_a_matmul_whose_factor_is_unknown_is_not_absorbed() -> None:
    b = GraphBuilder(fake=True)
    weight = b.input(H, H)
    y = b.scale(b.all_reduce(b.call(aten.mm.default, b.input(5, H), weight)))
    graph = b.output(y).graph
    (site,) = find_sites(graph)
    assert isinstance(site, FusionSite) and site.gemm is not None
    del weight.meta["val"]
    (site,) = find_sites(graph)
    assert isinstance(site, FusionSite) and site.gemm is None


def functionalised_draw(b: GraphBuilder) -> fx.Node:
    """``bernoulli_`` as a functional graph has it."""
    called = torch.ops.higher_order.auto_functionalized
    node = b.graph.call_function(called, (aten.bernoulli_.float,), {"self": b.input(H), "p": 0.5})
    node.meta["val"] = (None, node.kwargs["self"].meta["val"])
    return node


def draw_in_a_subgraph(b: GraphBuilder) -> fx.Node:
    """A subgraph that draws."""
    inner = fx.Graph()
    inner.output((inner.call_function(aten.rand.default, ([H],)),))
    fx.GraphModule(nn.Module(), b.graph).add_module("draws", fx.GraphModule(nn.Module(), inner))
    subgraph = b.graph.get_attr("draws")
    return b.graph.call_function(torch.ops.higher_order.invoke_subgraph, (subgraph, "draws"))


@pytest.mark.parametrize("draw", [functionalised_draw, draw_in_a_subgraph])
def test_draws_of_higher_order_operators_keep_their_order(draw: Callable[[GraphBuilder], fx.Node]) -> None:
    b = GraphBuilder(fake=True)
    first = b.graph.call_function(aten.rand.default, ([H],))
    second = draw(b)
    b.finish(first, second)
    assert draws_random_numbers(second)
    assert first in predecessors(b.graph, [])[second]
