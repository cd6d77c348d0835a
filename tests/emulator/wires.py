"""What calls give to the bit: the operator in float32, in the order in which the kernels add. Rows may travel in codes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tw_compile.kernels.collective.codes import round_trip
from tw_compile.kernels.collective.reference import quantised
from tw_compile.kernels.collective.spec import FP8, Request, row_range, rows_per_rank
from tw_compile.kernels.collective.wires import WIRES

_LANES = 32


def expected_bits(requests: Sequence[Request], threads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``hidden [tokens, hidden]`` and the new residual ``h [tokens, hidden]`` in their dtypes, for the requests of all ranks.

    ``threads`` hold a row. The norm is RMSNorm.
    """
    first = requests[0]
    norm, wire, tokens = first.norm, WIRES[first.wire], first.x.shape[0]
    travelled = [
        request.x.float() if wire.sums is None else round_trip(request.x, wire.sums).float() for request in requests
    ]
    h = torch.zeros(first.x.shape)
    for owner in range(len(requests)):
        begin, end = row_range(tokens, len(requests), owner)
        for source, request in enumerate(requests):
            h[begin:end] += (request.x.float() if source == owner else travelled[source])[begin:end]
    if norm.scale != 1.0:
        h *= norm.scale
    if first.bias is not None:
        h += first.bias.float()
    residual = _whole_residual(requests)
    if residual is not None:
        h += residual.float()
    hidden = _rms_norm(h, first, threads)
    if norm.hidden_dtype != FP8 and wire.results is not None:
        hidden = round_trip(hidden, wire.results).to(norm.hidden_dtype)
    return hidden, h.to(norm.residual_dtype)


def _whole_residual(requests: Sequence[Request]) -> torch.Tensor | None:
    """From the shards of all ranks, if each has its own."""
    first = requests[0]
    if first.residual is None or not first.residual_sharded:
        return first.residual
    tokens = first.x.shape[0]
    assert all(len(request.residual) == rows_per_rank(tokens, len(requests)) for request in requests)
    return torch.cat([request.residual for request in requests])[:tokens]


def _rms_norm(h: torch.Tensor, request: Request, threads: int) -> torch.Tensor:
    norm, weight = request.norm, request.weight
    mean = _sum_of_squares(h, threads) * (torch.tensor(1.0) / h.shape[1]) + _float(norm.eps)
    factor = 1.0 / mean.double().sqrt().float()  # torch may round the root in float32 otherwise than to nearest
    y = h * factor.unsqueeze(-1)
    if weight is not None:
        cast = norm.cast_before_weight
        if cast is not None and cast == weight.dtype == norm.hidden_dtype:
            return y.to(cast) * weight
        y = y.to(cast).float() * weight.float() if cast is not None else y * (weight.float() + norm.weight_offset)
    if norm.scale_columns:
        return quantised(y, norm)
    if norm.hidden_dtype == FP8:
        assert request.hidden_scale is not None
        y = (y * (1.0 / request.hidden_scale)).clamp(-448, 448)
    return y.to(norm.hidden_dtype)


def _sum_of_squares(h: torch.Tensor, threads: int) -> torch.Tensor:
    """``[tokens]``: of a thread's vectors, then of a warp's lanes by pairs, then of the warps."""
    tokens, hidden_size = h.shape
    each = -(-hidden_size // (8 * threads))
    padded = torch.zeros(tokens, each * threads * 8)
    padded[:, :hidden_size] = h
    squares = torch.zeros(tokens, threads)
    for vector in padded.reshape(tokens, each, threads, 8).unbind(1):
        for column in vector.unbind(-1):
            squares += column * column
    by_lane, lanes = squares.reshape(tokens, threads // _LANES, _LANES), torch.arange(_LANES)
    for mask in (16, 8, 4, 2, 1):
        by_lane = by_lane + by_lane[..., lanes ^ mask]
    total = torch.zeros(tokens)
    for warp in by_lane[..., 0].unbind(1):
        total += warp
    return total


def _float(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)
