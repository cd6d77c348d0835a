"""Recognise a quantisation of a norm's result to float8, however the source wrote it.

    hidden -> [views, casts] -> / scale, or * (1 / scale) -> [clamp to +-448] -> float8_e4m3fn

The scale is a number, or a float32 tensor of one element that is an input of the graph. Or there are many scales, which are
computed from the values themselves (:mod:`tw_compile.passes.fusion.made_scales`). Only the last cast rounds to float8. Casts
between wider types on the way also round; the fused operator omits these roundings. A cast without a clamp saturates, as it
does in the code that Inductor makes for GPUs (eager PyTorch gives NaN from 464 on).

Hosts have quantising operators, which are recognised by name (:class:`tw_compile.passes.operators.QuantOperator` and
:class:`tw_compile.passes.operators.MadeQuantOperator`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx

from tw_compile import compat
from tw_compile.graph.predicates import (
    aten,
    constant,
    is_call,
    is_cast,
    is_float8,
    is_view,
    other_operand,
    same_size,
    value,
)
from tw_compile.kernels.collective.spec import FP8, FP8_MAX, SUPPORTED_DTYPES
from tw_compile.passes.fusion.forms import HostCall, host_call
from tw_compile.passes.fusion.made_scales import MadeScale, MadeScales, made_by_operator, read_made_scales
from tw_compile.passes.operators import MadeQuantOperator, QuantOperator
from tw_compile.passes.reasons import QuantRefusal, QuantRefused

_MIN_CAPABILITY = (8, 9)
_NORMAL = torch.finfo(torch.float32).smallest_normal

_LOWER = (aten.clamp_min.default, aten.clamp_min.Tensor, aten.maximum.default)
_UPPER = (aten.clamp_max.default, aten.clamp_max.Tensor, aten.minimum.default)


@dataclass(frozen=True)
class Scale:
    """What the values are divided by: a number, or a node that holds a float32 tensor of one element.

    With ``inverse`` the node holds what they are multiplied by.
    """

    source: fx.Node | float
    inverse: bool = False


@dataclass(frozen=True)
class Quantisation:
    """``outputs`` are the float8 tensors that a fused operator's hidden output replaces, in any shape.

    ``interior`` are the nodes between the norm's output and ``outputs``, inclusive. ``scales`` are the tensors that hold the
    scales, if the scales are made of the values. Nodes outside of ``interior`` read only ``outputs`` and ``scales``.
    """

    scale: Scale | MadeScale
    outputs: tuple[fx.Node, ...]
    interior: tuple[fx.Node, ...]
    scales: tuple[fx.Node, ...] = ()
    hidden_size: int = 0

    @property
    def made(self) -> MadeScale | None:
        """How the scales are made; None if one scale is given."""
        return self.scale if isinstance(self.scale, MadeScale) else None

    @property
    def scales_per(self) -> str:
        """What has a scale of its own: ``token``, or ``group128`` of its columns; empty if one scale is given for all."""
        if self.made is None:
            return ""
        return "token" if self.made.columns == self.hidden_size else f"group{self.made.columns}"

    @property
    def scale_nodes(self) -> list[tuple[fx.Node, int]]:
        """``scales``, each with the number of scales that the operator has for a token."""
        return [] if self.made is None else [(node, self.hidden_size // self.made.columns) for node in self.scales]


@dataclass(frozen=True)
class Place:
    """Where the quantisation would be done.

    ``capability`` is that of the GPUs, None on a machine without GPUs. ``before`` says whether a node comes early enough for
    the fused operator to read its value.
    """

    device: torch.device
    capability: tuple[int, int] | None
    before: Callable[[fx.Node], bool]


@dataclass(frozen=True)
class _Branch:
    """One path from the norm's output to float8; ``problem`` is what is wrong with it besides its scale.

    ``scaled`` is the node that ``factor`` divides. With ``made`` the scales are made of the values, and ``factor`` is ignored.
    """

    factor: Any
    inverse: bool
    outputs: tuple[fx.Node, ...]
    interior: tuple[fx.Node, ...]
    problem: QuantRefused | None = None
    scaled: fx.Node | None = None
    made: MadeScales | None = None


def find_quantisation(hidden: fx.Node, place: Place) -> Quantisation | QuantRefused | None:
    """The quantisation that all uses of ``hidden`` belong to; None if no use of ``hidden`` is a quantisation."""
    branches: list[_Branch] = []
    others: list[fx.Node] = []
    same = _same_values(hidden)
    for source in same:
        for user in source.users:
            if user in same:
                continue
            branch = _read_operator(user, source) or _read_chain(user, source)
            if branch is None:
                others.append(user)
            else:
                branches.append(_with_made_scales(branch, same, hidden))
    if not branches:
        return None
    proven = _prove(branches, place, hidden)
    making = {node for branch in branches if branch.made is not None for node in branch.made.interior}
    elsewhere = next((user for user in others if user not in making), None)
    if isinstance(proven, Quantisation) and elsewhere is not None:
        return QuantRefused(QuantRefusal.OUTPUT_USED_ELSEWHERE, f"{elsewhere.name} reads the norm's result, too")
    if isinstance(proven, Quantisation):
        views = tuple(node for node in same if node is not hidden)
        return replace(proven, interior=(*views, *proven.interior))
    return proven


def quantisation_of_operator(
    output: fx.Node, scale: Any, place: Place, made: MadeScales | None = None
) -> Quantisation | QuantRefused:
    """The quantisation of a host's operator that normalises, and quantises with ``scale`` or with scales that it has ``made``.

    ``output`` is its float8 result.
    """
    return _prove([_Branch(scale, False, (output,), (), made=made)], place, output)


def _with_made_scales(branch: _Branch, same: list[fx.Node], hidden: fx.Node) -> _Branch:
    """The branch, with ``made`` filled in if its factor holds scales that are made of the norm's result."""
    factor, rows = branch.factor, value(hidden)
    if branch.made is not None or branch.scaled is None or rows is None or not isinstance(factor, fx.Node):
        return branch
    found = read_made_scales(factor, branch.inverse, branch.scaled, frozenset(same), rows.shape[-1])
    if isinstance(found, QuantRefused):
        return replace(branch, problem=branch.problem or found)
    return branch if found is None else replace(branch, made=found)


def _same_values(hidden: fx.Node) -> list[fx.Node]:
    """``hidden`` and its views and casts, except casts to float8."""
    same = [hidden]
    for node in same:
        same += [user for user in node.users if user not in same and (is_view(user) or _is_wide_cast(user))]
    return same


def _is_wide_cast(node: fx.Node) -> bool:
    result = value(node)
    return is_cast(node) and result is not None and result.dtype in SUPPORTED_DTYPES


def _read_chain(node: fx.Node, source: fx.Node) -> _Branch | None:
    """Follow single users from ``node``, which reads ``source``, to a cast to float8; None when there is none."""
    factor: Any = None
    scaled: fx.Node | None = None
    inverse, early = False, False
    bounds: set[tuple[str, float | None]] = set()
    interior: list[fx.Node] = []
    current = source
    while True:
        interior.append(node)
        if is_cast(node) and not _is_wide_cast(node):
            break
        found, limits = _factor(node, current), _limits(node, current)
        if found is not None and factor is None:
            (factor, inverse), scaled, early = found, current, bool(bounds)
        elif limits is not None:
            bounds |= limits
        elif not (is_view(node) or is_cast(node)):
            return None
        if len(node.users) != 1:
            return None
        current, node = node, next(iter(node.users))
    result = value(node)
    if result is None or not is_float8(result.dtype):
        return None
    problem = None
    if early or (bounds and bounds != {("low", -FP8_MAX), ("high", FP8_MAX)}):
        problem = QuantRefused(
            QuantRefusal.CLAMP, f"values for {node.name} are clamped to other bounds than +-{FP8_MAX}"
        )
    return _Branch(1.0 if factor is None else factor, inverse, (node,), tuple(interior), problem, scaled)


def _factor(node: fx.Node, current: fx.Node) -> tuple[Any, bool] | None:
    """What ``node`` divides ``current`` by or, with True, multiplies ``current`` by; None if it does neither."""
    if is_call(node, aten.mul.Tensor, aten.mul.Scalar):
        other = other_operand(node, current)
        return None if other is None else (other, True)
    if is_call(node, aten.div.Tensor, aten.div.Scalar) and node.args[0] is current and node.args[1] is not current:
        return node.args[1], False
    return None


def _limits(node: fx.Node, current: fx.Node) -> set[tuple[str, float | None]] | None:
    """The bounds to which ``node`` clamps ``current``; None if ``node`` is no clamp. A bound that is no constant is None."""
    if is_call(node, aten.clamp.default, aten.clamp.Tensor):
        bounds = dict(zip(("min", "max"), node.args[1:], strict=False)) | node.kwargs
        sides = {"low": bounds.get("min"), "high": bounds.get("max")}
        return {(side, constant(bound)) for side, bound in sides.items() if bound is not None}
    for side, targets in (("low", _LOWER), ("high", _UPPER)):
        if is_call(node, *targets):
            return {(side, constant(other_operand(node, current)))}
    return None


def _read_operator(node: fx.Node, source: fx.Node) -> _Branch | None:
    making = host_call(node, MadeQuantOperator)
    if making is not None and making.arguments.get(making.operator.rows) is source:
        return _read_making(making, source)
    called = host_call(node, QuantOperator)
    if called is None or called.arguments.get(called.operator.rows) is not source:
        return None
    if not all(is_call(user, operator.getitem) and user.args[1] == 1 for user in node.users):
        return None
    problem = None
    shape = called.arguments.get(called.operator.group_shape)
    if shape is not None and list(shape) != [-1, -1]:
        problem = QuantRefused(QuantRefusal.SCALE_NOT_PER_TENSOR, f"{node.name} has scales for groups of {list(shape)}")
    results = tuple(node.users)
    return _Branch(called.arguments[called.operator.scale], False, results, (node, *results), problem)


def _read_making(called: HostCall[MadeQuantOperator], source: fx.Node) -> _Branch | None:
    """The branch of an operator with three results: its own result, which is None, the float8 values, and the scales."""
    results: dict[object, list[fx.Node]] = {1: [], 2: []}
    for user in called.node.users:
        if not is_call(user, operator.getitem) or user.args[1] not in results:
            return None
        results[user.args[1]].append(user)
    made = made_by_operator(called.operator.made_scales, called.arguments, source, next(iter(results[2]), None))
    interior = (called.node, *results[1], *results[2])
    if isinstance(made, QuantRefused):
        return _Branch(None, False, tuple(results[1]), interior, made)
    return _Branch(None, False, tuple(results[1]), interior, made=made)


def _prove(branches: list[_Branch], place: Place, hidden: fx.Node) -> Quantisation | QuantRefused:
    rows = value(hidden)
    scales: set[Scale | MadeScale] = set()
    for branch in branches:
        if branch.problem is not None:
            return branch.problem
        for output in branch.outputs:
            result = value(output)
            if result is None or result.dtype != FP8:
                dtype = None if result is None else result.dtype
                return QuantRefused(QuantRefusal.DTYPE_NOT_SUPPORTED, f"{output.name} has dtype {dtype}, not {FP8}")
        scale = _scale(branch.factor, branch.inverse, place) if branch.made is None else branch.made.scale
        if isinstance(scale, QuantRefused):
            return scale
        scales.add(scale)
    if len(scales) > 1:
        return QuantRefused(QuantRefusal.SCALES_DIFFER, f"the norm's result is quantised with {len(scales)} scales")
    if place.device.type == "cuda" and place.capability is not None and place.capability < _MIN_CAPABILITY:
        return QuantRefused(QuantRefusal.DEVICE_NOT_SUPPORTED, "GPUs convert to float8 from sm89 on")
    if compat.emulates_precision_casts():
        return QuantRefused(QuantRefusal.PRECISION_CASTS_KEPT, "emulate_precision_casts keeps the roundings before it")
    outputs = tuple(output for branch in branches for output in branch.outputs)
    made = [branch.made for branch in branches if branch.made is not None]
    interior = [node for one in made for node in one.interior]
    interior += [node for branch in branches for node in branch.interior]
    holding = dict.fromkeys(one.scales for one in made if one.scales is not None)
    hidden_size = rows.shape[-1] if rows is not None else 0
    return Quantisation(scales.pop(), outputs, tuple(interior), tuple(holding), hidden_size)


def _scale(factor: Any, inverse: bool, place: Place) -> Scale | QuantRefused:
    """Prove that ``factor`` is one number, known before the norm runs."""
    while isinstance(factor, fx.Node) and (is_view(factor) or is_call(factor, aten.reciprocal.default)):
        inverse ^= not is_view(factor)
        factor = factor.args[0]
    if not isinstance(factor, fx.Node):
        return _number(factor, inverse)
    fake = value(factor)
    if fake is None or not same_size(fake.numel(), 1):
        shape = None if fake is None else list(fake.shape)
        return QuantRefused(QuantRefusal.SCALE_NOT_PER_TENSOR, f"the scale {factor.name} has shape {shape}")
    if fake.dtype != torch.float32:
        return QuantRefused(QuantRefusal.SCALE_DTYPE, f"the scale {factor.name} has dtype {fake.dtype}, not float32")
    if is_call(factor, aten.full.default, aten.scalar_tensor.default):
        return _number(constant(factor), inverse)
    if factor.op not in ("placeholder", "get_attr") or not place.before(factor):
        return QuantRefused(QuantRefusal.SCALE_NOT_STATIC, f"the scale {factor.name} is computed by the graph")
    if fake.device != place.device:
        return QuantRefused(
            QuantRefusal.SCALE_ON_OTHER_DEVICE, f"the scale {factor.name} is on {fake.device}, not {place.device}"
        )
    return Scale(factor, inverse)


def _number(number: Any, inverse: bool) -> Scale | QuantRefused:
    """The scale of a number, if float32 can represent both the number and its inverse; otherwise a refusal."""
    if isinstance(number, int | float) and _NORMAL <= abs(number) <= 1 / _NORMAL:
        return Scale(1 / number if inverse else float(number))
    return QuantRefused(QuantRefusal.SCALE_NOT_STATIC, f"the scale {number} is no ordinary number")
