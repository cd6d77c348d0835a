"""Prove that an attention mask hides from every token all tokens behind it, whatever else it hides.

The proof reads a mask backwards from where attention takes it: through views, ``where``, logic and arithmetic, down to
comparisons of positions of keys with positions of queries. These positions are computed for real, as vectors: no matrix
``[queries, keys]`` is ever made. Of all other values only the bounds are known, by interval arithmetic. Inputs, such as
padding, may be anything.

A large negative number, such as ``torch.finfo(dtype).min``, hides a key only from queries that see another key: if a whole row
is large and negative, softmax gives the mean over all keys. So where a mask hides by another number than minus infinity, each
token must be proven to see itself.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from enum import Enum
from itertools import product
from typing import Any

import torch
import torch.fx as fx

from tw_compile import compat
from tw_compile.graph.predicates import aten, draws_random_numbers, is_call, same_size

HIDES = -(2.0**100)
"""Numbers up to this one, added to a score, hide a key.

The exponential of such a score is exactly 0 beside a score without the addition, because no two scores differ by that much.
Scores of float16 may differ by as much as float16's smallest number, -65504, so this number is not taken for hiding."""

_MAX_POSITIONS = 1 << 22

Bounds = tuple[float, float]
"""The smallest and the largest number of some elements; bools are 0 and 1."""

_FALSE, _TRUE, _EITHER, _ANY = (0.0, 0.0), (1.0, 1.0), (0.0, 1.0), (-math.inf, math.inf)


class _Part(Enum):
    """Parts of a matrix ``[queries, keys]``: where the key is behind the query, and where the key is the query's own."""

    ABOVE = "above the diagonal"
    DIAGONAL = "on the diagonal"


_VIEWS = (
    aten.expand.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.view.default,
)
_COPIES = (
    aten.alias.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.detach.default,
)
_CASTS = (torch.ops.prims.convert_element_type.default, aten._to_copy.default)
_ARITHMETIC: dict[Any, Callable[[float, float], float]] = {
    aten.add.Tensor: operator.add,
    aten.sub.Tensor: operator.sub,
    aten.mul.Tensor: operator.mul,
    aten.bitwise_and.Tensor: min,
    aten.logical_and.default: min,
    aten.bitwise_or.Tensor: max,
    aten.logical_or.default: max,
}
_LOGIC = (
    aten.bitwise_and.Tensor,
    aten.bitwise_or.Tensor,
    aten.logical_and.default,
    aten.logical_or.default,
    aten.bitwise_not.default,
    aten.logical_not.default,
)
_COMPARED: dict[Any, str] = {
    getattr(getattr(aten, name), overload): name
    for name in ("le", "lt", "ge", "gt", "eq", "ne")
    for overload in ("Tensor", "Scalar")
}
_MIRRORED = {"le": "ge", "ge": "le", "lt": "gt", "gt": "lt", "eq": "eq", "ne": "ne"}
_NEGATED = {"le": "gt", "gt": "le", "lt": "ge", "ge": "lt", "eq": "ne", "ne": "eq"}


def objection_to(mask: fx.Node) -> str | None:
    """Why a ``[..., tokens, tokens]`` mask may let tokens see those behind them; None if it is proven not to.

    The mask is a bool, or is added to scores.
    """
    shape = mask.meta["val"].shape
    if len(shape) < 2 or not same_size(shape[-2], shape[-1]) or not isinstance(shape[-1], int):
        return "is not of a known number of tokens, squared"
    with compat.real_tensors(), torch.no_grad():
        proof = _Proof(shape[-1])
        highest = proof.bounds(mask, _Part.ABOVE)[1]
        if mask.meta["val"].dtype == torch.bool:
            return None if highest == 0.0 else "is not proven to hide later tokens"
        if highest == -math.inf:
            return None
        if highest > HIDES:
            return f"is not proven to hide later tokens, by minus infinity or by {HIDES:.0e} and less"
        seen = proof.bounds(mask, _Part.DIAGONAL)[0] >= 0.0
        return None if seen else "is not minus infinity where it hides, and may hide all tokens from one"


class _Proof:
    """Proves things about one mask ``[size, size]`` of queries and keys; remembers the nodes that it has looked at."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._known: dict[fx.Node, torch.Tensor | None] = {}

    def bounds(self, node: Any, part: _Part) -> Bounds:
        """Bounds of the elements of a matrix in ``part``; of all elements of a value that is broadcast against a matrix."""
        if isinstance(node, bool | int | float):
            return float(node), float(node)
        if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), torch.Tensor):
            return _ANY
        dtype = node.meta["val"].dtype
        low, high = self._found(node, part)
        if dtype == torch.bool:
            return _clipped(low), _clipped(high)
        if dtype.is_floating_point:
            return _rounded(low, dtype), _rounded(high, dtype)
        within = not dtype.is_complex and torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max
        return (low, high) if within else _ANY

    def _found(self, node: fx.Node, part: _Part) -> Bounds:
        inner = self._same_matrix(node)
        if inner is not None:
            return self.bounds(inner, part)
        if is_call(node, aten.full.default):
            return self.bounds(node.args[1], part)
        if is_call(node, *_CASTS):
            return self._cast(node, part)
        if is_call(node, aten.where.self):
            condition, chosen, other = node.args
            met = self.bounds(condition, part)
            if met in (_TRUE, _FALSE):
                return self.bounds(chosen if met == _TRUE else other, part)
            (low, high), (low_other, high_other) = self.bounds(chosen, part), self.bounds(other, part)
            return min(low, low_other), max(high, high_other)
        if is_call(node, *_LOGIC) and any(_dtype(one) != torch.bool for one in node.args):
            return _EITHER if _dtype(node) == torch.bool else _ANY
        if is_call(node, aten.bitwise_not.default, aten.logical_not.default):
            low, high = self.bounds(node.args[0], part)
            return 1.0 - high, 1.0 - low
        if node.op == "call_function" and node.target in _ARITHMETIC and not node.kwargs:
            compute = _ARITHMETIC[node.target]
            corners = [compute(*pair) for pair in product(*(self.bounds(one, part) for one in node.args))]
            return _ANY if any(map(math.isnan, corners)) else (min(corners), max(corners))
        if node.op == "call_function" and node.target in _COMPARED:
            return self._compared(node, part)
        return _ANY

    def _cast(self, node: fx.Node, part: _Part) -> Bounds:
        low, high = self.bounds(node.args[0], part)
        if _dtype(node) == torch.bool:
            return _TRUE if low > 0.0 or high < 0.0 else _FALSE if low == high == 0.0 else _EITHER
        kept = _dtype(node).is_floating_point or _dtype(node.args[0]) in (torch.bool, _dtype(node))
        return (low, high) if kept else _ANY

    def _same_matrix(self, node: fx.Node) -> Any:
        """The value that ``node`` only views or copies, with the same ``[queries, keys]`` in its last dims; None if none."""
        if is_call(node, aten.slice.Tensor):
            return self._padded(node)
        if is_call(node, *_COPIES):
            return node.args[0]
        if is_call(node, *_VIEWS):
            inner: Any = node.args[0]
            if inner.meta["val"].dim() == 0:
                return inner
            return inner if _last_dims(inner) == _last_dims(node) == (self.size, self.size) else None
        return None

    def _padded(self, node: fx.Node) -> Any:
        """The value without padding, if ``node`` slices off padding behind the last key. Kernels want such aligned rows."""
        defaults: tuple[Any, ...] = (0, None, None, 1)
        given: list[Any] = [*node.args, *defaults[len(node.args) - 1 :]]
        padded, dim, start, end, step = given
        if not is_call(padded, aten.constant_pad_nd.default):
            return None
        inner: Any
        pad: Any
        inner, pad = padded.args[:2]
        is_last = dim % len(padded.meta["val"].shape) == len(padded.meta["val"].shape) - 1
        taken_off = is_last and (start or 0, end, step) == (0, self.size, 1) and len(pad) == 2 and pad[0] == 0
        return inner if taken_off and _last_dims(inner) == (self.size, self.size) else None

    def _compared(self, node: fx.Node, part: _Part) -> Bounds:
        found = self._compared_positions(node, part)
        if found is not None:
            return found
        name = _COMPARED[node.target]
        left, right = node.args[:2]
        if not isinstance(right, fx.Node) and _rounded(right, _dtype(left)) != right:  # type: ignore[arg-type]
            return _EITHER
        (low, high), (low_other, high_other) = (self.bounds(one, part) for one in (left, right))
        if name in ("eq", "ne"):
            same = low == high == low_other == high_other
            apart = high < low_other or low > high_other
            if not (same or apart):
                return _EITHER
            return _TRUE if same is (name == "eq") else _FALSE
        holds: Callable[[float, float], bool] = getattr(operator, name)
        outcomes = {holds(low, high_other), holds(high, low_other)}
        return _EITHER if len(outcomes) > 1 else _TRUE if outcomes == {True} else _FALSE

    def _compared_positions(self, node: fx.Node, part: _Part) -> Bounds | None:
        """The bounds of a comparison of positions, or of ``a - b`` with a number, as in ``tril``. None for other ones."""
        left, right = node.args[:2]
        name = _COMPARED[node.target]
        offset: Any = 0
        if not isinstance(right, fx.Node):
            if not is_call(left, aten.sub.Tensor) or left.kwargs or not isinstance(right, int):
                return None
            (left, right), offset = left.args[:2], right
        a, b = self._positions(left), self._positions(right)
        if a is None or b is None:
            return None
        b = b + offset
        if a.dim() == 0 or b.dim() == 0:
            return None
        if a.shape[-1] == 1:
            a, b, name = b, a, _MIRRORED[name]
        keys, queries = a.flatten(), b.flatten()
        if (a.shape[-1], b.shape[-1]) != (self.size, 1) or len(keys) != self.size or len(queries) != self.size:
            return None
        if b.dim() < 2 or b.shape[-2] != self.size:
            return None
        always = _holds_above if part is _Part.ABOVE else _holds_between
        if always(name, keys, queries):
            return _TRUE
        return _FALSE if always(_NEGATED[name], keys, queries) else _EITHER

    def _positions(self, node: Any) -> torch.Tensor | None:
        """The values of a vector that depends on no input; None if it does, or is a matrix."""
        if not isinstance(node, fx.Node):
            return None
        numel = node.meta["val"].numel()
        return self._value(node) if isinstance(numel, int) and numel <= self.size else None

    def _value(self, node: fx.Node) -> torch.Tensor | None:
        if node not in self._known:
            self._known[node] = None
            self._known[node] = self._computed(node)
        return self._known[node]

    def _computed(self, node: fx.Node) -> torch.Tensor | None:
        found = node.meta.get("val")
        pure = node.op == "call_function" and isinstance(node.target, compat.OpOverload)
        if not pure or not isinstance(found, torch.Tensor) or found.is_floating_point() or node.is_impure():
            return None
        if draws_random_numbers(node) or node.target._schema.is_mutable:  # type: ignore[union-attr]
            return None
        if not all(isinstance(size, int) for size in found.shape) or found.numel() > _MAX_POSITIONS:
            return None
        operands = {one: self._value(one) for one in node.all_input_nodes}
        if any(one is None for one in operands.values()):
            return None
        args, kwargs = fx.map_arg((node.args, node.kwargs), operands.__getitem__)
        on_cpu = {"device": torch.device("cpu")} if "device" in kwargs else {}
        return node.target(*args, **{**kwargs, **on_cpu})  # type: ignore[operator]


def _holds_between(name: str, keys: torch.Tensor, queries: torch.Tensor) -> bool:
    """Whether the comparison holds for every key and the query of the same index."""
    return bool(getattr(operator, name)(keys, queries).all())


def _holds_above(name: str, keys: torch.Tensor, queries: torch.Tensor) -> bool:
    """Whether the comparison holds for every query and all keys of a larger index.

    Only the extreme one of these keys is looked at. That does not decide equality, so for ``eq`` and ``ne`` the answer is False
    if there are such keys.
    """
    behind = keys[1:].flip(0)
    if name in ("eq", "ne"):
        return not len(behind)
    latest = name in ("ge", "gt")
    worst = (behind.cummin(0) if latest else behind.cummax(0)).values.flip(0) if len(behind) else behind
    return _holds_between(name, worst, queries[:-1])


def _clipped(number: float) -> float:
    """The number, clipped to the range of a bool, 0 to 1."""
    return min(max(number, 0.0), 1.0)


def _rounded(number: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(number, dtype=torch.float64).to(dtype))


def _dtype(operand: Any) -> torch.dtype:
    return operand.meta["val"].dtype if isinstance(operand, fx.Node) else torch.tensor(operand).dtype


def _last_dims(node: fx.Node) -> tuple[Any, ...]:
    return tuple(node.meta["val"].shape[-2:])
