"""Where the tokens of a value are, and what a rule may say of an operator.

The graph is split along an axis of ``axis.size`` units, the first ``first`` of which make half 1. A unit is a token, or a
whole request. A value that is split obeys one invariant: its half is a slice of what the unsplit graph computes there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.fx as fx

from tw_compile.graph.predicates import same_size
from tw_compile.passes.reasons import JoinReason

Size = int | torch.SymInt


@dataclass(frozen=True)
class Rows:
    """``dim`` holds ``per_unit`` entries for each unit, those of one unit next to each other.

    With ``outer`` the units are spread over two dims, ``[batch, seq]`` with ``batch`` at ``outer`` and ``seq`` at ``dim``,
    which is further right but not necessarily next to it. In a half ``outer`` has size 1 and ``dim`` holds all of the half's
    units, as a half needn't end where a request does.

    ``order`` is the sort that has permuted the entries of each half, None for the order of the unsplit graph. Permuted
    halves are not slices of the unsplit value, so nothing but their own inverse permutation may undo the split.
    """

    dim: int
    per_unit: Size = 1
    outer: int | None = None
    order: fx.Node | None = None

    def __post_init__(self) -> None:
        assert self.outer is None or self.outer < self.dim, self

    def moved(self, dim: int, outer: int | None) -> Rows:
        return replace(self, dim=dim, outer=outer)

    def same_as(self, other: Rows) -> bool:
        return (
            (self.dim, self.outer) == (other.dim, other.outer)
            and self.order is other.order
            and same_size(self.per_unit, other.per_unit)
        )


@dataclass(frozen=True)
class Local:
    """A value that means something only within its half: the halves' values are no slices of the unsplit one.

    ``owner`` is the node that introduced it; if anything but the operators that know ``role`` reads it, that node runs joined.
    ``rows`` is the layout of the tokens in the owner's operand; ``divisor`` belongs to the role ``entry_units``.
    """

    role: str
    owner: fx.Node
    rows: Rows
    divisor: int = 1


Layout = Rows | Local | None
"""None: the value has no token axis, or is computed once from joined halves; both halves read the whole of it."""


@dataclass(frozen=True)
class Slice:
    """How a half takes its rows out of a whole value, which is expanded to ``shape`` first if that is given."""

    rows: Rows
    shape: tuple[Size, ...] | None = None


@dataclass(frozen=True)
class HalfSize:
    """Stands in the arguments of a split operator for ``per_unit`` times the units of the half."""

    per_unit: Size


@dataclass(frozen=True)
class HalfIndex:
    """Stands for ``first`` in half 1 and ``first + 1`` in half 2."""

    first: int


@dataclass(frozen=True)
class HalfCall:
    """Stands for the result of a call that each half makes for itself."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class HalfBuilder(Protocol):
    """Adds a half's operators to the graph. Halves are 0 and 1 here."""

    @property
    def units(self) -> tuple[Any, Any, Any]:
        """Units of half 0, of half 1 and of both, as arguments."""

    def rows(self, operand: fx.Node, half: int, rows: Rows) -> fx.Node:
        """A half's rows of an operand. For a whole operand, ``rows`` says where its rows are."""

    def rows_until(self, operand: fx.Node, half: int, rows: Rows) -> fx.Node:
        """A half's rows and all before them."""

    def whole(self, operand: fx.Node) -> fx.Node:
        """All of an operand, joined if it is split."""

    def call(self, half: int | None, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new operator; ``half`` None for one that is made for both."""

    def once(self, key: Any, make: Callable[[], fx.Node]) -> fx.Node:
        """The node that ``make`` has added for this ``key`` when it was first asked for; it may be of neither half."""


@dataclass(frozen=True)
class RowWise:
    """Each half may run the operator on its own rows.

    ``out`` is the layout of the result, a tuple for several results. ``slices`` names the whole operands of which a half reads
    only its rows. ``args`` and ``kwargs`` replace the node's own when sizes differ in the halves. Where these can't express a
    half, ``build`` adds the nodes that make its result; of several results, only the one with a layout may have readers.
    """

    out: Layout | tuple[Layout, ...]
    slices: Mapping[fx.Node, Slice] = field(default_factory=dict)
    args: tuple[Any, ...] | None = None
    kwargs: Mapping[str, Any] | None = None
    build: Callable[[HalfBuilder, int], fx.Node] | None = None


@dataclass(frozen=True)
class Join:
    """The operator needs all tokens: it runs once, on the joined halves."""

    reason: JoinReason
    detail: str


Verdict = RowWise | Join


def units_per(size: Size, units: Size) -> Size | None:
    """``size / units`` if that is known to be a whole number, at least 1."""
    quotient = size // units
    return quotient if not same_size(quotient, 0) and same_size(quotient * units, size) else None


def reshaped(rows: Rows, before: tuple[Size, ...], after: tuple[Size, ...], units: Size) -> Rows | None:
    """Where the tokens are when a tensor of shape ``before`` is viewed as ``after``; None if they are mixed with others.

    A view keeps the row-major order of the elements, so the tokens are found again by the number of elements before them.
    """
    first = rows.dim if rows.outer is None else rows.outer
    prefix = math.prod(before[:first])
    if rows.outer is not None:
        between = math.prod(before[rows.outer + 1 : rows.dim])
        if not same_size(between, 1):
            outer = _dim_at(after, prefix, before[rows.outer])
            dim = _dim_at(after, prefix * before[rows.outer] * between, before[rows.dim])
            return None if outer is None or dim is None else rows.moved(dim, outer)
    place = _begin(after, prefix)
    if place is None:
        return None
    if rows.order is not None:
        return rows.moved(place, None) if same_size(after[place], before[rows.dim]) else None
    per_unit = units_per(after[place], units)
    if per_unit is not None:
        return Rows(place, per_unit)
    for dim in range(place + 1, len(after)):
        if not same_size(after[dim], 1):
            return Rows(dim, 1, place) if same_size(after[place] * after[dim], units) else None
    return None


def _begin(shape: tuple[Size, ...], prefix: Size) -> int | None:
    """The first dim, of a size other than 1, that has ``prefix`` elements before it."""
    product: Size = 1
    for dim, size in enumerate(shape):
        if same_size(product, prefix) and not same_size(size, 1):
            return dim
        product = product * size
    return None


def _dim_at(shape: tuple[Size, ...], prefix: Size, size: Size) -> int | None:
    dim = _begin(shape, prefix)
    return dim if dim is not None and same_size(shape[dim], size) else None
