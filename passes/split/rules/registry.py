"""The registry of token rules: what an operator does with the token axis of its operands."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx

from tw_compile import compat
from tw_compile.graph.predicates import operator_name, same_size
from tw_compile.passes.fusion.forms import functionalised
from tw_compile.passes.operators import (
    AttentionOperator,
    declared_as,
    is_attention_half,
    operator_named,
    take_rule_modules,
)
from tw_compile.passes.reasons import JoinReason
from tw_compile.passes.split.analysis.layout import Join, Layout, Local, Rows, RowWise, Size, Slice, Verdict
from tw_compile.sources import source_of

if TYPE_CHECKING:
    from tw_compile.passes.split.analysis.token_axis import TokenAxis

Rule = Callable[["OperatorCall"], Verdict]


@dataclass(frozen=True)
class Registered:
    """A rule. With ``enters`` it is also asked where no operand is split but one depends on the tokens.

    So the two halves may begin at this operator.
    """

    rule: Rule
    enters: bool


rules: dict[Any, Registered] = {}


def token_rule(*targets: Any, enters: bool = False) -> Callable[[Rule], Rule]:
    """Declare what operators do with the token axis.

    The rule gets an :class:`OperatorCall` and returns :class:`RowWise` or :class:`Join`. It must look at the layout of every
    operand that has one (``layout``, ``rows``): an operand that it has not looked at makes the call a join. Example, for an
    operator that treats the rows of its first argument, ``[tokens, hidden]``, independently (for attention see
    :func:`declare_attention`)::

        @token_rule(torch.ops.mylib.fused_experts.default)
        def _fused_experts(call: OperatorCall) -> RowWise | Join:
            return call.row_wise_over(0, dim=0)

    If an operator writes to arguments, the graph calls it through an ``auto_functionalized`` node, and its rule gets that node.

    Of two rules for one target the later one is used. Tests take rules out again with :func:`restored_rules`.

    Args:
        targets: Operator overloads, or names as ``"library::operator"``. A name covers all overloads, and its library need
            not be there; the library of higher-order operators is ``higher_order``. A class of
            :mod:`tw_compile.passes.operators` stands for all operators that hosts declare as that.
        enters: See :class:`Registered`.

    Raises:
        ValueError: A target is something that no graph calls, or a name without a library.
    """
    _check(targets)

    def register(rule: Rule) -> Rule:
        for target in targets:
            rules[target] = Registered(rule, enters)
        return rule

    return register


@contextmanager
def restored_rules() -> Iterator[None]:
    """For tests: take out again what ``token_rule`` and ``declare_attention`` declare in the ``with`` block."""
    kept_rules, kept_attention = dict(rules), set(attention_operators)
    try:
        yield
    finally:
        rules.clear()
        rules.update(kept_rules)
        attention_operators.clear()
        attention_operators.update(kept_attention)


def _check(targets: tuple[Any, ...]) -> None:
    """ValueError for a target that would never be found: graphs call overloads, and names have a library."""
    for target in targets:
        nameless = isinstance(target, str) and "::" not in target
        if nameless or isinstance(target, compat.OpOverloadPacket | torch.library.CustomOpDef):
            expected = 'an overload as torch.ops.mylib.op.default, or a name as "mylib::op"'
            raise ValueError(f"targets: expected {expected}, got {target!r}")


attention_operators: set[Any] = set()


def declare_attention(*targets: Any) -> None:
    """Say that operators are attention. The windows of a layer get their names by this.

    ``targets`` and errors are those of :func:`token_rule`.
    """
    _check(targets)
    attention_operators.update(targets)


def identity() -> str:
    """What identifies users' rules and attention operators; the project's sources cover its own rules."""
    sources = {str(target): (source_of(each.rule), each.enters) for target, each in rules.items()}
    users = sorted((target, *about) for target, about in sources.items() if about[0])
    return repr((users, sorted(map(str, attention_operators))))


def is_attention(node: fx.Node) -> bool:
    """Whether a node calls an operator that is declared to be attention, also through ``auto_functionalized``."""
    form = functionalised(node)
    name = operator_name(node) if form is None else form.name
    if declared_as(AttentionOperator, name) is not None or is_attention_half(name):
        return True
    if form is not None:
        return form.name in attention_operators
    if node.op != "call_function":
        return False
    if compat.is_higher_order(node.target):
        return f"higher_order::{node.target.name()}" in attention_operators  # type: ignore[union-attr]
    return node.target in attention_operators or name in attention_operators


def registered(target: Any) -> Registered | None:
    """The rule of an operator; None when it has none."""
    if target in rules:
        return rules[target]
    if compat.is_higher_order(target):
        return rules.get(f"higher_order::{target.name()}")
    if not isinstance(target, compat.OpOverload):
        return None
    named = registered_name(target.name().partition(".")[0], writes=False)
    return rules.get(_POINTWISE) if named is None and _is_pointwise(target) else named


def registered_name(name: str, writes: bool) -> Registered | None:
    """The rule of the operator ``library::operator``: its own, else that of the class as which a host has declared it.

    ``writes`` says whether this call goes through ``auto_functionalized``. None if the host has declared the opposite.
    """
    for module in take_rule_modules():
        importlib.import_module(module)
    operator = operator_named(name)
    if operator is None:
        return rules.get(name)
    return None if operator.writes != writes else rules.get(name) or rules.get(type(operator))


_POINTWISE = "pointwise"
"""The name of the rule for all operators that torch tags as pointwise."""


def _is_pointwise(target: compat.OpOverload) -> bool:
    return (
        torch.Tag.pointwise in target.tags
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not target._schema.is_mutable
    )


@dataclass
class OperatorCall:
    """One node as its rule sees it."""

    node: fx.Node
    axis: TokenAxis
    _layouts: Mapping[fx.Node, Any]
    _token_dependent: set[fx.Node]
    verdict_of: Callable[[fx.Node], RowWise | None]
    """The verdict on an earlier node; None if the node is not split."""
    join_attention: bool = False
    """Whether attention that would be cut into prefix and suffix is to join."""
    considered: set[fx.Node] = field(default_factory=set)

    @property
    def units(self) -> Size:
        return self.axis.size

    @property
    def args(self) -> tuple[Any, ...]:
        return self.node.args

    def argument(self, name: str) -> Any:
        """An argument by its name in the operator's schema, with the schema's default."""
        for index, declared in enumerate(self.node.target._schema.arguments):  # type: ignore[union-attr]
            if declared.name == name:
                if not declared.kwarg_only and index < len(self.node.args):
                    return self.node.args[index]
                return self.node.kwargs.get(name, declared.default_value)
        raise ValueError(f"name: {self.node.target} has no argument {name!r}")

    def with_arguments(self, **changes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The node's arguments with some replaced, by name."""
        args, kwargs = list(self.node.args), dict(self.node.kwargs)
        for index, declared in enumerate(self.node.target._schema.arguments):  # type: ignore[union-attr]
            if declared.name in changes:
                if not declared.kwarg_only and index < len(args):
                    args[index] = changes[declared.name]
                else:
                    kwargs[declared.name] = changes[declared.name]
        return tuple(args), kwargs

    def layout(self, operand: Any) -> Layout:
        """Where an operand has its tokens; None if it is whole or a constant. The rule has then looked at it."""
        if not isinstance(operand, fx.Node):
            return None
        self.considered.add(operand)
        found = self._layouts.get(operand)
        return found if isinstance(found, Rows | Local) else None

    def rows(self, operand: Any) -> Rows | None:
        """The layout of an operand that is split in slices; None if it is whole. For a :class:`Local`, call ``layout``."""
        found = self.layout(operand)
        if isinstance(found, Local):
            self.considered.discard(operand)
            return None
        return found

    def shape(self, operand: Any) -> tuple[Size, ...]:
        return tuple(operand.meta["val"].shape)

    def entered(self, operand: Any) -> Rows | None:
        """The rows of an operand; for a whole one that depends on tokens, the rows that its shape suggests.

        Slicing a whole value is right along any dim. So the shape needs no proof, it only has to be useful.
        """
        if self.layout(operand) is not None or operand not in self._token_dependent:
            return self.rows(operand)
        return (
            self.axis.rows_of_shape(self.shape(operand)) if isinstance(operand.meta.get("val"), torch.Tensor) else None
        )

    def slice_of(self, operand: Any, rows: Rows) -> dict[fx.Node, Slice]:
        """What ``RowWise.slices`` needs for an operand that is read as ``rows``: nothing if it is split already."""
        return {} if self.layout(operand) is not None else {operand: Slice(rows)}

    def fits(self, operand: Any, rows: Rows) -> bool:
        """Whether a whole operand has the sizes of ``rows``, so that it can be sliced like them."""
        if rows.order is not None:
            return False
        shape = self.shape(operand)
        if rows.outer is None:
            return rows.dim < len(shape) and same_size(shape[rows.dim], rows.per_unit * self.units)
        return max(rows.dim, rows.outer) < len(shape) and same_size(shape[rows.outer] * shape[rows.dim], self.units)

    def row_wise_over(self, index: int, dim: int, out: int = 0) -> Verdict:
        """Row-wise over ``dim`` of argument ``index`` alone; the result has the tokens in its dim ``out``."""
        operand = self.node.args[index]
        rows = self.rows(operand)
        if rows is None or rows.dim != dim or rows.outer is not None:
            return self.join(JoinReason.OPERANDS_DISAGREE, f"expected tokens in dim {dim} of argument {index}")
        return RowWise(replace(rows, dim=out))

    def join(self, reason: JoinReason, detail: str = "") -> Join:
        what = f"{self.node.name} ({self.node.target})"
        return Join(reason, f"{what}: {detail}" if detail else what)


def pointwise_rule(rule: Rule) -> Rule:
    """Declare the rule of all operators that torch tags as pointwise and that have no rule of their own."""
    rules[_POINTWISE] = Registered(rule, False)
    return rule
