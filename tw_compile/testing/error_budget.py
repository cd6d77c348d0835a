"""Tolerances that come from float64 instead of from taste.

The fused result and the unfused result are both compared with the same computation in float64. The error of the fused result
may be at most a factor times the error of the unfused result.
"""

from __future__ import annotations

import torch


def relative_error(actual: torch.Tensor, reference64: torch.Tensor) -> float:
    """``|actual - reference| / |reference|`` in the 2-norm over all elements, in float64, on the reference's device.

    0 for two empty tensors.
    """
    if actual.shape != reference64.shape:
        raise ValueError(f"shapes differ: actual {list(actual.shape)}, reference {list(reference64.shape)}")
    reference = reference64.detach().double()
    if reference.numel() == 0:
        return 0.0
    difference = torch.linalg.vector_norm(actual.detach().to(reference) - reference)
    return float(difference / torch.linalg.vector_norm(reference).clamp_min(torch.finfo(torch.float64).tiny))


def budget(unfused: torch.Tensor, reference64: torch.Tensor, factor: float = 1.1) -> float:
    """``factor`` times the unfused error, at least the error of one rounding to the result's own dtype (integers: none)."""
    rounds = unfused.is_floating_point() or unfused.is_complex()
    return max(factor * relative_error(unfused, reference64), torch.finfo(unfused.dtype).eps / 2 if rounds else 0.0)


def assert_within_budget(
    actual: torch.Tensor, unfused: torch.Tensor, reference64: torch.Tensor, factor: float = 1.1
) -> None:
    """``actual`` is finite and at most ``factor`` times as far from ``reference64`` as ``unfused`` is."""
    assert actual.dtype == unfused.dtype, f"dtype is {actual.dtype}, unfused {unfused.dtype}"
    error, allowed = relative_error(actual, reference64), budget(unfused, reference64, factor)
    assert error <= allowed, f"relative error {error:.3e} exceeds the budget {allowed:.3e}"
