"""The operators that say "all_reduce", PyTorch's and hosts', and what a functionalised call of a host's operator calls.

Known by name, so that a host need not be imported for its graphs to be read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from tw_compile import compat
from tw_compile.graph.layer import layer_of
from tw_compile.graph.predicates import operator_name, value

FUNCTIONAL = "_c10d_functional::all_reduce"
VLLM = "vllm::all_reduce"
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


def _functional(node: fx.Node) -> AllReduce:
    """``all_reduce(input, reduce_op, group_name)`` and ``wait_tensor``."""
    wait = next((user for user in node.users if operator_name(user) == _WAIT), None)
    return AllReduce(node, wait, node.args[0], node.args[2], node.args[1])  # type: ignore[arg-type]


def _vllm(node: fx.Node) -> AllReduce:
    """``all_reduce(tensor, group_name)``: out of place, ready when it returns; the group is a name of vLLM's, as ``tp:0``."""
    group_name = node.args[1] if len(node.args) > 1 else node.kwargs.get("group_name")
    return AllReduce(node, node, node.args[0], group_name)  # type: ignore[arg-type]


_FORMS: dict[str, Callable[[fx.Node], AllReduce]] = {FUNCTIONAL: _functional, VLLM: _vllm}


def read_all_reduce(node: fx.Node) -> AllReduce | None:
    """What ``node`` reduces; None if it is no all_reduce."""
    form = _FORMS.get(operator_name(node))
    return None if form is None else form(node)


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
