"""The tokens of half 1 as a function of all of them: one expression for every token count of a range."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

MOST_TOKENS = 2**18
"""Larger counts are as good as unbounded, because half 1 is computed for each count of a range."""
SHARES = 16
TILE_ROWS = (256, 128)
"""Rows that tiles of GEMMs have, larger ones first."""


def tokens_of_first_half(tokens: int, numerator: int, denominator: int, multiple: int, constant: int) -> int:
    """``tokens * numerator // denominator``, rounded down to a multiple of ``multiple``, plus ``constant``."""
    return tokens * numerator // denominator // multiple * multiple + constant


@dataclass(frozen=True)
class FirstHalf:
    """:func:`tokens_of_first_half` of the token counts of a range.

    Each half has ``least`` tokens or more, for every count from ``low`` to ``high``. That is proven by computing all of them.

    Raises:
        ValueError: Some count of the range leaves fewer tokens in a half, or there is no such range.
    """

    low: int
    high: int
    numerator: int = 1
    denominator: int = 2
    multiple: int = 1
    constant: int = 0
    least: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high <= MOST_TOKENS:
            raise ValueError(f"low, high: expected a range of 1 to {MOST_TOKENS} tokens, got {self.low} to {self.high}")
        smallest = min(first for first, _ in self.bounds)
        if smallest < self.least:
            raise ValueError(
                f"first half: expected {self.least} tokens or more in each half of {self.low} to {self.high}, "
                f"got {smallest} of {self}"
            )

    def __call__(self, tokens: int) -> int:
        return tokens_of_first_half(tokens, self.numerator, self.denominator, self.multiple, self.constant)

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The least and the most tokens of half 1, and of half 2."""
        counts = range(self.low, self.high + 1)
        first = [self(tokens) for tokens in counts]
        second = [tokens - half for tokens, half in zip(counts, first, strict=True)]
        return (min(first), max(first)), (min(second), max(second))

    def __str__(self) -> str:
        """As text with ``s`` for the token count, for example ``s*1//2//128*128``."""
        if not self.numerator:
            return str(self.constant)
        rounded = f"//{self.multiple}*{self.multiple}" if self.multiple > 1 else ""
        return f"s*{self.numerator}//{self.denominator}{rounded}" + (f"+{self.constant}" if self.constant else "")


def constant_first_half(first: int, low: int, high: int) -> FirstHalf:
    """Half 1 has ``first`` tokens at every token count from ``low`` to ``high``."""
    return FirstHalf(low, high, 0, 1, 1, first)


def shares_of_range(low: int, high: int, world_size: int, row_multiple: int = 16) -> Iterator[FirstHalf]:
    """Shares of the tokens from a quarter to three quarters, in whole tiles, or in rows that all ranks can share."""
    rows = math.lcm(row_multiple, world_size)
    for numerator in range(SHARES // 4, SHARES - SHARES // 4 + 1):
        for multiple in dict.fromkeys(math.lcm(tile, rows) for tile in (*TILE_ROWS, rows)):
            with contextlib.suppress(ValueError):
                yield FirstHalf(low, high, numerator, SHARES, multiple, least=rows)
