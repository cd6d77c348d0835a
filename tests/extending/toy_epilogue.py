"""An epilogue in a file of its own: LayerNorm, by its definition in torch."""

from __future__ import annotations

from pathlib import Path

import torch

from tw_compile.kernels.collective.reference import results_of, sum_of
from tw_compile.kernels.collective.spec import NormSpec
from tw_compile.kernels.epilogues import EpilogueEntry


def add_layer_norm(
    reduced: torch.Tensor,
    residual: torch.Tensor | None,
    bias: torch.Tensor | None,
    weight: torch.Tensor | None,
    norm: NormSpec,
    hidden_scale: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    h = sum_of(reduced, residual, bias, norm)
    centred = h - h.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + norm.eps)
    if weight is not None:
        y = y * (weight.to(h.dtype) + norm.weight_offset)
    return results_of(y, h, norm, hidden_scale, norm_bias)


ENTRY = EpilogueEntry(
    "toy_layer_norm",
    "toy_epilogue:add_layer_norm",
    header=Path(__file__).with_name("toy_layer_norm_row.cuh"),
    statistics_bytes=8,
)
