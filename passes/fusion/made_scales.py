"""Recognise float8 scales that are made of the values they scale: one for each row, or for each row and group of columns.

    values -> [view as groups] -> abs -> amax over the last dim -> / 448 -> [clamp_min]  = scales
    values / scales, or values * (1 / scales) -> [clamp to +-448] -> float8_e4m3fn

The lower bound may also be a bound of the amax instead of the scale. Casts between wider types on the way round; the fused
operator omits these roundings, as everywhere in :mod:`tw_compile.passes.fusion.quant`.

Hosts have operators that do this, which are recognised by name (:class:`tw_compile.passes.operators.MadeScaleArguments`).
"""

from __future__ import annotations

import operator
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from tw_compile.graph.predicates import (
    aten,
    constant,
    has_default_strides,
    is_call,
    is_cast,
    is_view,
    other_operand,
    same_size,
    value,
)
from tw_compile.kernels.collective.spec import FP8_MAX, SCALE_GROUPS
from tw_compile.passes.operators import Argument, MadeScaleArguments
from tw_compile.passes.reasons import QuantRefusal, QuantRefused

_POWERS = (aten.exp2.default, aten.ceil.default, aten.log2.default)


@dataclass(frozen=True)
class MadeScale:
    """How scales are made: ``scale_columns``, ``min_scale`` and ``divides_by_scale`` of ``NormSpec``."""

    columns: int
    min_scale: float
    divides: bool


@dataclass(frozen=True)
class MadeScales:
    """``scales`` is the node that holds the scales; None if nothing reads it.

    ``interior`` are the nodes that make the scales, and the nodes that lead from the scales to the division. No other nodes use
    the nodes that make the scales.
    """

    scale: MadeScale
    scales: fx.Node | None
    interior: tuple[fx.Node, ...]


def read_made_scales(
    factor: fx.Node, multiplied: bool, scaled: fx.Node, same: Container[fx.Node], hidden_size: int
) -> MadeScales | QuantRefused | None:
    """The scales that divide ``scaled``, or whose inverse multiplies it; None if ``factor`` is made of other values.

    ``same`` are the nodes that hold the norm's result. The scales must be made of one of them.
    """
    towards: list[fx.Node] = []
    inverse, node = multiplied, factor
    while is_view(node) or is_call(node, aten.reciprocal.default) or _repeats_last(node):
        inverse ^= is_call(node, aten.reciprocal.default)
        towards.append(node)
        node = node.args[0]  # type: ignore[assignment]
    walk = _Walk(same)
    source = walk.back(node)
    if source is None:
        return walk.refused
    if inverse:
        return QuantRefused(QuantRefusal.SCALE_FORM, f"{scaled.name} is multiplied by the scales {node.name}")
    rows, scales, factors = value(source), value(node), value(factor)
    laid = value(scaled)
    if rows is None or scales is None or factors is None or laid is None:
        return QuantRefused(QuantRefusal.SCALE_FORM, f"{node.name} has no tensor metadata")
    columns = rows.shape[-1]
    if not isinstance(columns, int) or not _is_group(columns, hidden_size):
        return QuantRefused(QuantRefusal.SCALE_GROUP, f"the scales {node.name} are made of {columns} columns each")
    fits = laid.dim() == factors.dim() and same_size(laid.shape[-1], columns) and _goes_over(factors, laid)
    if not fits:
        shapes = f"{list(factors.shape)} to values {list(laid.shape)}"
        return QuantRefused(QuantRefusal.SCALE_FORM, f"the scales {node.name} are applied as {shapes}")
    if scales.dtype != torch.float32:
        return QuantRefused(QuantRefusal.SCALE_DTYPE, f"the scales {node.name} have dtype {scales.dtype}, not float32")
    made = MadeScale(columns, walk.min_scale, divides=not multiplied)
    return MadeScales(made, node, (*reversed(walk.interior), *reversed(towards)))


def _is_group(columns: int, hidden_size: int | torch.SymInt) -> bool:
    """Whether a row has whole groups of so many columns: a view may also have groups of several rows' columns."""
    if not isinstance(hidden_size, int):
        return False
    return columns == hidden_size or (columns in SCALE_GROUPS and not hidden_size % columns)


def _goes_over(factors: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether each scale belongs to one row of ``values``."""
    leading = zip(factors.shape[:-1], values.shape[:-1], strict=True)
    last = factors.shape[-1]
    return all(same_size(a, b) for a, b in leading) and (same_size(last, 1) or same_size(last, values.shape[-1]))


def _repeats_last(node: fx.Node) -> bool:
    """Whether a node repeats each scale over the columns that share it."""
    if not is_call(node, aten.expand.default):
        return False
    source, result = value(node.args[0]), value(node)  # type: ignore[arg-type]
    if source is None or result is None or source.dim() != result.dim():
        return False
    return all(same_size(a, b) for a, b in zip(source.shape[:-1], result.shape[:-1], strict=True))


class _Walk:
    """A walk from scales back to the rows that the scales are made of."""

    def __init__(self, same: Container[fx.Node]) -> None:
        self.same = same
        self.min_scale = 0.0
        self.interior: list[fx.Node] = []
        self.refused: QuantRefused | None = None

    def back(self, node: fx.Node) -> fx.Node | None:
        """The node whose absolute values ``node`` is made of; None if there is none, or if it is refused (``refused``)."""
        last, divided = node, False
        while True:
            if not isinstance(node, fx.Node) or (node is not last and len(node.users) != 1):
                return None
            self.interior.append(node)
            before = _operand(node)
            if before is None:
                return None
            low, high = _bounds(node, before)
            if is_call(node, *_POWERS):
                self.refused = QuantRefused(
                    QuantRefusal.SCALE_POWER_OF_TWO, f"the scales {last.name} are powers of two"
                )
                return None
            if low is not None or high is not None:
                if high is not None:
                    detail = f"{node.name} bounds the scales {last.name} from above"
                    self.refused = QuantRefused(QuantRefusal.SCALE_BOUND, detail)
                    return None
                if low == "unknown":
                    return None
                self.min_scale = max(self.min_scale, float(low) if not divided else _divided(float(low)))
            elif _divides(node, before):
                if divided:
                    return None
                divided = True
            elif is_call(node, aten.amax.default) or _is_max(node):
                return self._largest(node) if divided else None
            elif not (is_view(node) or is_cast(node)):
                return None
            node = before

    def _largest(self, node: fx.Node) -> fx.Node | None:
        """The rows whose largest absolute value ``node`` computes; None if it does something else."""
        reduction = node
        if is_call(node, operator.getitem):
            reduction = node.args[0]  # type: ignore[assignment]
            self.interior.append(reduction)
            if len(reduction.users) != 1:
                return None
        sizes = reduction.args[0]
        tensor = value(sizes) if isinstance(sizes, fx.Node) else None
        dims = reduction.args[1] if len(reduction.args) > 1 else []
        dims = [dims] if isinstance(dims, int) else dims
        if (
            tensor is None
            or not isinstance(dims, list | tuple)
            or [dim % tensor.dim() for dim in dims] != [tensor.dim() - 1]
        ):
            return None
        node = sizes  # type: ignore[assignment]
        while (is_view(node) or is_cast(node)) and len(node.users) == 1 and node not in self.same:
            if is_view(node) and not same_size(value(node).shape[-1], tensor.shape[-1]):  # type: ignore[union-attr]
                return None
            self.interior.append(node)
            node = node.args[0]  # type: ignore[assignment]
        if not is_call(node, aten.abs.default) or len(node.users) != 1:
            return None
        self.interior.append(node)
        source = node.args[0]
        found = value(source) if isinstance(source, fx.Node) and source in self.same else None
        return source if found is not None and same_size(found.shape[-1], tensor.shape[-1]) else None  # type: ignore[return-value]


def _operand(node: fx.Node) -> fx.Node | None:
    """The one node that ``node`` is computed from, besides constants."""
    sources = [one for one in node.all_input_nodes if constant(one) is None]
    return sources[0] if len(sources) == 1 else None


def _bounds(node: fx.Node, operand: fx.Node) -> tuple[Any, Any]:
    """The lower and the upper bound that ``node`` clamps to. None: there is no such bound; "unknown": it is no constant."""
    if is_call(node, aten.clamp.default, aten.clamp.Tensor):
        given = dict(zip(("min", "max"), node.args[1:], strict=False)) | node.kwargs
        low, high = given.get("min"), given.get("max")
        return None if low is None else _known(low), None if high is None else _known(high)
    if is_call(node, aten.clamp_min.default, aten.clamp_min.Tensor, aten.maximum.default):
        return _known(other_operand(node, operand)), None
    if is_call(node, aten.clamp_max.default, aten.clamp_max.Tensor, aten.minimum.default):
        return None, _known(other_operand(node, operand))
    return None, None


def _known(bound: object) -> float | str:
    number = constant(bound)
    return "unknown" if number is None else number


def _divides(node: fx.Node, operand: fx.Node) -> bool:
    """Whether ``node`` divides ``operand`` by the largest float8 number."""
    number = constant(other_operand(node, operand)) if len(node.args) > 1 else None
    if number is None:
        return False
    if is_call(node, aten.div.Tensor, aten.div.Scalar):
        return node.args[0] is operand and number == float(FP8_MAX)
    return is_call(node, aten.mul.Tensor, aten.mul.Scalar) and abs(number * float(FP8_MAX) - 1) < 1e-7


def _is_max(node: fx.Node) -> bool:
    return is_call(node, operator.getitem) and bool(node.args[1] == 0) and is_call(node.args[0], aten.max.dim)


def _divided(amax: float) -> float:
    """The scale that belongs to an amax, computed in float32."""
    return float(torch.tensor(amax, dtype=torch.float32) / torch.tensor(FP8_MAX, dtype=torch.float32))


def made_by_operator(
    given: MadeScaleArguments, arguments: Mapping[Argument, Any], rows: fx.Node, scales: fx.Node | None
) -> MadeScales | QuantRefused:
    """The scales that a host's operator makes of ``rows``; ``given`` names the arguments that say how.

    ``scales`` is the node of the operator's result that holds the scales; None if nothing reads it.
    """
    tensor, where = value(rows), rows.name
    hidden_size = None if tensor is None else tensor.shape[-1]
    for name, expected, reason in (
        (given.upper_bound, None, QuantRefusal.SCALE_BOUND),
        *((name, False, QuantRefusal.SCALE_POWER_OF_TWO) for name in given.power_of_two),
        *((name, False, QuantRefusal.SCALE_LAYOUT) for name in given.other_layout),
        *((name, -FP8_MAX, QuantRefusal.CLAMP) for name in given.least),
        *((name, FP8_MAX, QuantRefusal.CLAMP) for name in given.greatest),
    ):
        if name is not None and arguments.get(name, expected) != expected:
            return QuantRefused(reason, f"what quantises {where} is given {arguments[name]} for {name}")
    columns = hidden_size if given.group_size is None else arguments[given.group_size]
    if not isinstance(columns, int) or not isinstance(hidden_size, int):
        return QuantRefused(QuantRefusal.SCALE_GROUP, f"{where} has rows of {hidden_size}, scales of {columns} columns")
    if columns != hidden_size and (columns not in SCALE_GROUPS or hidden_size % columns):
        return QuantRefused(QuantRefusal.SCALE_GROUP, f"{where} is quantised by scales of {columns} columns each")
    made = None if scales is None else value(scales)
    if made is not None and not has_default_strides(made):
        return QuantRefused(QuantRefusal.SCALE_LAYOUT, f"{scales.name} has strides {made.stride()}")  # type: ignore[union-attr]
    least = given.min_scale if given.min_amax is None else _divided(arguments[given.min_amax])
    return MadeScales(MadeScale(columns, least, divides=True), scales, () if scales is None else (scales,))
