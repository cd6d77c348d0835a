"""Small questions about nodes of a post-grad FX graph. None of them changes anything."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, TypeGuard

import torch
import torch.fx as fx

from tw_compile import compat

aten = torch.ops.aten

VIEWS = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.alias.default,
        aten.clone.default,
    }
)
CASTS = frozenset({torch.ops.prims.convert_element_type.default, aten._to_copy.default})
_CAST_ONLY_KWARGS = {"dtype"}


def is_call(node: object, *targets: Any) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def operator_name(node: fx.Node) -> str:
    """``namespace::name`` of the operator that a node calls, without the overload; empty if it calls none."""
    if node.op != "call_function" or not isinstance(node.target, compat.OpOverload):
        return ""
    return node.target._schema.name


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether computing the node twice gives two different values. ``fx.Node.is_impure`` is False for these operators.

    An operator that is called through a higher-order operator counts too, as in ``auto_functionalized(bernoulli_, ...)``. So
    does a node in a subgraph of a higher-order operator.
    """
    operators = [called for called in (node.target, *node.args) if isinstance(called, compat.OpOverload)]
    if any(torch.Tag.nondeterministic_seeded in called.tags for called in operators):
        return True
    return any(draws_random_numbers(inner) for graph in _subgraphs(node) for inner in graph.nodes)


def _subgraphs(node: fx.Node) -> Iterator[fx.Graph]:
    """The graphs that a higher-order operator may run."""
    owner = node.graph.owning_module
    if owner is None or not compat.is_higher_order(node.target):
        return
    for source in node.all_input_nodes:
        module = getattr(owner, str(source.target), None) if source.op == "get_attr" else None
        if isinstance(module, fx.GraphModule):
            yield module.graph


def value(node: fx.Node) -> torch.Tensor | None:
    """The fake tensor of a node, or None when it is not a tensor or has no metadata."""
    val = node.meta.get("val")
    return val if isinstance(val, torch.Tensor) else None


def is_view(node: object) -> TypeGuard[fx.Node]:
    """A node that gives the same elements in the same order: reshape, unsqueeze, clone."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in VIEWS


def is_cast(node: object) -> TypeGuard[fx.Node]:
    """A node that changes the dtype between floating point types and nothing else."""
    if not (isinstance(node, fx.Node) and node.op == "call_function" and node.target in CASTS):
        return False
    if node.target is aten._to_copy.default and not set(node.kwargs) <= _CAST_ONLY_KWARGS:
        return False
    source, result = value(node.args[0]), value(node)  # type: ignore[arg-type]
    return source is not None and result is not None and source.is_floating_point() and result.is_floating_point()


def is_float8(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1


def is_lossless_cast(node: fx.Node) -> bool:
    """Whether a cast's result holds every value of its input exactly, e.g. bf16 to fp32. Always False for float8."""
    source, result = value(node.args[0]), value(node)  # type: ignore[arg-type]
    assert source is not None and result is not None
    return _holds_all_values(result.dtype, source.dtype)


@cache  # torch makes tensors to find the promoted type, which would run any active mode
def _holds_all_values(result: torch.dtype, source: torch.dtype) -> bool:
    if is_float8(source) or is_float8(result):
        return False
    return torch.promote_types(source, result) == result


def constant(operand: object) -> float | None:
    """The value of a Python number or of a constant one-element tensor node."""
    if isinstance(operand, int | float) and not isinstance(operand, bool):
        return float(operand)
    if is_call(operand, aten.full.default, aten.scalar_tensor.default):
        number = operand.args[1] if operand.target is aten.full.default else operand.args[0]
        shape = value(operand)
        exact = shape is not None and shape.numel() == 1 and (shape.is_floating_point() or isinstance(number, int))
        if isinstance(number, int | float) and exact:
            return float(number)
    if is_cast(operand):
        return constant(operand.args[0])
    return None


def adds_once(add: fx.Node) -> bool:
    """Whether an ``add`` leaves its second operand unscaled: ``alpha`` is 1 or not given."""
    return (*add.args[2:], *add.kwargs.values()) in ((), (1,))


def peel_views(node: fx.Node) -> fx.Node:
    """The node that ``node`` is a view of, through any number of views."""
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def views_and_casts_of(node: fx.Node) -> Iterator[fx.Node]:
    """``node`` and every node reached from it through views and lossless casts: the same values under other names."""
    pending = [node]
    seen = {node}
    while pending:
        current = pending.pop()
        yield current
        for user in current.users:
            if user not in seen and (is_view(user) or (is_cast(user) and is_lossless_cast(user))):
                seen.add(user)
                pending.append(user)


def other_operand(node: fx.Node, operand: fx.Node) -> Any:
    """The second argument of a two-argument node, whichever side ``operand`` is on; None for ``f(x, x)``."""
    if len(node.args) < 2:
        return None
    left, right = node.args[:2]
    if left is operand:
        return None if right is operand else right
    return left


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes (int or SymInt) are known to be equal, without adding a guard."""
    return bool(compat.statically_known_true(a == b))


def same_shape(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dim() == b.dim() and all(same_size(x, y) for x, y in zip(a.shape, b.shape, strict=True))


def has_default_strides(tensor: torch.Tensor) -> bool:
    """Whether a tensor is known to be laid out by its dims, the last one fastest, without adding a guard."""
    expected: int | torch.SymInt = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if not same_size(size, 1) and not same_size(stride, expected):
            return False
        expected = expected * size
    return True


def makes_view(node: fx.Node) -> bool:
    """Whether, by the operator's schema, one of its results shares memory with an operand."""
    if not isinstance(node.target, compat.OpOverload) or node.target._schema.is_mutable:
        return False
    return any(one.alias_info is not None for one in node.target._schema.returns)
