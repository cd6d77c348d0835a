"""A norm as Hugging Face models write it, for decoders of the tests here."""

from __future__ import annotations

import torch
from torch import nn


class HFNorm(nn.Module):
    """RMSNorm in float32, or in float64 for the reference, times a weight near 1."""

    def __init__(self, hidden_size: int, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.3 * torch.randn(hidden_size, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.double() if x.dtype == torch.float64 else x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)
