"""Errors against the float64 reference, and the budget they are held to."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

# The fused model rounds in other places than the unfused one. Its error may be at most this factor times the unfused error.
BUDGET_FACTOR = 1.1


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Hash of the tensors' bits."""
    hasher = hashlib.sha256()
    for tensor in tensors:
        hasher.update(tensor.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return hasher.hexdigest()


@dataclass(frozen=True)
class OutputErrors:
    """The errors of one output of the fused model and of the same output of the unfused one, each on its worst rank."""

    error: float
    unfused_error: float
    factor: float = BUDGET_FACTOR
    """The error may be at most this factor times the unfused error; infinite where there is no such budget."""

    @property
    def budget(self) -> float:
        return self.factor * self.unfused_error

    @property
    def passed(self) -> bool:
        return math.isfinite(self.error) and self.error <= self.budget

    @property
    def ratio(self) -> float:
        """The share of the budget that is used."""
        if not math.isfinite(self.error):
            return math.inf
        if not self.budget:
            return math.inf if self.error else 0.0
        return self.error / self.budget

    def as_dict(self) -> dict[str, Any]:
        """The values for JSON. JSON has neither infinity nor NaN, so these become None."""
        return {
            "error": finite(self.error),
            "unfused_error": finite(self.unfused_error),
            "budget": finite(self.budget),
            "passed": self.passed,
        }


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def worst(comparisons: Iterable[OutputErrors]) -> OutputErrors:
    """The comparison that uses the largest share of its budget."""
    return max(comparisons, key=lambda comparison: comparison.ratio)
