"""Operators of hosts that the passes know by name: what each of them computes, as data that a host declares.

Passes recognise operators in a graph by these names. So passes import no host for this, and this module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

Argument = int | str
"""An argument, by its place in a call. If the operator writes to arguments: by its name, as graphs then name all arguments."""


@dataclass(frozen=True)
class AllReduceOperator:
    """Sums its first argument over the ranks of a group.

    Attributes:
        name: ``library::operator``, as in all classes here.
        group_name: The name of the argument that holds the group's name.
        reduce_op: The name of the argument that says what is done instead of adding; None: it only adds.
        waited_for: Its result holds the sum only behind ``wait_tensor``; otherwise it is ready when the operator returns.
    """

    writes: ClassVar[bool] = False

    name: str
    group_name: str = "group_name"
    reduce_op: str | None = None
    waited_for: bool = False


@dataclass(frozen=True)
class AllGatherOperator:
    """Concatenates the first arguments of all ranks of a group. The result is ready when the operator returns.

    ``dim``: the name of the argument that holds the dim to concatenate along.
    """

    writes: ClassVar[bool] = False

    name: str
    dim: str = "dim"


@dataclass(frozen=True)
class MadeScaleArguments:
    """How an operator makes the scales of float8 values: ``max(amax / 448, min_scale)``, of each row.

    Attributes:
        group_size: The argument that says how many columns share a scale; None: all do.
        min_amax: The argument that holds the smallest amax, where the operator bounds the amax instead of the scale.
        upper_bound: The argument that is a tensor with the largest scale. The value of a tensor that a call gives is unknown.
        power_of_two: Arguments that, if true, make the operator round scales to powers of two.
        other_layout: Arguments that, if true, make the operator store scales in another layout than by rows.
        least, greatest: Arguments that hold the bounds of float8.
    """

    group_size: str | None = None
    min_amax: str | None = None
    min_scale: float = 0.0
    upper_bound: str | None = None
    power_of_two: tuple[str, ...] = ()
    other_layout: tuple[str, ...] = ()
    least: tuple[str, ...] = ()
    greatest: tuple[str, ...] = ()


@dataclass(frozen=True)
class NormOperator:
    """An RMSNorm over the last dim. It computes in float32 and casts to the weight's dtype before it multiplies by the weight.

    Attributes:
        rows, weight, eps: Arguments; the weight may be None in a call.
        residual: The argument that is added to ``rows`` first, unless a call has None for it. Results are then the normalised
            values and the sum.
        variance_size: The argument that says over how many columns the operator averages (None in a call: over all). None: the
            operator has no such argument.
        scale: The argument that the normalised values are divided by before they are rounded to float8.
        made_scales: How the operator makes scales of the normalised values, to round them to float8. It writes the scales
            behind the values.
        writes: Whether the operator writes its results to arguments. Graphs then have it in ``auto_functionalized``, whose
            results are the operator's own result, None, and then the written results.
    """

    name: str
    rows: Argument
    weight: Argument
    eps: Argument
    residual: Argument | None = None
    variance_size: Argument | None = None
    scale: Argument | None = None
    made_scales: MadeScaleArguments | None = None
    writes: bool = False


@dataclass(frozen=True)
class QuantOperator:
    """Divides ``rows`` by the one number in ``scale`` and rounds to float8. It writes its one result to an argument.

    ``group_shape``: the argument that says how many rows and columns share a scale; None and ``[-1, -1]`` mean all.
    """

    writes: ClassVar[bool] = True

    name: str
    rows: str
    scale: str
    group_shape: str


@dataclass(frozen=True)
class MadeQuantOperator:
    """Divides ``rows`` by scales that it makes of them and rounds to float8. It writes both results to arguments."""

    writes: ClassVar[bool] = True

    name: str
    rows: str
    made_scales: MadeScaleArguments


@dataclass(frozen=True)
class RowWiseOperator:
    """Treats each row of dim 0 independently, so that it may run once for each half of the tokens.

    Attributes:
        reads: Arguments with one row for each token; the operator may also write to them. An argument that is None in a call
            does not count.
        results: Arguments that are new tensors with one row for each token, and that the operator overwrites completely.
        scales: Arguments with one row for each token, or with one number for all of them.
        counts: Arguments that are the number of rows.
        absent: Arguments that must be None: other calls are not known to be row-wise.
        writes: Whether the operator writes to arguments; graphs then have it in ``auto_functionalized``. Otherwise it only
            returns results, each with one row for each token.
    """

    name: str
    reads: tuple[str, ...]
    results: tuple[str, ...] = ()
    scales: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    writes: bool = True


@dataclass(frozen=True)
class OneScaleOperator:
    """Quantises by one scale that it makes of all rows. So it is not row-wise: a half would have another scale."""

    name: str
    writes: bool = True


@dataclass(frozen=True)
class AttentionOperator:
    """Causal attention of concatenated requests, ``[tokens, heads, head_dim]``. It writes its result to an argument.

    Attributes:
        query: The argument that holds the queries.
        half: The operator that computes this attention for one half of the tokens; None: there is no such operator.
        kernel: What device profiles call its kernel.
    """

    writes: ClassVar[bool] = True

    name: str
    query: str
    half: str | None
    kernel: str


Operator = (
    AllReduceOperator
    | AllGatherOperator
    | NormOperator
    | QuantOperator
    | MadeQuantOperator
    | RowWiseOperator
    | OneScaleOperator
    | AttentionOperator
)
Kind = TypeVar(
    "Kind",
    AllReduceOperator,
    AllGatherOperator,
    NormOperator,
    QuantOperator,
    MadeQuantOperator,
    RowWiseOperator,
    OneScaleOperator,
    AttentionOperator,
)

registered_operators: dict[str, Operator] = {}
_attention_halves: set[str] = set()
_rule_modules: list[str] = []


def declare(*operators: Operator) -> None:
    """Make operators known to the passes.

    Raises:
        ValueError: A name is known already, as something else.
    """
    for operator in operators:
        if registered_operators.get(operator.name, operator) != operator:
            known = registered_operators[operator.name]
            raise ValueError(f"operators: expected a name that is not in use, got {operator.name!r}, which is {known}")
    registered_operators.update({operator.name: operator for operator in operators})
    attention = (operator for operator in operators if isinstance(operator, AttentionOperator))
    _attention_halves.update(operator.half for operator in attention if operator.half is not None)


def operator_named(name: str) -> Operator | None:
    """What was declared about the operator ``name``, of any kind; None if it was not declared."""
    return registered_operators.get(name)


def declared_as(kind: type[Kind], name: str) -> Kind | None:
    """What was declared about the operator ``name``; None if it was not declared as this kind."""
    operator = registered_operators.get(name)
    return operator if isinstance(operator, kind) else None


def is_attention_half(name: str) -> bool:
    """Whether ``name`` is that of an operator that does declared attention for one half of the tokens."""
    return name in _attention_halves


def declare_rules(module: str) -> None:
    """Name a module that has further token rules; it is imported when the first rule is asked for, as it may need torch."""
    _rule_modules.append(module)


def take_rule_modules() -> list[str]:
    """The modules that were named since the last call."""
    modules, _rule_modules[:] = _rule_modules[:], []
    return modules
