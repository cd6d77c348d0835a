"""Who keeps which rows of the residual."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from graph_builder import GraphBuilder, aten

from tw_compile.kernels.collective.residual_seam import enter_residual, leave_residual
from tw_compile.kernels.collective.seam import enter_layers, leave_layers
from tw_compile.passes.fusion.find import FusionSite, find_sites
from tw_compile.passes.fusion.layout import find_seam, plan_layouts
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


def test_residual_is_read_through_a_rounding() -> None:
    chain = Chain()
    middle = chain.site()
    chain.site()
    reader = chain.call(aten.relu.default, chain.cast(middle, torch.bfloat16))
    assert chain.outs(reader) == [(False, "replicated"), (False, "none")]


def test_next_site_adds_a_view_of_it() -> None:
    chain = Chain()
    first = chain.site()
    h = chain.add(chain.all_reduce(chain.input(2, 3, H)), chain.view(first, 2, 3, H))
    chain.normed.append(chain.rms_norm(h, chain.input(H)))
    assert chain.outs() == [(False, "sharded"), (True, "none")]


def test_next_site_has_rows_of_another_width() -> None:
    chain = Chain()
    first = chain.site()
    h = chain.add(chain.all_reduce(chain.input(2 * T, H // 2)), chain.view(first, 2 * T, H // 2))
    chain.normed.append(chain.rms_norm(h, chain.input(H // 2)))
    assert chain.outs() == [(False, "replicated"), (False, "none")]


def test_a_message_is_made_of_it() -> None:
    chain = Chain(torch.bfloat16)
    first = chain.site()
    wait = chain.all_reduce(chain.cast(first, torch.float32))
    chain.normed.append(chain.rms_norm(wait, chain.input(H)))
    assert chain.outs() == [(False, "replicated"), (False, "none")]


@pytest.mark.parametrize("use", ["bias", "weight"])
def test_its_only_row_is_a_vector_of_the_next_site(use: str) -> None:
    b = GraphBuilder()
    first = b.add(b.all_reduce(b.input(1, H)), b.input(1, H))
    vector = b.view(first, H)
    wait = b.all_reduce(b.input(1, H))
    second = b.add(wait, vector) if use == "bias" else wait
    normed = b.rms_norm(second, b.input(H) if use == "bias" else vector)
    found = find_sites(b.output(b.rms_norm(first, b.input(H)), normed).graph)
    sites = [site for site in found if isinstance(site, FusionSite)]
    assert [layout.out for layout in plan_layouts(sites, ["p2p"] * 2)] == ["replicated", "none"]


class Layers(Chain):
    """One of several graphs: its residual comes from the one before and goes to the next."""

    def __init__(self, group: str = "0") -> None:
        super().__init__()
        enter = self.call(enter_layers, self.input(T, H), group)
        self.stream = self.call(operator.getitem, enter, 1)

    def ends(self, *outputs: fx.Node, group: str = "0", nccl: tuple[int, ...] = ()) -> list[tuple[bool, str, bool]]:
        """(enters with a shard, gives out, leaves it) of every site."""
        leave = self.call(leave_layers, self.normed[-1], self.stream, group)
        graph = self.output(leave, *outputs).graph
        sites = [site for site in find_sites(graph) if isinstance(site, FusionSite)]
        transports = ["nccl" if index in nccl else "p2p" for index in range(len(sites))]
        layouts = plan_layouts(sites, transports, find_seam(graph))
        return [(layout.entered, layout.out, layout.left) for layout in layouts]


WHOLE = [(False, "sharded", False), (False, "replicated", False)]


def test_layers_hand_shards_to_each_other() -> None:
    layers = Layers()
    layers.site(), layers.site()
    assert layers.ends() == [(True, "sharded", False), (False, "sharded", True)]


def test_one_site_takes_and_leaves_a_shard() -> None:
    layers = Layers()
    layers.site()
    assert layers.ends() == [(True, "sharded", True)]


def test_both_ends_are_whole_where_the_entered_residual_is_read_elsewhere() -> None:
    layers = Layers()
    reader = layers.call(aten.relu.default, layers.stream)
    layers.site(), layers.site()
    assert layers.ends(reader) == WHOLE


def test_both_ends_are_whole_where_the_left_residual_is_read_elsewhere() -> None:
    layers = Layers()
    layers.site(), layers.site()
    assert layers.ends(layers.call(aten.relu.default, layers.stream)) == WHOLE


def test_both_ends_are_whole_where_the_entered_residual_is_one_of_two() -> None:
    layers = Layers()
    layers.site(layers.add(layers.stream, layers.input(T, H)))
    layers.site()
    assert layers.ends() == WHOLE
    layers = Layers()
    h = layers.add(layers.add(layers.all_reduce(layers.input(T, H)), layers.stream), layers.input(T, H))
    layers.normed.append(layers.rms_norm(h, layers.input(H)))
    layers.site(h)
    assert layers.ends() == WHOLE


@pytest.mark.parametrize("side", ["entered", "left"])
def test_both_ends_are_whole_where_ranks_share_one_of_them_otherwise(side: str) -> None:
    other = dist.new_group([0, 1]).group_name
    layers = Layers(other if side == "entered" else "0")
    layers.site(), layers.site()
    assert layers.ends(group=other if side == "left" else "0") == WHOLE


@pytest.mark.parametrize(("nccl", "first"), [((0, 1), "replicated"), ((0,), "replicated"), ((1,), "sharded")])
def test_both_ends_are_whole_where_one_of_them_is_nccls(nccl: tuple[int, ...], first: str) -> None:
    layers = Layers()
    layers.site(), layers.site()
    assert layers.ends(nccl=nccl) == [(False, first, False), (False, "replicated", False)]


def test_one_site_is_whole_with_nccl() -> None:
    layers = Layers()
    layers.site()
    assert layers.ends(nccl=(0,)) == [(False, "replicated", False)]


class Piece(Layers):
    """A graph between two attentions: its residual alone comes from the one before and goes to the next."""

    def __init__(self, group: str = "0", enters: bool = True) -> None:
        Chain.__init__(self)
        if enters:
            self.stream = self.call(enter_residual, self.input(T, H), group)

    def ends(
        self, *outputs: fx.Node, group: str = "0", nccl: tuple[int, ...] = (), leaves: bool = True
    ) -> list[tuple[bool, str, bool]]:
        left = [self.call(leave_residual, self.stream, T, group, False, [self.normed[-1]])] if leaves else []
        graph = self.output(*left, self.normed[-1], *outputs).graph
        sites = [site for site in find_sites(graph) if isinstance(site, FusionSite)]
        transports = ["nccl" if index in nccl else "p2p" for index in range(len(sites))]
        layouts = plan_layouts(sites, transports, find_seam(graph))
        return [(layout.entered, layout.out, layout.left) for layout in layouts]


def test_pieces_hand_shards_to_each_other() -> None:
    piece = Piece()
    piece.site(), piece.site()
    assert piece.ends() == [(True, "sharded", False), (False, "sharded", True)]
    piece = Piece()
    piece.site()
    assert piece.ends() == [(True, "sharded", True)]


def test_the_last_piece_takes_a_shard_and_the_first_one_leaves_none() -> None:
    piece = Piece()
    piece.site(), piece.site()
    assert piece.ends(leaves=False) == [(True, "sharded", False), (False, "none", False)]
    piece = Piece(enters=False)
    piece.site()
    assert piece.ends() == [(False, "replicated", False)]


@pytest.mark.parametrize("which", ["entered", "other group"])
def test_a_piece_that_enters_with_all_rows_leaves_all_rows(which: str) -> None:
    other = dist.new_group([0, 1]).group_name
    piece = Piece(other if which == "other group" else "0")
    reader = [piece.call(aten.relu.default, piece.stream)] if which == "entered" else []
    piece.site(), piece.site()
    assert piece.ends(*reader) == WHOLE


@pytest.mark.parametrize("which", ["left", "nccl"])
def test_a_piece_that_has_to_leave_all_rows_takes_a_shard(which: str) -> None:
    """The piece before has left one, if it is like most others."""
    piece = Piece()
    piece.site(), piece.site()
    reader = [piece.call(aten.relu.default, piece.stream)] if which == "left" else []
    layouts = piece.ends(*reader, nccl=(1,) if which == "nccl" else ())
    assert layouts == [(True, "sharded", False), (False, "replicated", False)]


def test_the_last_piece_takes_all_rows_where_something_else_reads_them() -> None:
    piece = Piece()
    reader = piece.call(aten.relu.default, piece.stream)
    piece.site(), piece.site()
    assert piece.ends(reader, leaves=False) == [(False, "sharded", False), (False, "none", False)]
