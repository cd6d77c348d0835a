"""Readable eager forms of what follows the reduction: the definitions every kernel is tested against."""

from __future__ import annotations

import torch

from tw_compile.kernels.collective.spec import FP8_MAX, NormSpec


def add_rms_norm(
    reduced: torch.Tensor,
    residual: torch.Tensor | None,
    bias: torch.Tensor | None,
    weight: torch.Tensor | None,
    norm: NormSpec,
    hidden_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(hidden, h)`` for ``reduced [rows, hidden]``, see :class:`NormSpec`; ``h`` has ``norm.residual_dtype``.

    Float64 input is computed in float64 throughout, so the same text serves as the error budget's reference.
    """
    h = sum_of(reduced, residual, bias, norm)
    y = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + norm.eps)
    return results_of(weighted(y, weight, norm), h, norm, hidden_scale)


def add_layer_norm(
    reduced: torch.Tensor,
    residual: torch.Tensor | None,
    bias: torch.Tensor | None,
    weight: torch.Tensor | None,
    norm: NormSpec,
    hidden_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`add_rms_norm`, with a LayerNorm that has no bias of its own.

    The mean is taken off before anything is squared: ``mean(h^2) - mean(h)^2`` has no digits left where the mean is large.
    """
    h = sum_of(reduced, residual, bias, norm)
    centred = h - h.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + norm.eps)
    return results_of(weighted(y, weight, norm), h, norm, hidden_scale)


def weighted(y: torch.Tensor, weight: torch.Tensor | None, norm: NormSpec) -> torch.Tensor:
    """The normalised rows ``y [rows, hidden]`` times the weight, rounded before it as ``norm`` says."""
    if weight is None:
        return y
    if norm.cast_before_weight is None:
        return y * (weight.to(y.dtype) + norm.weight_offset)
    return y.to(norm.cast_before_weight).to(y.dtype) * weight.to(y.dtype)


def sum_of(
    reduced: torch.Tensor, residual: torch.Tensor | None, bias: torch.Tensor | None, norm: NormSpec
) -> torch.Tensor:
    """``h`` of :class:`NormSpec`, ``[rows, hidden]`` in float32, or float64 for float64 input: where all epilogues begin."""
    compute = torch.float64 if reduced.dtype == torch.float64 else torch.float32
    h = reduced.to(compute) * norm.scale
    if bias is not None:
        h = h + bias.to(compute)
    if residual is not None:
        h = h + residual.to(compute)
    return h


def results_of(
    y: torch.Tensor, h: torch.Tensor, norm: NormSpec, hidden_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(hidden, h)`` of what an epilogue has made of ``h``, both as they are kept: where all epilogues end."""
    if hidden_scale is not None:
        y = (y * hidden_scale.to(y.dtype).reciprocal()).clamp(-FP8_MAX, FP8_MAX)
    return y.to(norm.hidden_dtype), h.to(norm.residual_dtype)
