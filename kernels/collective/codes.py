"""The codes in which rows travel, in torch: the definition that every kernel matches bit for bit.

A group of values ``x`` (float32) with the smallest ``low`` and the largest ``high`` becomes integers ``q`` from 0 to
``levels``, a ``scale`` and an ``offset``, both bfloat16, so that ``x`` is about ``offset + q * scale``:

- ``offset`` is ``low`` rounded down, ``scale`` is ``(high - offset) / levels`` rounded up, and at least 2**-126. So no value of
  the group lies outside of what codes can say.
- ``q = rint((x - offset) * (1 / scale))``, each operation rounded to float32, then clamped to 0 and ``levels``.
- A group with a NaN, an infinity, or a range that float32 can't hold has the scale NaN, the offset 0 and codes 0. The whole
  group decodes to NaN. So no value that is not finite becomes finite.

A row travels as bytes. First come the codes in the order of the columns, each stored as ``q - (levels // 2)`` in two's
complement (two codes of 4 bits to a byte, the earlier column in the lower half). Then each group has a little-endian 32-bit
word with the scale in its upper half and the offset in its lower half. No 32-bit word of a row is 0x80000000: the pattern with
only the highest bit set is no code, and scales are positive (or the positive NaN). Some kernels need this: their receivers see
from a word itself whether it has arrived.
"""

from __future__ import annotations

import torch

from tw_compile.kernels.collective.wires import Codes

_SMALLEST_SCALE = 2.0**-126
_NAN = 0x7FC0


def encode(rows: torch.Tensor, codes: Codes) -> torch.Tensor:
    """``rows [tokens, hidden]`` of any float dtype as uint8 ``[tokens, codes.row_bytes(hidden)]``.

    Raises:
        ValueError: ``hidden`` is not a multiple of ``codes.group``.
    """
    tokens, hidden_size = rows.shape
    _check(hidden_size, codes)
    groups = rows.float().reshape(tokens, hidden_size // codes.group, codes.group)
    low, high = groups.amin(-1) + 0.0, groups.amax(-1)  # a NaN in the group gives NaN; + 0.0 turns -0.0 into 0.0
    offset = _rounded(low, up=False)
    width = high - offset
    lost = ~(width.isfinite() & offset.isfinite())
    # Divide by a tensor: for a division by a Python number GPUs multiply by its reciprocal, which rounds twice.
    scale = _rounded(width / torch.full_like(width, codes.levels), up=True).clamp_min(_SMALLEST_SCALE)
    scale, offset = scale.masked_fill(lost, 1.0), offset.masked_fill(lost, 0.0)
    quotients = (groups - offset.unsqueeze(-1)) * scale.reciprocal().unsqueeze(-1)
    q = quotients.round().clamp(0, codes.levels).masked_fill(lost.unsqueeze(-1), 0.0).to(torch.int32)
    stored = (q - codes.levels // 2).reshape(tokens, hidden_size)
    words = _bits(scale).masked_fill(lost, _NAN) << 16 | _bits(offset)
    if codes.bits == 4:
        stored = (stored[:, 0::2] & 15) | ((stored[:, 1::2] & 15) << 4)
    tail = words.to(torch.int32).view(torch.uint8).reshape(tokens, 4 * (hidden_size // codes.group))
    return torch.cat((stored.to(torch.uint8), tail), 1)


def decode(packed: torch.Tensor, codes: Codes, hidden_size: int) -> torch.Tensor:
    """Decode the result of :func:`encode` to float32 ``[tokens, hidden_size]``: ``offset + q * scale``, rounded once."""
    _check(hidden_size, codes)
    tokens, code_bytes = packed.shape[0], hidden_size * codes.bits // 8
    stored = packed[:, :code_bytes].to(torch.int32)
    if codes.bits == 4:
        stored = torch.stack((stored & 15, stored >> 4), -1).reshape(tokens, hidden_size)
    sign = 1 << (codes.bits - 1)
    q = (stored ^ sign) - sign + codes.levels // 2
    words = packed[:, code_bytes:].contiguous().view(torch.int32)
    scale = (words & -0x10000).view(torch.float32).unsqueeze(-1)
    offset = (words << 16).view(torch.float32).unsqueeze(-1)
    # A product of two numbers of 8 bits is exact, but may lie outside of float32 where its sum with the offset does not.
    products = q.reshape(tokens, hidden_size // codes.group, codes.group).double() * scale
    return (offset + products).float().reshape(tokens, hidden_size)


def round_trip(rows: torch.Tensor, codes: Codes | None) -> torch.Tensor:
    """``rows`` encoded and decoded again, in float32, as a receiver gets them. Without ``codes``: ``rows`` themselves."""
    return rows if codes is None else decode(encode(rows, codes), codes, rows.shape[1])


def _check(hidden_size: int, codes: Codes) -> None:
    if hidden_size % codes.group:
        raise ValueError(f"rows: expected a hidden size that is a multiple of {codes.group}, got {hidden_size}")


def _bits(values: torch.Tensor) -> torch.Tensor:
    """The upper 16 bits of float32 ``values`` as int32 from 0 to 65535."""
    return values.view(torch.int32) >> 16 & 0xFFFF


def _rounded(values: torch.Tensor, up: bool) -> torch.Tensor:
    """Round float32 ``values`` up or down to the next float32 that bfloat16 can represent; NaN and infinities stay."""
    bits = values.contiguous().view(torch.int32)
    cut = bits & -0x10000
    # Cutting the lower bits rounds towards zero. If the wanted direction is away from zero, one more step is needed.
    away = (bits >= 0) if up else (bits < 0)
    step = ((bits & 0xFFFF) != 0) & away & values.isfinite()
    return torch.where(step, cut + 0x10000, cut).view(torch.float32)
