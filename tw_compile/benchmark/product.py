"""Whether the product of a GEMM is right that ran beside something else."""

from __future__ import annotations

import torch

TOLERANCE = 2**-6
"""The product may differ by this share of its root mean square, because cuBLAS adds in another order when it plans for fewer
SMs."""


def product_deviation(product: torch.Tensor, want: torch.Tensor) -> str | None:
    """How far ``product`` is from ``want``, the library's product with nothing beside it; None if it is near enough."""
    expected = want.float()
    rms = expected.square().mean().sqrt()
    worst = float((product.float() - expected).abs().max() / rms)
    if not worst <= TOLERANCE * max(1.0, float(expected.abs().max() / rms)):
        return f"the product beside it is off by {worst:.2g} of its root mean square"
    return None
