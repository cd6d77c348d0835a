"""Operands that differ between ranks are found by the debug mode, on all ranks, and only by it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tw_compile.kernels.collective import check_operands, ops
from tw_compile.testing import GlooRanks

TOKENS, HIDDEN, RANKS = 5, 16, 3


@pytest.fixture(scope="module")
def ranks() -> Iterator[GlooRanks]:
    with GlooRanks(RANKS, timeout=120) as found:
        yield found


def call(
    rank: int, differs: str, checked: bool, multiplies: bool = False, sharded: bool = False, wire: str = "exact"
) -> str:
    """One call, in which rank 1 has another value of the operand ``differs``, and ``wire``; what it raised."""
    os.environ[check_operands.VARIABLE] = "1" if checked else ""
    check_operands.checks_operands.cache_clear()
    check_operands.calls_checked.clear()
    generator = torch.Generator().manual_seed(0)
    own_wire = wire if rank == 1 else "exact"
    rows = -(-TOKENS // RANKS) if sharded else TOKENS
    operands = {
        "residual": torch.randn(rows, HIDDEN, generator=generator),
        "bias": torch.randn(HIDDEN, generator=generator),
        "weight": torch.randn(HIDDEN, generator=generator),
    }
    if differs and rank == 1:
        operands[differs].view(-1)[3] += 1e-6
    message = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(rank))
    start, first = (ops.mm_start, [message, torch.eye(HIDDEN)]) if multiplies else (ops.start, [message])
    dtypes = (torch.float32, torch.float32)
    group_name = dist.group.WORLD.group_name
    given = (*operands.values(), 1e-5, 0.0, None, *dtypes, sharded, "replicated", group_name, "gloo", 0)
    try:
        hidden, residual = start(*first, *given, wire=own_wire)
        ops.wait_(hidden, residual, [message], group_name, 0)
    except RuntimeError as error:
        return str(error)
    finally:
        del os.environ[check_operands.VARIABLE]
        check_operands.checks_operands.cache_clear()
    return ""


@pytest.mark.parametrize("multiplies", [False, True])
@pytest.mark.parametrize("differs", ["residual", "bias", "weight"])
def test_what_differs_is_named_on_all_ranks(ranks: GlooRanks, differs: str, multiplies: bool) -> None:
    answers = ranks.run(call, differs, True, multiplies)
    assert len(set(answers)) == 1
    assert f"{differs} of call 0" in answers[0] and answers[0].endswith("got others than rank 0's on rank 1")


def test_a_wire_that_one_rank_has_is_named_on_all_ranks(ranks: GlooRanks) -> None:
    answers = ranks.run(call, "", True, False, False, "int8")
    assert len(set(answers)) == 1
    assert "wire of call 0" in answers[0] and answers[0].endswith("got others than rank 0's on rank 1")


@pytest.mark.parametrize(
    ("differs", "checked", "sharded"), [("", True, False), ("residual", True, True), ("residual", False, False)]
)
def test_equal_operands_own_rows_and_unchecked_calls_pass(
    ranks: GlooRanks, differs: str, checked: bool, sharded: bool
) -> None:
    assert ranks.run(call, differs, checked, False, sharded) == [""] * RANKS


def many_calls(rank: int) -> int:
    for _ in range(3):
        check_operands.calls_checked[dist.group.WORLD.group_name] = check_operands.MOST_CALLS
        operands = (torch.full((HIDDEN,), float(rank)), None, None)
        arguments = ops.Arguments(
            *operands, 0.0, 0.0, None, torch.float32, torch.float32, False, "none", "0", "gloo", 0
        )
        check_operands.check_operands(arguments._replace(group_name=dist.group.WORLD.group_name), torch.device("cpu"))
    return check_operands.calls_checked[dist.group.WORLD.group_name]


def test_only_the_first_calls_are_checked(ranks: GlooRanks) -> None:
    assert ranks.run(many_calls) == [check_operands.MOST_CALLS] * RANKS


@pytest.mark.parametrize(("value", "on"), [("", False), ("0", False), ("1", True)])
def test_the_variable_switches_it(monkeypatch: pytest.MonkeyPatch, value: str, on: bool) -> None:
    monkeypatch.setenv(check_operands.VARIABLE, value)
    check_operands.checks_operands.cache_clear()
    assert check_operands.checks_operands() is on
    check_operands.checks_operands.cache_clear()


def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(check_operands.VARIABLE, "yes")
    check_operands.checks_operands.cache_clear()
    with pytest.raises(ValueError, match="TW_COMPILE_CHECK_INPUTS: expected '0' or '1', got 'yes'"):
        check_operands.checks_operands()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_digest_sees_every_element_and_its_place(dtype: torch.dtype) -> None:
    values = torch.arange(1, 65).reshape(8, 8).float().to(dtype)
    known = check_operands.digest(values)
    assert check_operands.digest(values.clone()) == known
    for place in (0, 31, 63):
        other = values.float()
        other.view(-1)[place] = 0.0
        assert check_operands.digest(other.to(dtype)) != known
    swapped = values.float()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert check_operands.digest(swapped.to(dtype)) != known
