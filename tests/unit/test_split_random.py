"""Random graphs: the split graph computes what the unsplit one does, or the split was refused with a reason."""

from __future__ import annotations

import operator
import random

import torch
import torch.fx as fx
from graph_builder import GraphBuilder, aten
from hypothesis import given, settings
from hypothesis import strategies as st
from split_graphs import run_alone

from tw_compile.passes.split import SplitReport, find_token_axis, split_tokens
from tw_compile.passes.split.analysis.token_axis import TokenAxis

_c10d = torch.ops._c10d_functional


class Maker:
    """Values of any shape; sizes are small, so that a hidden size is often the number of tokens by chance."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.b = GraphBuilder(fake=seed % 4 == 0)
        self.batch, self.seq = self.rng.choice((1, 1, 2, 3)), self.rng.choice((2, 3, 4))
        if self.batch > 1 and self.rng.random() < 0.2:
            self.seq = 1
        self.tokens = self.batch * self.seq
        self.hidden = self.rng.choice((2, 4, self.tokens))
        shape = self.rng.choice(((self.batch, self.seq, self.hidden), (self.tokens, self.hidden)))
        self.values = [self.b.call(aten.relu.default, self.b.input(*shape))]
        if self.rng.random() < 0.5:
            self.values.append(self.b.input(*shape))

    def pick(self) -> fx.Node:
        return self.rng.choice(self.values[-4:])

    def step(self) -> None:
        b, rng, x = self.b, self.rng, self.pick()
        shape = tuple(x.meta["val"].shape)
        rank = len(shape)
        dim = rng.randrange(rank)
        kind = rng.randrange(20)
        new: fx.Node | None = None
        if kind <= 2:
            rows = b.call(aten.reshape.default, x, [x.meta["val"].numel() // shape[-1], shape[-1]])
            factors = [b.input(shape[-1], rng.choice((self.hidden, 3)))]
            if rows.meta["val"].shape[0] == shape[-1]:
                factors.append(rows)
            new = b.call(aten.mm.default, rows, rng.choice(factors))
        elif kind == 3:
            new = b.call(rng.choice((aten.neg.default, aten.exp.default, aten.sigmoid.default)), x)
        elif kind == 4:
            new = b.add(x, b.input(shape[-1]))
        elif kind == 5:
            same = [one for one in self.values if one.meta["val"].dim() <= rank and _broadcasts(one, shape)]
            new = b.call(rng.choice((aten.mul.Tensor, aten.sub.Tensor)), x, rng.choice(same))
        elif kind == 6:
            new = b.call(aten.sum.dim_IntList, x, [dim], rng.random() < 0.6) if rank > 1 else None
        elif kind == 7:
            order = list(range(rank))
            rng.shuffle(order)
            new = b.call(aten.permute.default, x, order)
        elif kind <= 9:
            new = b.call(aten.reshape.default, x, _factors(rng, x.meta["val"].numel(), shape, self.tokens))
        elif kind == 10:
            new = b.call(aten.cat.default, [x, rng.choice([x, b.input(*shape)])], dim)
        elif kind == 11 and shape[dim] > 1:
            begin = rng.randrange(shape[dim] - 1)
            new = b.call(aten.slice.Tensor, x, dim, begin, rng.randint(begin + 1, shape[dim]))
        elif kind == 12:
            new = b.call(aten._softmax.default, x, dim, False)
        elif kind == 13:
            new = b.call(aten.flip.default, x, [dim])
        elif kind == 14:
            new = b.call(aten.unsqueeze.default, x, rng.randint(0, rank)) if rank < 4 else None
        elif kind == 15:
            new = b.call(_c10d.wait_tensor.default, b.call(_c10d.all_reduce.default, x, "sum", "0"))
        elif kind == 16 and rank == 3:
            new = b.call(
                aten.bmm.default, x, b.call(aten.permute.default, rng.choice([x, x, b.input(*shape)]), [0, 2, 1])
            )
        elif kind == 17:
            new = b.call(operator.getitem, b.call(aten.topk.default, x, 1, dim), 0)
        elif kind == 18:
            new = b.call(aten.cumsum.default, x, dim)
        elif kind == 19:
            new = b.add(b.call(aten.select.int, x, dim, 0), 1.0) if rank > 1 else None
        if new is not None and new.meta["val"].numel() <= 512:
            self.values.append(new)

    def make(self) -> fx.Graph:
        for _ in range(self.rng.randint(3, 14)):
            self.step()
        return self.b.finish(*{self.values[-1]: None, self.pick(): None})


def _broadcasts(node: fx.Node, shape: tuple[int, ...]) -> bool:
    sizes = node.meta["val"].shape
    return all(a in (1, b) for a, b in zip(reversed(sizes), reversed(shape), strict=False))


def _factors(rng: random.Random, numel: int, shape: tuple[int, ...], tokens: int) -> list[int]:
    """Another shape of as many elements: often one that keeps the tokens apart."""
    if numel % tokens == 0 and rng.random() < 0.6:
        return [tokens, numel // tokens]
    sizes = []
    while numel > 1 and len(sizes) < 3:
        size = rng.choice([one for one in range(1, numel + 1) if numel % one == 0])
        sizes.append(size)
        numel //= size
    return [*sizes, numel]


@settings(max_examples=250, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 32))
def test_split_equals_unsplit(seed: int) -> None:
    maker = Maker(seed)
    graph = maker.make()
    unit = maker.rng.choice(("token", "token", "request"))
    axis = find_token_axis(graph, unit=unit, tokens=maker.tokens)
    if not isinstance(axis, TokenAxis):
        assert axis.detail
        return
    generator = torch.Generator().manual_seed(seed % 1000)
    values = [torch.randn(node.meta["val"].shape, generator=generator) for node in graph.find_nodes(op="placeholder")]
    expected = run_alone(graph, values)
    report = split_tokens(graph, maker.rng.randint(1, axis.size - 1), axis=axis)
    if not isinstance(report, SplitReport):
        assert report.detail
        return
    graph.lint()
    found = run_alone(graph, values)
    for before, after in zip(expected, found, strict=True):
        torch.testing.assert_close(after, before, rtol=2e-4, atol=1e-5, equal_nan=True)
    assert share_memory(found) or not share_memory(expected)


def share_memory(outputs: list[torch.Tensor]) -> bool:
    return len({one.untyped_storage().data_ptr() for one in outputs}) < len(outputs)


def test_random_graphs_are_split_more_often_than_not_and_join_for_many_reasons() -> None:
    reports = []
    for seed in range(60):
        maker = Maker(seed)
        graph = maker.make()
        axis = find_token_axis(graph, tokens=maker.tokens)
        assert isinstance(axis, TokenAxis)
        reports.append(split_tokens(graph, 1, axis=axis))
    done = [one for one in reports if isinstance(one, SplitReport)]
    assert len(done) > 40
    assert len({reason for one in done for reason in one.joins}) >= 4
    assert any(not one.joins for one in done)
