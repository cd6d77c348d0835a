"""How a row travels between ranks: exact, or in codes of few bits. Plain data, without torch.

A row of a two-shot call travels twice. First, partial sums go to the rank that owns the row. Then the owner's normalised row
goes to all other ranks. A wire says for each of the two ways in which form the row travels. The codes themselves are defined in
``codes.py``. The method is that of Flash Communication (arXiv 2412.04964), which also sums and gathers in few bits. Here the
residual stays exact on its owner, and the normalised row is gathered.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Codes:
    """Integers of ``bits`` bits, with a scale and an offset for each ``group`` columns of a row."""

    bits: int
    group: int

    @property
    def levels(self) -> int:
        """The largest code. One pattern of the bits stays unused, the one with only the highest bit set."""
        return 2**self.bits - 2

    def row_bytes(self, hidden_size: int) -> int:
        """Bytes of a row of ``hidden_size`` columns: its codes, then one 32-bit word for each group."""
        return hidden_size * self.bits // 8 + hidden_size // self.group * 4


INT8 = Codes(bits=8, group=128)
INT4 = Codes(bits=4, group=32)


@dataclass(frozen=True)
class Wire:
    """One wire. ``sums``: the codes of partial sums on their way to the owner; ``results``: the codes of normalised rows on
    their way back. None: rows travel as they are."""

    name: str
    sums: Codes | None
    results: Codes | None

    @property
    def group(self) -> int:
        """A row's columns must be a multiple of this."""
        return max((codes.group for codes in (self.sums, self.results) if codes is not None), default=1)


EXACT = "exact"
WIRES = {
    wire.name: wire
    for wire in (
        Wire(EXACT, None, None),
        Wire("int8", INT8, INT8),
        Wire("int6", INT4, INT8),
        Wire("int4", INT4, INT4),
    )
}
