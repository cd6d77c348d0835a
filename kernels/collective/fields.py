"""The operator's fields, each said once: the arguments of both ways to start a call, with what each of them is.

From :class:`Arguments` follow the operators' schema, what makes a call's form, the tensors that kernels read (``OPERANDS``),
how a :class:`~tw_compile.kernels.collective.spec.Request` is built, the variant of a CUDA kernel that serves it with its
definitions, and the parameters that all CUDA kernels of the operator have. A new field is one line there, a field of
``Request`` or ``NormSpec`` of the same name, and the kernels that read it.

All of it is worked out when this module is imported: calls look nothing up.
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
"""The epilogue of the operators that have none in their name's place, see ``kernels/epilogues``."""
LAYER_NORM = "layer_norm"

ResidualOut = Literal["none", "sharded", "replicated"]
Kind = Literal["operand", "norm", "layout", "routing", "stand_in", "hint"]


@dataclass(frozen=True)
class Role:
    """What a field is to the operator.

    Attributes:
        kind: ``operand``: a tensor that kernels read. ``norm``: of :class:`NormSpec`. ``layout``: which rows are given and
            wanted, where, and how they travel. ``routing``: who serves the call, and on what. ``stand_in``: takes another
            field's place before anybody sees it. ``hint``: tensors on which no result depends.
        define: The definition under which sources of CUDA kernels get it; of an operand, its element type.
        variant: Whether other values need another variant of a CUDA kernel; all that has a definition does.
        rows: For an operand: kernels read it in whole vectors, so it is contiguous, aligned and of a dtype that they add.
        own_rows_if: For an operand: where this field is true, each rank has other rows of it.
        last: For an operand: its address follows the numbers in a launch's parameters, and operands behind it have this, too.
            So machine code of kernels that do not read it is what it was before there was this operand.
        parameter: A number that is passed to each launch as float32.
        in_schema: Whether callers of the operator give it; if not, it is the operator's own.
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
    """What both ways to start a call have behind what they reduce, in the order of their schemas."""

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
    """One of the arguments. ``type``: of its values, but for None, which an ``optional`` one may be."""

    name: str
    type: Any
    optional: bool
    role: Role

    @property
    def has_default(self) -> bool:
        return self.name in Arguments._field_defaults

    def schema(self) -> str:
        """The field as torch's schemas write it. What says how scales are made has to be said."""
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
"""Of the arguments of all operators, behind what they reduce."""
SCALES_SCHEMA = ", ".join(field.schema() for field in FIELDS if field.role.of_scales)
"""Of the keywords that those take besides which make scales of the rows, and return them."""

MESSAGE = "x"
"""The tensor that is reduced; it is first wherever operands are named."""

OPERANDS = of_kind("operand")
ROWS = names(field for field in OPERANDS if field.role.rows)
"""Operands that are read in whole vectors."""
SINGLES = names(field for field in OPERANDS if not field.role.rows)
"""Operands that are read by the element."""
FORM_VALUES = names(field for field in FIELDS if field.role.kind not in ("operand", "stand_in", "hint"))
"""What calls of one form have in common, beside the shapes and dtypes of their tensors."""
VARIANT = tuple(field for field in FIELDS if field.role.variant or field.role.define is not None)
"""What calls have in common that one variant of a CUDA kernel serves, beside the message's hidden size and dtype."""
PARAMETERS = names(field for field in FIELDS if field.role.parameter)
"""Numbers that each launch of a CUDA kernel is given."""
LAST_POINTERS = names(field for field in OPERANDS if field.role.last)
"""Operands whose addresses are the last parameters of a launch of a CUDA kernel; :data:`OPERANDS` ends with them."""
HINTS = names(of_kind("hint"))
"""Lists of tensors on which no result depends."""
POINTERS = (MESSAGE, *names(field for field in OPERANDS if not field.role.last), "hidden", "residual_out")
"""All other tensors whose addresses it is given: first of all its parameters, in this order."""
