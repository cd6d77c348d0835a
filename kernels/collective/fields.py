"""The operator's fields, each defined once: the arguments of ``start`` and ``mm_start``, and the role of each.

:class:`Arguments` determines the operators' schema, a call's form, the tensors that kernels read (``OPERANDS``), how a
:class:`~tw_compile.kernels.collective.spec.Request` is built, which variant of a CUDA kernel serves the request with which
definitions, and the parameters that all CUDA kernels of the operator have. A new field needs one line there, a field of
``Request`` or ``NormSpec`` with the same name, and the kernels that read it.

All of this is computed when this module is imported, so calls look nothing up.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import torch

from tw_compile.kernels.collective.wires import EXACT

RMS_NORM = "rms_norm"
"""The default epilogue, see ``kernels/epilogues``."""
LAYER_NORM = "layer_norm"

ResidualOut = Literal["none", "sharded", "replicated"]
Kind = Literal["operand", "norm", "layout", "routing", "stand_in", "hint"]


@dataclass(frozen=True)
class Role:
    """What a field is to the operator.

    Attributes:
        kind: ``operand``: a tensor that kernels read. ``norm``: a field of :class:`NormSpec`. ``layout``: which rows are given
            and wanted, where, and how they travel. ``routing``: who serves the call, and on what. ``stand_in``: replaces
            another field before any other code sees that field. ``hint``: tensors on which no result depends.
        define: The preprocessor definition by which sources of CUDA kernels get the value, or an operand's element type.
        variant: Whether other values need another variant of a CUDA kernel. This holds for every field with a definition.
        rows: For an operand: kernels read it in whole vectors. So it is contiguous, aligned, and has a dtype that they can add.
        own_rows_if: For an operand: the name of a field. If that field is true, each rank has different rows of the operand.
        last: For an operand: in a launch's parameters its address comes after the numbers. All operands behind it have
            ``last``, too. So kernels that do not read the operand keep the machine code that they had without it.
        parameter: Whether it is a number that each launch gets as float32.
        in_schema: Whether callers pass it; if not, the operator sets it.
        of_scales: Whether only operators that return scales take it.
    """

    kind: Kind
    define: str | None = None
    variant: bool = False
    rows: bool = False
    own_rows_if: str | None = None
    last: bool = False
    parameter: bool = False
    in_schema: bool = True
    of_scales: bool = False


class Arguments(NamedTuple):
    """The arguments that both ways to start a call share, in the order of their schemas. The message's tensors come before."""

    residual: Annotated[
        torch.Tensor | None, Role("operand", "RESIDUAL_TYPE", rows=True, own_rows_if="residual_sharded")
    ]
    bias: Annotated[torch.Tensor | None, Role("operand", "BIAS_TYPE", rows=True)]
    weight: Annotated[torch.Tensor | None, Role("operand", "WEIGHT_TYPE", rows=True)]
    eps: Annotated[float, Role("norm", parameter=True)]
    weight_offset: Annotated[float, Role("norm", parameter=True)]
    cast_before_weight: Annotated[torch.dtype | None, Role("norm", "CAST_TYPE")]
    hidden_dtype: Annotated[torch.dtype, Role("norm", "HIDDEN_TYPE")]
    residual_dtype: Annotated[torch.dtype, Role("norm", "RESIDUAL_OUT_TYPE")]
    residual_sharded: Annotated[bool, Role("layout", "RESIDUAL_SHARDED")]
    residual_out: Annotated[ResidualOut, Role("layout", "RESIDUAL_OUT")]
    group_name: Annotated[str, Role("routing")]
    transport: Annotated[str, Role("routing")]
    slot: Annotated[int, Role("routing")]
    scale: Annotated[float, Role("norm", parameter=True)] = 1.0
    hidden_scale: Annotated[torch.Tensor | None, Role("operand")] = None
    eps_tensor: Annotated[torch.Tensor | None, Role("stand_in")] = None
    overlap_sms: Annotated[int, Role("routing")] = 0
    results_in_slot: Annotated[bool, Role("layout", variant=True)] = False
    wire: Annotated[str, Role("layout", "WIRE")] = EXACT
    norm_bias: Annotated[torch.Tensor | None, Role("operand", "NORM_BIAS_TYPE", rows=True, last=True)] = None
    prefetch: Annotated[list[torch.Tensor] | None, Role("hint")] = None
    prefetch_bytes: Annotated[int, Role("layout", variant=True)] = 0
    feed_from: Annotated[int, Role("routing")] = 0
    epilogue: Annotated[str, Role("norm", "EPILOGUE", in_schema=False)] = RMS_NORM
    scale_columns: Annotated[int, Role("norm", "SCALE_COLUMNS", of_scales=True)] = 0
    min_scale: Annotated[float, Role("norm", "MIN_SCALE", of_scales=True)] = 0.0
    divides_by_scale: Annotated[bool, Role("norm", "DIVIDES_BY_SCALE", of_scales=True)] = False


@dataclass(frozen=True)
class Field:
    """One of the arguments. ``type``: the type of its values other than None. ``optional``: whether it may be None."""

    name: str
    type: Any
    optional: bool
    role: Role

    @property
    def has_default(self) -> bool:
        return self.name in Arguments._field_defaults

    def schema(self) -> str:
        """The field in the syntax of torch's schemas. Fields that say how scales are computed have no default there."""
        text = f"{_SCHEMA_TYPES[self.type]}{'?' if self.optional else ''} {self.name}"
        if not self.has_default or self.role.of_scales:
            return text
        default = Arguments._field_defaults[self.name]
        return f"{text}={json.dumps(default) if self.type is str else default}"


_SCHEMA_TYPES = {
    torch.Tensor: "Tensor",
    list[torch.Tensor]: "Tensor[]",
    torch.dtype: "ScalarType",
    float: "float",
    bool: "bool",
    str: "str",
    int: "int",
    ResidualOut: "str",
}


def _fields() -> Iterable[Field]:
    for name, hint in get_type_hints(Arguments, include_extras=True).items():
        kind, role = get_args(hint)
        members = () if get_origin(kind) is Literal else get_args(kind)
        (of_values,) = [member for member in members if member is not NoneType] or [kind]
        yield Field(name, of_values, NoneType in members, role)


FIELDS = tuple(_fields())


def names(fields: Iterable[Field]) -> tuple[str, ...]:
    return tuple(field.name for field in fields)


def of_kind(kind: Kind) -> tuple[Field, ...]:
    return tuple(field for field in FIELDS if field.role.kind == kind)


def values_of(wanted: Sequence[str]) -> Callable[[Arguments], tuple[Any, ...]]:
    """A function that takes these fields out of arguments, as a tuple."""
    places = [Arguments._fields.index(name) for name in wanted]
    if len(places) == 1:
        (place,) = places
        return lambda arguments: (arguments[place],)
    return itemgetter(*places)


SCHEMA = ", ".join(field.schema() for field in FIELDS if field.role.in_schema and not field.role.of_scales)
"""Schema of the arguments that all operators take behind the message's tensors."""
SCALES_SCHEMA = ", ".join(field.schema() for field in FIELDS if field.role.of_scales)
"""Schema of the additional keywords of the operators that compute scales from the rows and return them."""

MESSAGE = "x"
"""The tensor that is reduced. It comes first in every list of operands."""

OPERANDS = of_kind("operand")
ROWS = names(field for field in OPERANDS if field.role.rows)
"""Operands that are read in whole vectors."""
SINGLES = names(field for field in OPERANDS if not field.role.rows)
"""Operands that are read by the element."""
FORM_VALUES = names(field for field in FIELDS if field.role.kind not in ("operand", "stand_in", "hint"))
"""Fields that are equal for all calls of one form. Shapes and dtypes of their tensors are equal, too."""
VARIANT = tuple(field for field in FIELDS if field.role.variant or field.role.define is not None)
"""Fields that are equal (operands: in dtype) for all calls that one variant of a CUDA kernel serves.

The message's hidden size and dtype are equal, too.
"""
PARAMETERS = names(field for field in FIELDS if field.role.parameter)
"""Numbers that each launch of a CUDA kernel is given."""
LAST_POINTERS = names(field for field in OPERANDS if field.role.last)
"""Operands whose addresses are the last parameters of a launch of a CUDA kernel; :data:`OPERANDS` ends with them."""
HINTS = names(of_kind("hint"))
"""Lists of tensors on which no result depends."""
POINTERS = (MESSAGE, *names(field for field in OPERANDS if not field.role.last), "hidden", "residual_out")
"""All other tensors whose addresses a launch gets. Its parameters begin with these addresses, in this order."""
