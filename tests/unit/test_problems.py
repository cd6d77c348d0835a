"""The error budget: of single elements, and of results that are float8."""

from __future__ import annotations

import pytest
import torch

from tw_compile.harness.problems import Context, Form, expect_within_budget, of_exact, ulps_of_norm

BY_GROUP = Form(out="sharded", scales="group")


def failures(
    got: torch.Tensor, base: torch.Tensor, want: torch.Tensor, at_best: torch.Tensor | None, ulps: int = 1
) -> list[str]:
    ctx = Context(0, 1, torch.device("cpu"), "")
    expect_within_budget(ctx, "hidden", got, base, want, at_best=at_best, ulps=ulps)
    return ctx.failures


@pytest.mark.parametrize(("dtype", "ulps"), [(torch.float32, 2), (torch.bfloat16, 1)])
def test_the_worst_element_may_be_two_ulps_off_in_float32_and_one_in_what_is_shorter(
    dtype: torch.dtype, ulps: int
) -> None:
    """Of a base that is exact by chance. All other elements are exact, so the root mean squares are small."""
    want = torch.ones(64, 4096, dtype=torch.float64)
    base = want.to(dtype)
    for off in range(4):
        got = base.clone()
        got[0, 0] += off * torch.finfo(dtype).eps
        broken = [line for line in failures(got, base, want, None, ulps_of_norm(dtype)) if "max error" in line]
        assert bool(broken) == (off > ulps), off
        assert bool([line for line in failures(got, base, want, None) if "max error" in line]) == (off > 1)


def one_group() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Exact values, these as float8, and unfused values that are worse, but nearer for the element between two codes."""
    want = torch.zeros(1, 128, dtype=torch.float64)
    want[0, 0], want[0, 1] = 448.0, 431.9
    at_best = of_exact(want, BY_GROUP)
    assert at_best is not None and float(at_best[0, 1]) == 416.0
    base = at_best.clone()
    base[0, 1] += 2.5
    base[0, 2:] += 2.0
    return want, at_best, base


def test_exact_values_as_float8_are_within_the_budget() -> None:
    want, at_best, base = one_group()
    assert failures(at_best, base, want, at_best) == []
    (line,) = failures(at_best, base, want, None)
    assert "max error" in line


def test_an_element_that_is_worse_than_both_is_not() -> None:
    want, at_best, base = one_group()
    got = at_best.clone()
    got[0, 1] -= 2.0
    (line,) = failures(got, base, want, at_best)
    assert "max error 1.790e+01, unfused 1.590e+01" in line


def test_only_float8_has_values_at_best() -> None:
    assert of_exact(torch.zeros(1, 128, dtype=torch.float64), Form(out="sharded")) is None
