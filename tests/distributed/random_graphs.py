"""Random graphs around the fused pattern: sites, near misses, and everything in between. A seed gives one graph."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
import torch.fx as fx
from graph_builder import EPS_FORMS, NORM_FORMS, ROOTS, GraphBuilder, aten


@dataclass(frozen=True)
class Groups:
    """Names of three process groups: all ranks, all ranks again, this rank alone."""

    world: str
    second: str
    single: str


@dataclass
class RandomGraph:
    graph: fx.Graph
    tolerance: float
    per_rank: set[str]
    """Placeholders whose values differ between ranks."""


@dataclass
class _Maker:
    rng: random.Random
    groups: Groups
    b: GraphBuilder
    shape: tuple[int, ...]
    hidden: int
    message: torch.dtype
    stream: torch.dtype
    per_rank: set[str] = field(default_factory=set)
    outputs: list[fx.Node] = field(default_factory=list)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def tokens(self) -> int:
        count = 1
        for size in self.shape[:-1]:
            count *= size
        return count

    def vector(self) -> fx.Node:
        return self.b.input(self.hidden, dtype=self.stream)

    def partial(self, previous: fx.Node | None, alone: bool) -> fx.Node:
        """This rank's summand: an input, or a matmul of what came before; sometimes read by others too.

        What a rank sums ``alone`` is the same on all ranks, else the residual stream, too, would differ between them.
        """
        b = self.b
        if alone or previous is None or self.chance(0.3):
            node = b.input(*self.shape, dtype=self.message)
            if not alone:
                self.per_rank.add(node.name)
            if self.chance(0.5):
                node = b.call(aten.mul.Tensor, node, 0.5)
        else:
            weight = b.input(self.hidden, self.hidden, dtype=self.message)
            self.per_rank.add(weight.name)
            rows = b.cast(previous, self.message)
            if len(self.shape) == 3:
                rows = b.view(rows, self.tokens(), self.hidden)
            node = b.call(aten.mm.default, rows, weight)
            if len(self.shape) == 3:
                node = b.view(node, *self.shape)
        if self.chance(0.05):
            self.outputs.append(b.call(aten.relu.default, node))
        return node

    def issue(self, previous: fx.Node | None = None) -> fx.Node:
        roll = self.rng.random()
        op = "sum" if roll > 0.06 else ("max" if roll > 0.03 else "min")
        roll = self.rng.random()
        group = self.groups.world if roll > 0.3 else (self.groups.second if roll > 0.06 else self.groups.single)
        return self.b.issue(self.partial(previous, group == self.groups.single), group, op)

    def disguise(self, node: fx.Node) -> fx.Node:
        """The same values through views and casts that end in the same shape."""
        b = self.b
        for _ in range(self.rng.choice((0, 0, 0, 1, 2))):
            kind = self.rng.randrange(5)
            if kind == 0:
                node = b.call(aten.clone.default, node)
            elif kind == 1:
                node = b.call(aten.squeeze.dim, b.call(aten.unsqueeze.default, node, 0), 0)
            elif kind == 2:
                node = b.view(b.view(node, 1, self.tokens(), self.hidden), *self.shape)
            elif kind == 3:
                node = b.view(b.view(node, self.tokens() * 2, self.hidden // 2), *self.shape)
            else:
                node = b.call(aten.neg.default, node) if self.chance(0.15) else b.cast(node, torch.float32)
        return node

    def plus(self, node: fx.Node, other: fx.Node) -> fx.Node:
        left, right = (node, other) if self.chance(0.5) else (other, node)
        return self.b.add(left, right, alpha=2) if self.chance(0.03) else self.b.add(left, right)

    def heads(self, node: fx.Node, other: fx.Node) -> fx.Node:
        """The same addition, over rows of half the width."""
        halves = [self.b.view(one, self.tokens() * 2, self.hidden // 2) for one in (node, other)]
        return self.b.view(self.b.add(*halves), *self.shape)

    def norm(self, h: fx.Node) -> fx.Node:
        b, rng = self.b, self.rng
        kind = rng.random()
        if kind < 0.03:
            return b.layer_norm(h)
        if kind < 0.06:
            return b.call(aten.relu.default, h)
        scale = {
            "eps": rng.choice((1e-6, 1e-5, 0.1, 0.5)),
            "eps_form": rng.choice(EPS_FORMS[:4]),
            "root": rng.choice(ROOTS) if self.chance(0.4) else "rsqrt",
            "square_mul": self.chance(0.3),
            "negative_dim": self.chance(0.5),
            "swap": self.chance(0.5),
            "upcast": self.chance(0.8),
        }
        if kind < 0.10:
            return self.near_miss(h)
        if kind < 0.14:
            halves = b.view(h, *self.shape[:-1], 2, self.hidden // 2)
            weight = b.input(self.hidden // 2, dtype=self.stream)
            return b.view(b.rms_norm(halves, weight, rng.choice(NORM_FORMS), **scale), *self.shape)
        form = rng.choice(NORM_FORMS)
        weight = self.weight()
        normed = b.rms_norm(self.same(h), weight, form, **scale)
        if self.chance(0.05):
            normed = b.call(aten.mul.Tensor, normed, b.input(*self.shape, dtype=self.stream))
        return normed

    def same(self, h: fx.Node) -> fx.Node:
        return self.b.call(aten.unsqueeze.default, h, 0) if len(self.shape) == 2 and self.chance(0.1) else h

    def weight(self) -> fx.Node:
        """A vector over hidden: an input, computed from inputs, or not provably one."""
        b, roll = self.b, self.rng.random()
        if roll < 0.1:
            return b.view(b.input(1, self.hidden, dtype=self.stream), self.hidden)
        if roll < 0.2:
            return b.add(b.call(aten.mul.Tensor, self.vector(), 2.0), 1.0)
        if roll < 0.24:
            return b.input(1, self.hidden, dtype=self.stream)
        if roll < 0.27:
            return b.input(1, dtype=self.stream)
        return self.vector()

    def near_miss(self, h: fx.Node) -> fx.Node:
        """Looks like an RMSNorm and is none that the operator computes."""
        b, kind = self.b, self.rng.randrange(6)
        square = b.call(aten.pow.Tensor_Scalar, h, 2)
        if kind == 0:
            variance = b.call(aten.mean.dim, square, [0], True)
        elif kind == 1:
            variance = b.call(aten.unsqueeze.default, b.call(aten.mean.dim, square, [-1], False), -1)
        elif kind == 2:
            variance = b.call(aten.mean.dim, b.call(aten.abs.default, h), [-1], True)
        else:
            variance = b.call(aten.mean.dim, square, [-1], True)
        eps = b.call(aten.abs.default, b.input(1)) if kind == 3 else 1e-3
        inverse = b.call(aten.rsqrt.default, b.add(variance, eps, alpha=3) if kind == 4 else b.add(variance, eps))
        if kind == 5:
            self.outputs.append(inverse)
        return b.call(aten.mul.Tensor, h, inverse)

    def sum_of(self, wait: fx.Node, early: list[fx.Node], stream: fx.Node, previous: fx.Node | None) -> fx.Node:
        """What is added to the reduced value, in some order."""
        b, rng = self.b, self.rng
        h = self.disguise(wait)
        if self.chance(0.04):
            self.outputs.append(b.call(aten.relu.default, h))
        if self.chance(0.12):
            h = b.call(rng.choice((aten.mul.Tensor, aten.mul.Scalar)), h, rng.choice((0.25, 2, -1.5)))
        addends: list[str] = []
        addends += ["bias"] * rng.choice((0, 0, 1, 2 if self.chance(0.1) else 0))
        addends += ["merged"] * rng.choice((0, 0, 0, 1))
        addends += ["residual"] * rng.choice((0, 1, 1, 1, 2))
        rng.shuffle(addends)
        for addend in addends:
            if addend == "bias":
                h = self.plus(h, self.vector())
            elif addend == "merged":
                other = self.disguise(b.wait(early.pop() if early and self.chance(0.7) else self.issue()))
                h = self.heads(h, other) if self.chance(0.1) else self.plus(h, other)
            else:
                choices = [stream, stream, stream, b.input(*self.shape, dtype=self.stream)]
                choices += [] if previous is None else [previous]
                other = rng.choice(choices)
                if self.chance(0.1):
                    other = b.cast(other, torch.float32)
                h = self.heads(h, other) if self.chance(0.07) else self.plus(h, other)
            if self.chance(0.08):
                h = self.disguise(h)
            if self.chance(0.02):
                h = b.call(aten.mul.Tensor, h, 0.5)
        return h if h.meta["val"].dtype == self.stream or self.chance(0.3) else b.cast(h, self.stream)

    def make(self) -> fx.Graph:
        b, rng = self.b, self.rng
        stream = b.input(*self.shape, dtype=self.stream)
        previous: fx.Node | None = None
        early = [self.issue() for _ in range(rng.choice((0, 0, 1, 2, 3)))]
        rng.shuffle(early)
        for _ in range(rng.randint(1, 4)):
            start = early.pop() if early and self.chance(0.5) else self.issue(previous)
            h = self.sum_of(b.wait(start), early, stream, previous)
            previous = self.reshaped(self.norm(h))
            if self.chance(0.1):
                self.outputs.append(self.reshaped(self.norm(h)))
            if self.chance(0.15):
                stream = self.sandwich(stream, previous)
            else:
                stream = previous if self.chance(0.15) else self.reshaped(h)
            if self.chance(0.2):
                self.outputs.append(rng.choice((stream, previous)))
        for left in early:
            self.outputs.append(b.wait(left))
        assert previous is not None
        self.outputs.append(previous)
        if self.chance(0.5):
            self.outputs.append(stream)
        return b.finish(*self.outputs)

    def sandwich(self, stream: fx.Node, normed: fx.Node) -> fx.Node:
        return self.b.add(stream, normed)

    def reshaped(self, node: fx.Node) -> fx.Node:
        return node if tuple(node.meta["val"].shape) == self.shape else self.b.view(node, *self.shape)


def random_graph(seed: int, groups: Groups) -> RandomGraph:
    rng = random.Random(seed)
    hidden = rng.choice((4, 6, 8))
    shape = rng.choice(((1,), (2,), (3,), (5,), (1, 1), (1, 3), (2, 1), (3, 2)))
    message = stream = torch.float32
    if rng.random() < 0.15:
        message = rng.choice((torch.bfloat16, torch.float16))
        stream = rng.choice((message, torch.float32))
    maker = _Maker(rng, groups, GraphBuilder(fake=seed % 8 == 0), (*shape, hidden), hidden, message, stream)
    return RandomGraph(maker.make(), 2e-5 if message == torch.float32 else 6e-2, maker.per_rank)


def random_inputs(graph: RandomGraph, seed: int, rank: int) -> list[torch.Tensor]:
    """Values for the placeholders: the same on all ranks except for partial sums and sharded weights."""
    values = []
    for index, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        own = rank + 1 if node.name in graph.per_rank else 0
        generator = torch.Generator().manual_seed((seed * 64 + index) * 16 + own)
        fake = node.meta["val"]
        values.append(torch.randn(fake.shape, generator=generator).to(fake.dtype))
    return values
