"""Rewrite a graph into two halves of its tokens.

    before:  y = f(x, w)
    after:   y1 = f(x1, w); y2 = f(x2, w), with x = cat(x1, x2) and y = cat(y1, y2)

Row-wise operators are made twice, one after the other where the original was; the order of everything else is kept. A value is
sliced where a half first reads it and joined where something first needs all of it, once each. At first, new nodes are only
added. Then the graph's outputs are switched over to the new nodes, and nodes that nothing reads any more are removed. An error
leaves the graph as it was.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
import torch.utils._pytree as pytree

from tw_compile import compat
from tw_compile.graph.predicates import aten, has_default_strides, is_call, makes_view, same_size, value
from tw_compile.passes.nodes import Annotation, Inserter, Part, annotate, annotation
from tw_compile.passes.reasons import SplitRefusal, SplitRefused
from tw_compile.passes.split.analysis.layout import (
    HalfBuilder,
    HalfCall,
    HalfIndex,
    HalfSize,
    Join,
    Layout,
    Rows,
    RowWise,
    Size,
    Slice,
)
from tw_compile.passes.split.analysis.token_axis import Analysis, TokenAxis, Unit, analyse, find_token_axis
from tw_compile.passes.split.rewrite.sizes import First, Sizes
from tw_compile.planning.halves import FirstHalf

_END = 9223372036854775807
_FREE_STRIDES: dict[Any, Any] = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
}
"""Halves and joined values need not have the strides for which a view was possible."""

_READ_STRIDES = frozenset({aten.as_strided.default, aten.as_strided_scatter.default, aten.sym_stride.int})

_PARTS: tuple[Part, Part] = (1, 2)


@dataclass
class SplitReport:
    """What became of the operators of a graph.

    ``duplicated`` operators run once for each half. ``shared`` operators do not depend on the tokens and run once; ``joined``
    operators depend on the tokens, but also run once. ``joins`` counts, by reason, the operators that join halves, and
    ``details`` names them. ``slices`` and ``cats`` count the values that are taken apart and put together, graph inputs and
    outputs included.
    """

    unit: Unit
    first: str
    second: str
    duplicated: int = 0
    shared: int = 0
    joined: int = 0
    slices: int = 0
    cats: int = 0
    joins: dict[str, int] = field(default_factory=dict)
    details: list[str] = field(default_factory=list)


def split_tokens(
    graph: fx.Graph,
    first: First,
    *,
    axis: TokenAxis | None = None,
    unit: Unit = "token",
    join_attention: bool = False,
    analysis: Analysis | None = None,
) -> SplitReport | SplitRefused:
    """Split ``graph`` in place into a half of the first ``first`` units and one of the rest.

    Args:
        first: Tokens of half 1, or requests if that is the axis's unit. A node must hold a SymInt and come before all nodes of
            tensors. A ``FirstHalf`` is computed when the graph runs; only its bounds are assumed, and no guard is added.
        axis: What is split. None: found by the messages that the ranks add up (:func:`find_token_axis`).
        unit: The unit of the axis to look for, if ``axis`` is None.
        join_attention: Attention runs once also where it could be cut into prefix and suffix.
        analysis: The analysis of the graph along ``axis``, with ``join_attention``; None: computed here.

    Raises:
        ValueError: ``first`` leaves one half without units, or is a node that comes too late. For symbolic sizes the comparison
            is a guard of the compiled graph.
    """
    if axis is None:
        found = find_token_axis(graph, unit=unit)
        if isinstance(found, SplitRefused):
            return found
        axis = found
    _check_first(graph, first, axis)
    if analysis is None:
        analysis = analyse(graph, axis, join_attention=join_attention)
    refused = _refusal(graph, analysis)
    if refused is not None:
        return refused
    duplicator = Duplicator(graph, analysis, first)
    try:
        duplicator.run()
    except Exception:
        duplicator.roll_back()
        raise
    duplicator.commit()
    return duplicator.report


def _check_first(graph: fx.Graph, first: First, axis: TokenAxis) -> None:
    if isinstance(first, FirstHalf):
        return
    size = first.meta["val"] if isinstance(first, fx.Node) else first
    if not 1 <= size < axis.size:
        raise ValueError(f"first: expected 1 to {axis.size - 1} {axis.unit}s, got {size}")
    if isinstance(first, fx.Node) and first.op != "placeholder":
        reads_tensor = (one for one in graph.nodes if one.op == "call_function" and value(one) is not None)
        earlier = next(reads_tensor, None)
        if earlier is not None and earlier < first:
            raise ValueError(f"first: expected a node before every tensor's, got {first.name}, after {earlier.name}")


def _refusal(graph: fx.Graph, analysis: Analysis) -> SplitRefused | None:
    """Why the whole graph can't be split, or is not worth splitting; None if it can be split."""
    if not any(isinstance(one, RowWise) for one in analysis.verdicts.values()):
        return SplitRefused(SplitRefusal.NOTHING_TO_SPLIT, "no operator is row-wise over the tokens")
    for node in graph.nodes:
        if node.op != "call_function" or isinstance(analysis.verdicts.get(node), RowWise):
            continue
        if node.target in _READ_STRIDES and node in analysis.token_dependent:
            return SplitRefused(SplitRefusal.STRIDES_READ, f"{node.name} depends on the strides of its operand")
        if node.meta.get("unbacked_bindings") and node in analysis.token_dependent:
            # Running the node again for all tokens would make its sizes again, which would be other sizes to the compiler.
            detail = f"{node.name} makes sizes that depend on the tokens' values"
            return SplitRefused(SplitRefusal.NEEDS_ALL_TOKENS, detail)
        for operand in mutated(node):
            for base in _viewed(operand):  # a view may be joined where its base is split
                if analysis.layouts.get(base) is not None:
                    return SplitRefused(
                        SplitRefusal.TOKENS_MUTATED, f"{node.name} writes to {base.name}, which is split"
                    )
    return None


def _viewed(node: fx.Node) -> Iterator[fx.Node]:
    """``node`` and all whose memory it may share because it is a view of them."""
    pending = [node]
    while pending:
        one = pending.pop()
        yield one
        if makes_view(one) or (one.target is operator.getitem and makes_view(one.all_input_nodes[0])):
            pending += one.all_input_nodes


def _base(node: fx.Node) -> fx.Node:
    """What ``node`` is a view of, through any number of views; ``node`` itself if it is none."""
    while makes_view(node) or (node.target is operator.getitem and makes_view(node.args[0])):  # type: ignore[arg-type]
        node = node.args[0]  # type: ignore[assignment]
    return node


def mutated(node: fx.Node) -> list[fx.Node]:
    """The operands that an operator writes to."""
    if not isinstance(node.target, compat.OpOverload):
        return []
    found: list[fx.Node] = []
    for index, declared in enumerate(node.target._schema.arguments):
        given = node.args[index] if index < len(node.args) else node.kwargs.get(declared.name)
        if declared.alias_info is not None and declared.alias_info.is_write:
            found += [
                one for one in (given if isinstance(given, list | tuple) else [given]) if isinstance(one, fx.Node)
            ]
    return found


class Duplicator:
    def __init__(self, graph: fx.Graph, analysis: Analysis, first: First) -> None:
        self.graph = graph
        self.analysis = analysis
        self.inserter = Inserter(graph)
        self.sizes = Sizes(graph, analysis.axis.size, first)
        self._halves: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
        self._whole: dict[fx.Node, Any] = {}
        self._sliced: dict[tuple[fx.Node, str], tuple[fx.Node, fx.Node]] = {}
        self._made_once: dict[Any, fx.Node] = {}
        self._outputs: Any = None
        units = self.sizes.units
        sizes = (str(first), f"s-({first})") if isinstance(first, FirstHalf) else (str(units[0]), str(units[1]))
        self.report = SplitReport(analysis.axis.unit, *sizes, joins=analysis.joins)

    def run(self) -> None:
        """Add the nodes of the split graph; the old ones stay."""
        for node in list(self.graph.nodes):
            verdict = self.analysis.verdicts.get(node)
            self._like = node
            with self.graph.inserting_before(node):
                if node.op == "output":
                    self._reason = "graph_output"
                    shared = Counter(_base(one) for one in node.all_input_nodes)
                    self._outputs = fx.map_arg(node.args[0], functools.partial(self._returned, shared))
                elif node.op != "call_function":
                    self._whole[node] = node
                elif node in self._halves:
                    continue
                elif isinstance(verdict, RowWise) and verdict.build is not None:
                    self._build(node, verdict, verdict.build)
                elif isinstance(verdict, RowWise):
                    self.duplicate(node, verdict)
                else:
                    self._run_once(node, verdict)
                    self._forget(mutated(node))

    def commit(self) -> None:
        output = next(iter(reversed(self.graph.nodes)))
        output.args = (self._outputs,)
        kept = {*self.inserter.new, *self.sizes.inserter.new}
        for node in reversed(list(self.graph.nodes)):
            if node.op != "call_function":
                continue
            old = node not in kept
            replaced = old and (node in self._halves or self._whole.get(node) is not node)
            if replaced or not (node.users or node.is_impure()):
                self.graph.erase_node(node)
            elif old:
                annotate(node, split="shared")

    def roll_back(self) -> None:
        self.inserter.roll_back()
        self.sizes.inserter.roll_back()

    # One node

    def duplicate(self, node: fx.Node, verdict: RowWise) -> None:
        args = node.args if verdict.args is None else verdict.args
        kwargs = node.kwargs if verdict.kwargs is None else verdict.kwargs
        made = []
        for half in (0, 1):
            made.append(
                self._call(
                    _FREE_STRIDES.get(node.target, node.target),
                    self._for_half(args, half, verdict.slices),
                    self._for_half(kwargs, half, verdict.slices),
                    _PARTS[half],
                    noted=annotation(node),
                )
            )
            self._check(node, made[-1], verdict.out, half)
        self._halves[node] = (made[0], made[1])
        self.report.duplicated += 1

    def _build(self, node: fx.Node, verdict: RowWise, build: Callable[[HalfBuilder, int], fx.Node]) -> None:
        """Let the rule make both halves of the result, or of the one result that has a layout."""
        results, layout = [node], verdict.out
        if isinstance(layout, tuple):
            index, layout = next((index, one) for index, one in enumerate(layout) if one is not None)
            results = list(node.users)
            assert all(user.args[1] == index for user in results), f"{node.name}: more than one result is read"
        self._reason = None
        halves = build(self, 0), build(self, 1)
        for half, made in enumerate(halves):
            self._check(results[0], made, layout, half)
        for one in {node, *results}:
            self._halves[one] = halves
        self.report.duplicated += len({node, *results})

    def _run_once(self, node: fx.Node, verdict: Any) -> None:
        if is_call(node, aten.sym_size.int) and self._whole.get(measured := node.all_input_nodes[0]) is not measured:
            self._whole[node] = self.sizes.argument(node.meta["val"])
            return
        depends = node in self.analysis.token_dependent
        self._reason = str(verdict.reason) if isinstance(verdict, Join) else None
        if isinstance(verdict, Join):
            self.report.details.append(verdict.detail)
        self.report.joined += depends
        self.report.shared += not depends
        args: Any = fx.map_arg(node.args, self.joined)
        kwargs: Any = fx.map_arg(node.kwargs, self.joined)
        self._whole[node] = node
        if not depends and all(self._whole.get(one) is one for one in node.all_input_nodes):
            return
        target = _FREE_STRIDES.get(node.target, node.target)
        copied = self.graph.create_node("call_function", target, args, kwargs, node.name)
        copied.meta = dict(node.meta)
        annotate(copied, **self._note("joined" if depends else "shared", self._reason))
        self.inserter.new.append(copied)
        if isinstance(target, compat.OpOverload) or target is operator.getitem:
            copied.meta["val"] = self.inserter.fake(target, args, kwargs)
        self._whole[node] = copied

    def _forget(self, written: list[fx.Node]) -> None:
        """Take rows out again that were taken out of ``written``: they may be copies of what was there before."""
        tensors = [value(each) for one in written for each in (one, self._whole.get(one)) if isinstance(each, fx.Node)]
        memories = {compat.storage_key(tensor) for tensor in tensors if tensor is not None}

        def kept(key: Any) -> bool:
            found = [value(one) for one in key if isinstance(one, fx.Node)]
            return not any(tensor is not None and compat.storage_key(tensor) in memories for tensor in found)

        if memories:
            self._sliced = {key: made for key, made in self._sliced.items() if kept(key)}
            self._made_once = {key: made for key, made in self._made_once.items() if kept(key)}

    def _check(self, node: fx.Node, half_node: fx.Node, out: Layout | tuple[Layout, ...], half: int) -> None:
        """Raise an AssertionError if a half has another shape than its layout says: then a rule is wrong.

        Dtypes are not compared, as Inductor's own patterns leave outdated ones on the unsplit nodes.
        """
        whole, part = node.meta.get("val"), half_node.meta.get("val")
        layouts = out if isinstance(out, tuple) else (out,)
        wholes = whole if isinstance(whole, list | tuple) else (whole,)
        parts = part if isinstance(part, list | tuple) else (part,)
        for layout, a, b in zip(layouts, wholes, parts, strict=True):
            if not isinstance(layout, Rows) or not isinstance(a, torch.Tensor):
                continue
            expected: list[Size] = list(a.shape)
            if layout.outer is not None:
                expected[layout.outer] = 1
            expected[layout.dim] = self.sizes.units[half] * layout.per_unit
            wrong = any(compat.statically_known_true(x != y) for x, y in zip(expected, b.shape, strict=True))
            assert not wrong, f"{node.name}: half {half + 1} is {list(b.shape)}, not {expected}"

    # Operands

    def _for_half(self, structure: Any, half: int, slices: Mapping[fx.Node, Slice]) -> Any:
        if isinstance(structure, fx.Node):
            return self._half(structure, half, slices)
        if isinstance(structure, HalfSize):
            return self.sizes.rows(half, structure.per_unit)
        if isinstance(structure, HalfIndex):
            return structure.first + half
        if isinstance(structure, HalfCall):
            args, kwargs = (self._for_half(one, half, slices) for one in (structure.args, structure.kwargs))
            return self._call(structure.target, args, kwargs, _PARTS[half])
        if isinstance(structure, slice):
            return fx.map_arg(structure, lambda one: self._half(one, half, slices))
        if isinstance(structure, Mapping):
            return {key: self._for_half(one, half, slices) for key, one in structure.items()}
        if isinstance(structure, list | tuple):
            return type(structure)(self._for_half(one, half, slices) for one in structure)
        return structure

    def _half(self, node: fx.Node, half: int, slices: Mapping[fx.Node, Slice]) -> Any:
        if node in self._halves:
            return self._halves[node][half]
        layout = self.analysis.axis.inputs.get(node)
        how = slices.get(node) if layout is None else Slice(layout)
        return self._whole[node] if how is None else self._slice(self._whole[node], how)[half]

    def joined(self, node: fx.Node, part: Part = "joined") -> Any:
        if node not in self._whole:
            self._whole[node] = self._join(node, part)
        return self._whole[node]

    def _returned(self, shared: Mapping[fx.Node, int], node: fx.Node) -> Any:
        """All of an output. If it shares memory with an input or with another output, it is viewed again, to share it still.

        Else a caller that writes to one of them would no longer change the other.
        """
        base = _base(node)
        return self._viewed_again(node) if base.op == "placeholder" or shared[base] > 1 else self.joined(node)

    def _viewed_again(self, node: fx.Node) -> Any:
        if node not in self._halves or _base(node) is node:
            return self.joined(node)
        args = (self._viewed_again(node.args[0]), *fx.map_arg(node.args[1:], self.joined))  # type: ignore[arg-type]
        kwargs = fx.map_arg(node.kwargs, self.joined)
        return self._shape_call(_FREE_STRIDES.get(node.target, node.target), args, **kwargs)

    # What rules may use to build a half

    @property
    def units(self) -> tuple[Any, Any, Any]:
        first, second = self.sizes.units
        return self.sizes.argument(first), self.sizes.argument(second), self.sizes.argument(self.analysis.axis.size)

    def rows(self, operand: fx.Node, half: int, rows: Rows) -> fx.Node:
        return self._half(operand, half, {operand: Slice(rows)})

    def rows_until(self, operand: fx.Node, half: int, rows: Rows) -> fx.Node:
        return self.rows(operand, half, rows) if half == 0 else self.joined(operand, 2)

    def whole(self, operand: fx.Node) -> fx.Node:
        return self.joined(operand)

    def call(self, half: int | None, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        part: Part = "shared" if half is None else _PARTS[half]
        for one in pytree.arg_tree_leaves(*args, **kwargs):
            replaced = isinstance(one, fx.Node) and (one in self._halves or self._whole.get(one, one) is not one)
            assert not replaced, f"{one} is read by a half, and goes"
        return self._call(target, args, kwargs, part, noted={} if half is None else annotation(self._like))

    def once(self, key: Any, make: Callable[[], fx.Node]) -> fx.Node:
        if key not in self._made_once:
            self._made_once[key] = make()
        return self._made_once[key]

    def _slice(self, node: fx.Node, how: Slice) -> tuple[fx.Node, fx.Node]:
        """The rows of each half of a whole value."""
        key = (node, repr(how))
        if key not in self._sliced:
            self.report.slices += 1
            rows = how.rows
            base = node
            if how.shape is not None:
                rank = len(node.meta["val"].shape)
                for _ in range(len(how.shape) - rank):
                    base = self._shape_call(aten.unsqueeze.default, (base, 0))
                base = self._shape_call(aten.expand.default, (base, self._arguments(how.shape)))
            base = self._folded(base, rows)
            if self.sizes.opaque:
                self._sliced[key] = self._views(base, rows)
                return self._sliced[key]
            middle = self.sizes.rows(0, rows.per_unit)
            made = [
                self._call(aten.slice.Tensor, (base, rows.dim, *bounds), {}, part, role="slice")
                for part, bounds in zip(_PARTS, ((0, middle), (middle, _END)), strict=True)
            ]
            self._sliced[key] = (made[0], made[1])
        return self._sliced[key]

    def _views(self, node: fx.Node, rows: Rows) -> tuple[fx.Node, fx.Node]:
        """Views instead of slices, where a slice would have to compare sizes of which too little is known.

        Inductor counts offsets from where an input begins. It gives a value that it computes itself, even a view, memory of its
        own. So the graph's strides and offset hold only for a value that begins its memory and is row-major, or is an input.
        """
        whole: torch.Tensor = node.meta["val"]
        strided = node.op != "placeholder" and not has_default_strides(whole)
        if strided or not same_size(whole.storage_offset(), 0):
            node = self._shape_call(aten.clone.default, (node,), memory_format=torch.contiguous_format)
            whole = node.meta["val"]
        strides = self._arguments(whole.stride())
        made = []
        for half, begin in ((0, 0), (1, self.sizes.units[0] * rows.per_unit * whole.stride(rows.dim))):
            shape = self._arguments(whole.shape)
            shape[rows.dim] = self.sizes.rows(half, rows.per_unit)
            offset = self.sizes.argument(whole.storage_offset() + begin)
            made.append(
                self._call(aten.as_strided.default, (node, shape, strides, offset), {}, _PARTS[half], role="slice")
            )
        return made[0], made[1]

    def _join(self, node: fx.Node, part: Part) -> fx.Node:
        layout = self.analysis.layouts[node]
        assert isinstance(layout, Rows) and layout.order is None, f"{node.name} can't be joined: {layout}"
        self.report.cats += 1
        halves = list(self._halves[node])
        joined = self._call(aten.cat.default, (halves, layout.dim), {}, part, role="cat")
        if self.sizes.opaque:
            joined = self._of_known_size(joined, layout, part)
        return self._unfolded(joined, layout, tuple(node.meta["val"].shape))

    def _of_known_size(self, node: fx.Node, rows: Rows, part: Part) -> fx.Node:
        """Joined halves, viewed as a value with all tokens: the compiler does not know that the halves add up to these."""
        shape: list[Size] = list(node.meta["val"].shape)
        shape[rows.dim] = rows.per_unit * self.analysis.axis.size
        if not has_default_strides(node.meta["val"]):  # as where the halves are "channels last"
            contiguous = {"memory_format": torch.contiguous_format}
            node = self._call(aten.clone.default, (node,), contiguous, part, role="cat")
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        return self._call(
            aten.as_strided.default, (node, self._arguments(shape), self._arguments(strides), 0), {}, part, role="cat"
        )

    def _folded(self, node: fx.Node, rows: Rows) -> fx.Node:
        """``[batch, ..., seq, ...]`` as ``[1, ..., batch * seq, ...]``."""
        if rows.outer is None:
            return node
        shape = list(node.meta["val"].shape)
        if not _adjacent(shape, rows):
            order = [dim for dim in range(len(shape)) if dim != rows.outer]
            order.insert(rows.dim - 1, rows.outer)
            node = self._shape_call(aten.permute.default, (node, order))
        shape[rows.dim] = shape[rows.outer] * shape[rows.dim]
        shape[rows.outer] = 1
        return self._shape_call(aten.reshape.default, (node, self._arguments(shape)))

    def _unfolded(self, node: fx.Node, rows: Rows, shape: tuple[Size, ...]) -> fx.Node:
        """The inverse of :meth:`_folded`, which gives a value of ``shape``."""
        if rows.outer is None:
            return node
        if _adjacent(shape, rows):
            return self._shape_call(aten.reshape.default, (node, self._arguments(shape)))
        apart = [size for dim, size in enumerate(shape) if dim != rows.outer]
        apart.insert(rows.dim - 1, shape[rows.outer])
        node = self._shape_call(aten.reshape.default, (node, self._arguments(apart)))
        order = [dim for dim in range(len(shape)) if dim != rows.dim - 1]
        order.insert(rows.outer, rows.dim - 1)
        return self._shape_call(aten.permute.default, (node, order))

    def _arguments(self, shape: Sequence[Size]) -> list[Any]:
        return [self.sizes.argument(size) for size in shape]

    # New nodes

    def _shape_call(self, target: Any, args: tuple[Any, ...], **kwargs: Any) -> fx.Node:
        return self._call(target, args, kwargs, "joined", role="layout")

    def _call(
        self,
        target: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        part: Part,
        *,
        noted: Annotation | None = None,
        role: str | None = None,
    ) -> fx.Node:
        note: Annotation = {**(noted or {}), **self._note(part, self._reason if part == "joined" else None)}
        if role is not None:
            note["role"] = role
        return self.inserter.call(target, args, kwargs, like=self._like, noted=note)

    _reason: str | None = None

    def _note(self, part: Part, reason: str | None) -> Annotation:
        return {"split": part} if reason is None else {"split": part, "reason": reason}


def _adjacent(shape: Sequence[Size], rows: Rows) -> bool:
    """Whether nothing lies between the dims of the batch and of the sequence."""
    assert rows.outer is not None
    return same_size(math.prod(shape[rows.outer + 1 : rows.dim]), 1)
