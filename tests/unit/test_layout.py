"""Who keeps which rows of the residual."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from graph_builder import GraphBuilder, aten

from tw_compile.passes.fusion.find import FusionSite, find_sites
from tw_compile.passes.fusion.layout import plan_layouts
from tw_compile.testing import fake_process_group

T, H = 6, 8


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with fake_process_group(2):
        yield


class Chain(GraphBuilder):
    """A residual stream with one site after the other."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.dtype = dtype
        self.stream = self.input(T, H, dtype=dtype)
        self.normed: list[fx.Node] = []

    def site(self, residual: fx.Node | None = None, group: str = "0") -> fx.Node:
        wait = self.all_reduce(self.input(T, H, dtype=self.dtype), group)
        self.stream = self.add(wait, self.stream if residual is None else residual)
        self.normed.append(self.rms_norm(self.stream, self.input(H, dtype=self.dtype)))
        return self.stream

    def outs(self, *outputs: fx.Node, transport: str = "p2p") -> list[tuple[bool, str]]:
        """(takes a shard, gives out) of every site."""
        found = find_sites(self.output(*self.normed, *outputs).graph)
        sites = [site for site in found if isinstance(site, FusionSite)]
        layouts = plan_layouts(sites, [transport] * len(sites))
        return [(layout.source is not None, layout.out) for layout in layouts]


def test_only_the_next_site_reads_it() -> None:
    chain = Chain()
    chain.site(), chain.site(), chain.site()
    assert chain.outs() == [(False, "sharded"), (True, "sharded"), (True, "none")]


def test_last_residual_is_a_graph_output() -> None:
    chain = Chain()
    chain.site(), chain.site()
    assert chain.outs(chain.stream) == [(False, "sharded"), (True, "replicated")]


def test_residual_is_read_in_the_middle() -> None:
    chain = Chain()
    middle = chain.site()
    chain.site()
    assert chain.outs(chain.call(aten.relu.default, middle)) == [(False, "replicated"), (False, "none")]


def test_residual_is_read_through_a_view_and_an_upcast() -> None:
    chain = Chain(torch.bfloat16)
    middle = chain.site()
    chain.site()
    reader = chain.call(aten.relu.default, chain.cast(chain.view(middle, 2, 3, H), torch.float32))
    assert chain.outs(reader) == [(False, "replicated"), (False, "none")]


def test_residual_is_normed_twice() -> None:
    chain = Chain()
    stream = chain.site()
    chain.normed.append(chain.rms_norm(stream, chain.input(H)))
    assert chain.outs() == [(False, "replicated")]


def test_next_site_is_on_another_group() -> None:
    chain = Chain()
    chain.site()
    chain.site(group=dist.new_group([0, 1]).group_name)
    assert chain.outs() == [(False, "replicated"), (False, "none")]


def test_two_sites_read_one_residual() -> None:
    chain = Chain()
    first = chain.site()
    chain.site(first)
    chain.site(first)
    assert chain.outs() == [(False, "sharded"), (True, "none"), (True, "none")]


def test_next_site_adds_two_residuals() -> None:
    chain = Chain()
    first = chain.site()
    wait = chain.all_reduce(chain.input(T, H))
    h = chain.add(chain.add(wait, first), chain.input(T, H))
    chain.normed.append(chain.rms_norm(h, chain.input(H)))
    assert chain.outs() == [(False, "replicated"), (False, "none")]


def test_refused_site_reads_it() -> None:
    chain = Chain()
    first = chain.site()
    wait = chain.all_reduce(chain.input(T, H))
    assert chain.outs(chain.add(first, wait)) == [(False, "replicated")]


def test_nccl_keeps_it_whole() -> None:
    chain = Chain()
    chain.site(), chain.site()
    assert [takes for takes, _ in chain.outs(transport="nccl")] == [False, False]
    assert "sharded" not in [out for _, out in Chain.outs(_two_sites(), transport="nccl")]


def _two_sites() -> Chain:
    chain = Chain()
    chain.site(), chain.site()
    return chain
