"""The operator's fields: what follows from the one table of them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from tw_compile.kernels.algorithms.multimem.multimem import MultimemParams
from tw_compile.kernels.algorithms.push.push import PushParams
from tw_compile.kernels.algorithms.stream.stream import StreamParams
from tw_compile.kernels.collective import ops
from tw_compile.kernels.collective.cuda_variant import row_defines, variant_of
from tw_compile.kernels.collective.fields import (
    FIELDS,
    LAST_POINTERS,
    OPERANDS,
    PARAMETERS,
    POINTERS,
    SCHEMA,
    Arguments,
    values_of,
)
from tw_compile.kernels.collective.prefetch import MOST_TOKENS
from tw_compile.kernels.collective.spec import NormSpec, Operands, Request, operands_of, request_of

BF16, FP32 = torch.bfloat16, torch.float32
FIELDS_OF_SCHEMA = (
    "Tensor? residual, Tensor? bias, Tensor? weight, float eps, float weight_offset, ScalarType? cast_before_weight, "
    "ScalarType hidden_dtype, ScalarType residual_dtype, bool residual_sharded, str residual_out, str group_name, "
    "str transport, int slot, float scale=1.0, Tensor? hidden_scale=None, Tensor? eps_tensor=None, int overlap_sms=0, "
    'bool results_in_slot=False, str wire="exact", Tensor? norm_bias=None, '
    "Tensor[]? prefetch=None, int prefetch_bytes=0, int feed_from=0"
)


def arguments(**changed: Any) -> Arguments:
    residual, bias, weight = torch.randn(5, 16), torch.randn(16, dtype=BF16), torch.randn(16)
    given = Arguments(
        residual,
        bias,
        weight,
        1e-5,
        0.5,
        BF16,
        FP32,
        BF16,
        False,
        "sharded",
        "group",
        "gloo",
        3,
        2.0,
        None,
        None,
        8,
        True,
    )
    return given._replace(**changed)


def test_the_schema_is_the_text_that_compiled_graphs_know() -> None:
    assert SCHEMA == FIELDS_OF_SCHEMA
    result = "(Tensor, Tensor)"
    names = ("all_reduce_rms_norm_start", "mm_all_reduce_rms_norm_start")
    given = FIELDS_OF_SCHEMA.replace("1.0", "1.")  # as torch prints it
    assert str(ops.start._schema) == f"tw_compile::{names[0]}(Tensor x, {given}) -> {result}"
    assert str(ops.mm_start._schema) == (
        f"tw_compile::{names[1]}(Tensor a, Tensor b, {given}, *, int reserved_sms=0) -> {result}"
    )


def test_a_request_has_every_field_once() -> None:
    of_request = {field.name for field in fields(Request)} - {"x", "norm", "outputs", "form"}
    of_norm = {field.name for field in fields(NormSpec)}
    assert not of_request & of_norm
    # A request needs no transport, which it is given to, and nothing that stands in for another field.
    assert of_request | of_norm == {field.name for field in FIELDS} - {"transport", "eps_tensor"}
    assert Operands._fields == ("x", *(field.name for field in OPERANDS))


def test_a_request_holds_what_the_arguments_say() -> None:
    given, x = arguments(residual=torch.randn(16, 5).t()), torch.randn(5, 16)
    made = request_of(x, given, "form")
    assert made.x is x and made.form == "form" and made.outputs is None
    for field in FIELDS:
        holder = made.norm if field.role.kind == "norm" else made
        if field.name == "residual":
            assert (
                made.residual is not None
                and made.residual.is_contiguous()
                and torch.equal(made.residual, given.residual)
            )
        elif field.name not in ("transport", "eps_tensor"):
            assert getattr(holder, field.name) is getattr(given, field.name), field.name
    assert operands_of(made) == (x, made.residual, given.bias, given.weight, None, None)


CHANGES: dict[str, Any] = {
    "residual": torch.randn(5, 16, dtype=BF16),
    "bias": None,
    "weight": torch.randn(16, dtype=BF16),
    "eps": 1e-6,
    "weight_offset": 1.0,
    "cast_before_weight": None,
    "hidden_dtype": BF16,
    "residual_dtype": FP32,
    "residual_sharded": True,
    "residual_out": "none",
    "group_name": "another",
    "transport": "nccl",
    "slot": 4,
    "scale": 1.0,
    "hidden_scale": torch.ones(1),
    "overlap_sms": 0,
    "results_in_slot": False,
    "wire": "int8",
    "norm_bias": torch.randn(16, dtype=BF16),
    "feed_from": 512,
    "epilogue": "another",
    "scale_columns": 8,
    "min_scale": 1e-10,
    "divides_by_scale": True,
}
OF_VARIANTS = {
    "residual": "RESIDUAL_TYPE",
    "bias": "BIAS_TYPE",
    "weight": "WEIGHT_TYPE",
    "cast_before_weight": "CAST_TYPE",
    "hidden_dtype": "HIDDEN_TYPE",
    "residual_dtype": "RESIDUAL_OUT_TYPE",
    "residual_sharded": "RESIDUAL_SHARDED",
    "residual_out": "RESIDUAL_OUT",
    "results_in_slot": None,
    "wire": "WIRE",
    "norm_bias": "NORM_BIAS_TYPE",
    "epilogue": "EPILOGUE",
    "scale_columns": "SCALE_COLUMNS",
    "min_scale": "MIN_SCALE",
    "divides_by_scale": "DIVIDES_BY_SCALE",
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_with_a_field(name: str) -> None:
    """Each one makes another form of calls; some make another variant of a kernel, by a definition of theirs."""
    x, given = torch.randn(5, 16), arguments()
    other = given._replace(**{name: CHANGES[name]})
    message = (x.shape, x.dtype)
    forms = [ops.form_of_call(message, (x,), values) for values in (given, other)]
    assert None not in forms and forms[0] != forms[1]
    requests = [request_of(x, values, None) for values in (given, other)]
    variants = [variant_of(request) for request in requests]
    assert (variants[0] != variants[1]) is (name in OF_VARIANTS)
    before, after = (row_defines(request, 2, 0) for request in requests)
    changed = {key for key in before if before[key] != after[key]}
    assert changed == ({OF_VARIANTS[name]} if OF_VARIANTS.get(name) else set())


def test_what_is_prefetched_makes_a_form_and_whether_it_is_a_variant() -> None:
    x, alone = torch.randn(5, 16), arguments(overlap_sms=0)
    weights = [torch.randn(32, 16), torch.randn(32, 16).t()]
    asked = alone._replace(prefetch=weights, prefetch_bytes=100)
    others = [asked, asked._replace(prefetch=weights[:1]), asked._replace(prefetch_bytes=200)]
    forms = {ops.form_of_call("message", (x,), values) for values in (alone, *others)}
    assert len(forms) == 4 and None not in forms
    same = asked._replace(prefetch=[torch.randn(32, 16), torch.randn(32, 16).t()])
    assert ops.form_of_call("message", (x,), same) in forms
    made = request_of(x, asked, None)
    assert made.prefetch is weights and made.prefetch_bytes == 100
    assert variant_of(made) != variant_of(request_of(x, alone, None))
    assert row_defines(made, 2, 0) == row_defines(request_of(x, alone, None), 2, 0)


@pytest.mark.parametrize(
    ("tokens", "changed"),
    [
        (MOST_TOKENS + 1, {}),
        (5, {"overlap_sms": 8}),
        (5, {"prefetch_bytes": 0}),
        (5, {"prefetch": []}),
        (5, {"prefetch": None}),
    ],
)
def test_long_calls_those_beside_other_work_and_those_without_a_budget_prefetch_nothing(
    tokens: int, changed: dict[str, Any]
) -> None:
    asked = arguments(overlap_sms=0, prefetch=[torch.randn(32, 16)], prefetch_bytes=100)
    residual = torch.randn(tokens, 16)
    served = request_of(torch.randn(MOST_TOKENS, 16), asked._replace(residual=residual), None)
    assert served.prefetch and served.prefetch_bytes == 100
    left = request_of(torch.randn(tokens, 16), asked._replace(residual=residual, **changed), None)
    assert left.prefetch is None and left.prefetch_bytes == 0


def test_every_field_is_tried_above() -> None:
    assert {*CHANGES, "eps_tensor", "prefetch", "prefetch_bytes"} == {field.name for field in FIELDS}
    assert ops.form_of_call((), (), arguments(eps_tensor=torch.tensor(1.0))) is None


def test_equal_calls_have_one_form_whatever_their_tensors_hold() -> None:
    x, given = torch.randn(5, 16), arguments()
    copies = given._replace(residual=torch.randn(5, 16), weight=torch.randn(16))
    assert ops.form_of_call("message", (x,), given) == ops.form_of_call("message", (x,), copies) is not None
    for name, tensor in (("residual", torch.randn(16, 5).t()), ("weight", torch.randn(17)[1:])):
        assert ops.form_of_call("message", (x,), given._replace(**{name: tensor})) is None
    assert ops.form_of_call("message", (x.t(),), given) is None


def test_no_weight_means_no_rounding_before_it() -> None:
    request = request_of(torch.randn(5, 16), arguments(weight=None), None)
    assert row_defines(request, 2, 0)["CAST_TYPE"] == "none"
    assert row_defines(replace(request, weight=torch.randn(16)), 2, 0)["CAST_TYPE"] == "bf16"


@pytest.mark.parametrize("params", [PushParams, StreamParams, MultimemParams])
def test_parameters_begin_with_addresses_and_end_with_numbers_and_what_few_calls_have(params: Any) -> None:
    names = [name for name, *_ in params._fields_ if name != "prefetch"]
    assert tuple(names[: len(POINTERS)]) == POINTERS == (
        "x", "residual", "bias", "weight", "hidden_scale", "hidden", "residual_out"
    )  # fmt: skip
    assert names.pop() == "norm_bias" and LAST_POINTERS == ("norm_bias",) == tuple(
        field.name for field in OPERANDS[-1:]
    )
    assert tuple(names[-len(PARAMETERS) :]) == PARAMETERS == ("eps", "weight_offset", "scale")
    assert [getattr(params, name).offset for name in POINTERS] == [8 * index for index in range(len(POINTERS))]


def test_values_are_a_tuple_even_of_one_field() -> None:
    assert values_of(("slot",))(arguments()) == (3,)
    assert values_of(("slot", "eps"))(arguments()) == (3, 1e-5)
