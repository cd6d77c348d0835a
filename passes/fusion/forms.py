"""Calls of operators that hosts have declared (:mod:`tw_compile.passes.operators`), as the passes read them off a graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic

import torch
import torch.fx as fx

from tw_compile import compat
from tw_compile.graph.layer import layer_of
from tw_compile.graph.predicates import operator_name, value
from tw_compile.passes.operators import AllReduceOperator, Argument, Kind, declared_as

_WAIT = "_c10d_functional::wait_tensor"


@dataclass(frozen=True)
class AllReduce:
    """An all_reduce and its wait; ``partial`` is this rank's summand.

    ``wait`` is the node that holds the sum: ``node`` itself where the operator returns a tensor that is ready, None if
    the sum is not waited for.
    """

    node: fx.Node
    wait: fx.Node | None
    partial: fx.Node
    group_name: str
    reduce_op: object = "sum"

    @property
    def layer(self) -> int | None:
        return layer_of(self.node)

    def bytes(self) -> int | None:
        """Size of the message, None when a dimension is symbolic."""
        tensor = value(self.partial)
        if tensor is None or not all(isinstance(size, int) for size in tensor.shape):
            return None
        return tensor.numel() * tensor.dtype.itemsize


def read_all_reduce(node: fx.Node) -> AllReduce | None:
    """What ``node`` reduces; None if it is no all_reduce."""
    operator = declared_as(AllReduceOperator, operator_name(node))
    if operator is None:
        return None
    wait: fx.Node | None = node
    if operator.waited_for:
        wait = next((user for user in node.users if operator_name(user) == _WAIT), None)
    reduce_op = "sum" if operator.reduce_op is None else _given(node, operator.reduce_op)
    return AllReduce(node, wait, node.args[0], _given(node, operator.group_name), reduce_op)  # type: ignore[arg-type]


def _given(node: fx.Node, name: str) -> Any:
    """The value that a call passes for the argument ``name`` of the operator's schema; None if it passes none."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return dict(zip(names, node.args, strict=False)).get(name, node.kwargs.get(name))


def all_reduce_of(wait: fx.Node) -> AllReduce | None:
    """The all_reduce whose sum the node ``wait`` holds."""
    node = wait.args[0] if operator_name(wait) == _WAIT else wait
    return read_all_reduce(node) if isinstance(node, fx.Node) else None


@dataclass(frozen=True)
class Functionalised:
    """An operator that writes to arguments, as a call that returns them: its own results, then what it has written."""

    name: str
    arguments: Mapping[str, Any]


def functionalised(node: fx.Node) -> Functionalised | None:
    """The operator behind an ``auto_functionalized`` node, with its arguments by name; None for any other node."""
    if node.op != "call_function" or node.target is not torch.ops.higher_order.auto_functionalized:
        return None
    called = node.args[0]
    return Functionalised(called._schema.name, node.kwargs) if isinstance(called, compat.OpOverload) else None


@dataclass(frozen=True)
class HostCall(Generic[Kind]):
    """A call of an operator that a host has declared. Arguments are by place, or by name if the operator writes to some."""

    operator: Kind
    node: fx.Node
    arguments: Mapping[Argument, Any]


def host_call(node: fx.Node, kind: type[Kind]) -> HostCall[Kind] | None:
    """``node`` as a call of a declared operator of this kind; None if it is no such call."""
    form = functionalised(node)
    operator = declared_as(kind, operator_name(node) if form is None else form.name)
    if operator is None or operator.writes != (form is not None):
        return None
    arguments: dict[Argument, Any] = {}
    arguments.update(enumerate(node.args) if form is None else form.arguments)
    return HostCall(operator, node, arguments)
