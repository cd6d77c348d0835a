"""Sizes of the halves as arguments of graph nodes: numbers where they are known, else nodes that compute them."""

from __future__ import annotations

import operator
from functools import reduce
from typing import Any

import torch
import torch.fx as fx

from tw_compile import compat
from tw_compile.graph.predicates import aten, value
from tw_compile.kernels.runtime.tokens_of_half import arguments_of, tokens_of_half
from tw_compile.passes.nodes import Inserter
from tw_compile.passes.split.analysis.layout import Size
from tw_compile.planning.halves import FirstHalf

First = int | fx.Node | FirstHalf
"""The units of half 1; a node must hold a SymInt and come before everything that is split."""


class Sizes:
    """The units of both halves, and nodes for symbolic sizes, made once each right behind the inputs of the graph."""

    def __init__(self, graph: fx.Graph, total: Size, first: First) -> None:
        self.graph = graph
        self.inserter = Inserter(graph)
        self._placeholders = graph.find_nodes(op="placeholder")
        self._last = self._placeholders[-1]
        self._known: dict[Any, fx.Node] = {}
        for node in self._placeholders:
            if isinstance(node.meta.get("val"), torch.SymInt):
                self._known[node.meta["val"].node.expr] = node
        self.units: tuple[Size, Size]
        self.opaque = isinstance(first, FirstHalf)
        """Whether the compiler does not know that the halves add up to ``total``."""
        if isinstance(first, FirstHalf):
            self.units = self._computed(total, first)
            return
        if isinstance(first, fx.Node):
            if first.op != "placeholder":
                self._last = first
            self._known[first.meta["val"].node.expr] = first
            head: Size = first.meta["val"]
        else:
            head = first
        self.units = head, total - head

    def _computed(self, total: Size, first: FirstHalf) -> tuple[Size, Size]:
        """Sizes that an operator computes when the graph runs; a number for a half that is the same for all token counts."""
        tokens = self.argument(total)
        like = next(node for node in self._placeholders if value(node) is not None)
        halves: list[Size] = []
        for half, (least, most) in enumerate(first.bounds):
            if least == most:
                halves.append(least)
                continue
            node = self._call(tokens_of_half, (like, tokens, half, *arguments_of(first)))
            compat.bind_new_sizes(node)
            self._known[node.meta["val"].node.expr] = node
            halves.append(node.meta["val"])
        return halves[0], halves[1]

    def rows(self, half: int, per_unit: Size) -> Any:
        """``per_unit`` times the units of half 0 or 1, as an argument."""
        return self.argument(self.units[half] * per_unit)

    def argument(self, size: Size) -> Any:
        return size if isinstance(size, int) else self._node(size.node.expr, size)

    def _node(self, expr: Any, size: torch.SymInt) -> fx.Node | int:
        if expr.is_Integer:
            return int(expr)
        if expr in self._known:
            return self._known[expr]
        if expr.is_Symbol:
            made: Any = self._size_of_input(expr)
        elif expr.is_Add or expr.is_Mul:
            parts = [self._node(part, size) for part in expr.args]
            step = operator.add if expr.is_Add else operator.mul
            made = reduce(lambda a, b: self._call(step, (a, b)), parts)
        elif expr.is_Pow and expr.exp.is_Integer and expr.exp > 0:
            base = self._node(expr.base, size)
            made = reduce(lambda a, b: self._call(operator.mul, (a, b)), [base] * int(expr.exp))
        elif len(expr.args) == 2 and type(expr).__name__ in ("FloorDiv", "Mod", "PythonMod"):
            step = operator.floordiv if type(expr).__name__ == "FloorDiv" else operator.mod
            made = self._call(step, tuple(self._node(part, size) for part in expr.args))
        else:
            raise NotImplementedError(f"size {expr}: no node computes {type(expr).__name__}")
        self._known[expr] = made
        return made

    def _size_of_input(self, symbol: Any) -> fx.Node:
        for node in self._placeholders:
            found = node.meta.get("val")
            for dim, size in enumerate(found.shape if isinstance(found, torch.Tensor) else ()):
                if isinstance(size, torch.SymInt) and size.node.expr == symbol:
                    return self._call(aten.sym_size.int, (node, dim))
        raise NotImplementedError(f"size {symbol}: no input of the graph has it")

    def _call(self, target: Any, args: tuple[Any, ...]) -> fx.Node:
        with self.graph.inserting_after(self._last):
            self._last = self.inserter.call(target, args)
        return self._last
