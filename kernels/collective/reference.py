"""Readable eager forms of the steps after the reduction. They are the definitions that every kernel is tested against."""

from __future__ import annotations

import torch

from tw_compile.kernels.collective.spec import FP8_MAX, NormSpec, empty_hidden, scales_of


def add_rms_norm(
    reduced: torch.Tensor,
    residual: torch.Tensor | None,
    bias: torch.Tensor | None,
    weight: torch.Tensor | None,
    norm: NormSpec,
    hidden_scale: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(hidden, h)`` for ``reduced [rows, hidden]``, see :class:`NormSpec`; ``h`` has ``norm.residual_dtype``.

    Float64 input is computed in float64 throughout, so the same text serves as the error budget's reference.
    """
    h = sum_of(reduced, residual, bias, norm)
    y = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + norm.eps)
    return results_of(weighted(y, weight, norm), h, norm, hidden_scale, norm_bias)


def add_layer_norm(
    reduced: torch.Tensor,
    residual: torch.Tensor | None,
    bias: torch.Tensor | None,
    weight: torch.Tensor | None,
    norm: NormSpec,
    hidden_scale: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`add_rms_norm`, with a LayerNorm.

    The mean is subtracted before squaring: ``mean(h^2) - mean(h)^2`` loses all its digits where the mean is large.
    """
    h = sum_of(reduced, residual, bias, norm)
    centred = h - h.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + norm.eps)
    return results_of(weighted(y, weight, norm), h, norm, hidden_scale, norm_bias)


def weighted(y: torch.Tensor, weight: torch.Tensor | None, norm: NormSpec) -> torch.Tensor:
    """The normalised rows ``y [rows, hidden]`` times the weight. ``norm`` says whether ``y`` is rounded first."""
    if weight is None:
        return y
    if norm.cast_before_weight is None:
        return y * (weight.to(y.dtype) + norm.weight_offset)
    return y.to(norm.cast_before_weight).to(y.dtype) * weight.to(y.dtype)


def sum_of(
    reduced: torch.Tensor, residual: torch.Tensor | None, bias: torch.Tensor | None, norm: NormSpec
) -> torch.Tensor:
    """``h`` of :class:`NormSpec`, ``[rows, hidden]`` in float32, float64 for float64 input. All epilogues begin with this."""
    compute = torch.float64 if reduced.dtype == torch.float64 else torch.float32
    h = reduced.to(compute) * norm.scale
    if bias is not None:
        h = h + bias.to(compute)
    if residual is not None:
        h = h + residual.to(compute)
    return h


def results_of(
    y: torch.Tensor,
    h: torch.Tensor,
    norm: NormSpec,
    hidden_scale: torch.Tensor | None,
    norm_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(hidden, h)`` in their final dtypes; an epilogue has computed ``y`` from ``h``. All epilogues end with this."""
    if norm_bias is not None:
        y = y + norm_bias.to(y.dtype)
    if norm.scale_columns:
        return quantised(y, norm), h.to(norm.residual_dtype)
    if hidden_scale is not None:
        y = (y * hidden_scale.to(y.dtype).reciprocal()).clamp(-FP8_MAX, FP8_MAX)
    return y.to(norm.hidden_dtype), h.to(norm.residual_dtype)


def quantised(y: torch.Tensor, norm: NormSpec) -> torch.Tensor:
    """``y [rows, hidden]`` as float8 codes. Their scales are computed from ``y`` and lie behind the codes.

    See :func:`~.spec.scales_of`.
    """
    values = y.float().unflatten(-1, (-1, norm.scale_columns))
    scales = (values.abs().amax(-1) / FP8_MAX).clamp_min(norm.min_scale)
    by = scales.unsqueeze(-1)
    scaled = values / by if norm.divides_by_scale else values * by.reciprocal()
    hidden = empty_hidden(y.shape[0], y.shape[1], norm, y.device)
    hidden.copy_(scaled.clamp(-FP8_MAX, FP8_MAX).flatten(-2))
    scales_of(hidden, norm.scale_columns).copy_(scales)
    return hidden
