"""Memory that emulated kernels are given, with margins that nothing may write."""

from __future__ import annotations

import torch

from tw_compile.kernels.collective.spec import NormSpec, scales_bytes

_MARGIN_BYTES = 128  # around what kernels write


def copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def guarded(like: torch.Tensor, fill: int = -1) -> torch.Tensor:
    """As ``like``, of bytes 0xFF or of int32 words ``fill``, between margins of bytes 0xFF: see :func:`margins`."""
    whole = torch.full((like.nbytes + 2 * _MARGIN_BYTES,), 0xFF, dtype=torch.uint8)
    inner = whole[_MARGIN_BYTES:-_MARGIN_BYTES]
    if fill != -1:
        inner.view(torch.int32).fill_(fill)
    return inner.view(like.dtype).view(like.shape)


def margins(tensor: torch.Tensor) -> torch.Tensor:
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return torch.cat([whole[:_MARGIN_BYTES], whole[-_MARGIN_BYTES:]])


def guarded_results(hidden: torch.Tensor, norm: NormSpec) -> torch.Tensor:
    """As ``hidden``, guarded; with the scales that are made of it flat, and as many bytes longer."""
    if not norm.scale_columns:
        return guarded(hidden)
    tokens, hidden_size = hidden.shape
    extra = scales_bytes(tokens, hidden_size, norm.scale_columns)
    return guarded(torch.empty(hidden.numel() + extra, dtype=hidden.dtype))
