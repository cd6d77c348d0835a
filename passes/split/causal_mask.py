"""Whether a mask of attention provably hides from every token all tokens behind it, whatever else it hides.

Masks are read backwards from where attention takes them: through views, ``where`` and logic down to a comparison of positions
of keys with positions of queries. Those are computed for real, as vectors: ``[queries, keys]`` is never made. What depends on
inputs, such as padding, may only hide more.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

from tw_compile import compat
from tw_compile.graph.predicates import aten, is_call, same_size

_MAX_POSITIONS = 1 << 22

_AND = (aten.bitwise_and.Tensor, aten.logical_and.default)
_OR = (aten.bitwise_or.Tensor, aten.logical_or.default)
_NOT = (aten.bitwise_not.default, aten.logical_not.default)
_UNCHANGED = (
    aten.alias.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.detach.default,
    torch.ops.prims.convert_element_type.default,
    aten._to_copy.default,
)
_VIEWS = (
    aten.expand.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.view.default,
)

_COMPARED: dict[Any, str] = {
    aten.le.Tensor: "le",
    aten.lt.Tensor: "lt",
    aten.ge.Tensor: "ge",
    aten.gt.Tensor: "gt",
    aten.le.Scalar: "le",
    aten.lt.Scalar: "lt",
    aten.ge.Scalar: "ge",
    aten.gt.Scalar: "gt",
}
_MIRRORED = {"le": "ge", "ge": "le", "lt": "gt", "gt": "lt"}
_NEGATED = {"le": "gt", "gt": "le", "lt": "ge", "ge": "lt"}


def hides_later_keys(mask: fx.Node) -> bool:
    """Whether ``mask[..., i, j]`` of a ``[..., tokens, tokens]`` mask is False, or minus infinity, for every ``j > i``.

    False also where that can't be proven.
    """
    shape = mask.meta["val"].shape
    if len(shape) < 2 or not same_size(shape[-2], shape[-1]) or not isinstance(shape[-1], int):
        return False
    with compat.real_tensors(), torch.no_grad():
        return _Proof(shape[-1]).hidden(mask)


class _Proof:
    """Of a mask of ``size`` queries and keys. "Above" is where the key is behind the query, above the diagonal."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._known: dict[fx.Node, torch.Tensor | None] = {}

    def hidden(self, mask: Any) -> bool:
        """Whether a mask is False, or minus infinity, above."""
        if isinstance(mask, fx.Node) and mask.meta["val"].dtype == torch.bool:
            return self.is_above(mask, False)
        inner = self._same_matrix(mask)
        if inner is not None:
            return self.hidden(inner)
        if is_call(mask, aten.where.self):
            condition, chosen, other = mask.args
            if self.is_above(condition, False):
                return self.hidden(other)
            if self.is_above(condition, True):
                return self.hidden(chosen)
            return self.hidden(chosen) and self.hidden(other)
        return _constant(mask) == -math.inf

    def is_above(self, condition: Any, what: bool) -> bool:
        """Whether a condition is ``what`` everywhere above."""
        inner = self._same_matrix(condition)
        if inner is not None:
            return self.is_above(inner, what)
        if is_call(condition, *_NOT):
            return self.is_above(condition.args[0], not what)
        if is_call(condition, *_AND, *_OR):
            enough = any if is_call(condition, *_AND) is not what else all
            return enough(self.is_above(one, what) for one in condition.args)
        if isinstance(condition, fx.Node) and condition.target in _COMPARED:
            return self._compared(condition, what)
        constant = _constant(condition)
        return constant is not None and bool(constant) is what

    def _same_matrix(self, node: Any) -> Any:
        """What ``node`` only views, with the same ``[queries, keys]`` in its last dims; None if it is no such view."""
        if not isinstance(node, fx.Node) or node.op != "call_function":
            return None
        inner: Any
        if is_call(node, aten.slice.Tensor):
            return self._padded(node)
        if is_call(node, *_UNCHANGED):
            inner = node.args[0]
            floats = (node.meta["val"].is_floating_point(), inner.meta["val"].is_floating_point())
            kept = node.meta["val"].dtype == inner.meta["val"].dtype or all(floats)
            return inner if kept else None
        if is_call(node, *_VIEWS):
            inner = node.args[0]
            if inner.meta["val"].dim() == 0:
                return inner
            return inner if _last_dims(inner) == _last_dims(node) == (self.size, self.size) else None
        return None

    def _padded(self, node: fx.Node) -> Any:
        """What was padded behind its last key, of a slice that takes the padding off again: kernels want aligned rows."""
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

    def _compared(self, node: fx.Node, what: bool) -> bool:
        """Of a comparison of positions; also as ``a - b`` with a number, as ``tril`` has it."""
        left, right = node.args[:2]
        name = _COMPARED[node.target]
        offset: Any = 0
        if not isinstance(right, fx.Node):
            if not is_call(left, aten.sub.Tensor) or left.kwargs or not isinstance(right, int):
                return False
            (left, right), offset = left.args[:2], right
        a, b = self._positions(left), self._positions(right)
        if a is None or b is None:
            return False
        b = b + offset
        if a.shape[-1] == 1:
            a, b, name = b, a, _MIRRORED[name]
        keys, queries = a.flatten(), b.flatten()
        if (a.shape[-1], b.shape[-1]) != (self.size, 1) or len(keys) != self.size or len(queries) != self.size:
            return False
        if b.dim() < 2 or b.shape[-2] != self.size:
            return False
        if not what:
            name = _NEGATED[name]
        holds: Callable[[Any, Any], torch.Tensor] = getattr(operator, name)
        latest = name in ("ge", "gt")
        behind = keys[1:].flip(0)
        worst = (behind.cummin(0) if latest else behind.cummax(0)).values.flip(0) if len(behind) else behind
        return bool(holds(worst, queries[:-1]).all())

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
        if torch.Tag.nondeterministic_seeded in node.target.tags or node.target._schema.is_mutable:  # type: ignore[union-attr]
            return None
        if not all(isinstance(size, int) for size in found.shape) or found.numel() > _MAX_POSITIONS:
            return None
        operands = {one: self._value(one) for one in node.all_input_nodes}
        if any(one is None for one in operands.values()):
            return None
        args, kwargs = fx.map_arg((node.args, node.kwargs), operands.__getitem__)
        on_cpu = {"device": torch.device("cpu")} if "device" in kwargs else {}
        return node.target(*args, **{**kwargs, **on_cpu})  # type: ignore[operator]


def _last_dims(node: fx.Node) -> tuple[Any, ...]:
    return tuple(node.meta["val"].shape[-2:])


def _constant(node: Any) -> float | bool | int | None:
    """The number that fills a tensor."""
    if isinstance(node, bool | int | float):
        return node
    if is_call(node, aten.full.default) and isinstance(node.args[1], bool | int | float):
        return node.args[1]
    return None
