"""Halves of an FFN that ``tw-compile tune --halves`` has timed on a device. They are part of the device's profile.

A model of waves tells halves of an FFN apart by 2% to 4% at best, and sums of single GEMMs do no better
(``benchmarks/halves-notes.md``). Times of the whole sequence tell more. They hold for one sequence of GEMMs, at one number of
tokens, on all SMs with nothing beside them. So they are used for exactly that, see ``ffn.py``. In a layer, calls take SMs
beside the GEMMs and attention comes between them: there other halves may be the fastest, and the model decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class MeasuredHalves:
    """The fastest halves of one FFN of one rank, one behind the other on all SMs.

    The FFN is ``[tokens, hidden_size] @ [hidden_size, 2 x intermediate_size]``, which is gate and up as one GEMM, then
    ``silu(gate) * up``, then ``[tokens, intermediate_size] @ [intermediate_size, hidden_size]``.

    Attributes:
        intermediate_size: Of one rank.
        tokens: Of both halves.
        first: Tokens of half 1. It is the one that the model chooses, unless another one was faster by more than the noise.
        us: Median microseconds of the FFN in these halves; ``equal_us``: in equal halves.
        measured: Date, GPU and versions.
    """

    hidden_size: int
    intermediate_size: int
    dtype: Literal["bfloat16", "float16"]
    tokens: int
    first: int
    us: float
    equal_us: float
    measured: str

    @property
    def key(self) -> tuple[int, int, str, int]:
        """What the halves are of; a profile has one entry for each."""
        return self.hidden_size, self.intermediate_size, self.dtype, self.tokens

    def __str__(self) -> str:
        return (
            f"{self.first} + {self.tokens - self.first} of {self.tokens} tokens: {self.us:.1f} us, equal halves "
            f"{self.equal_us:.1f} us; measured {self.measured}"
        )


def check_halves(halves: Iterable[MeasuredHalves], source: str) -> None:
    """Raise ValueError, which begins with ``source``, where a half is empty or two entries are about the same FFN."""
    seen = set()
    for index, entry in enumerate(halves):
        if entry.first >= entry.tokens:
            raise ValueError(
                f"{source}: halves[{index}]: first: expected fewer than the {entry.tokens} tokens, got {entry.first}"
            )
        if entry.key in seen:
            raise ValueError(
                f"{source}: halves[{index}]: expected one entry for each FFN, got a second one of {entry.key}"
            )
        seen.add(entry.key)


def with_measured(before: Iterable[MeasuredHalves], found: Iterable[MeasuredHalves]) -> tuple[MeasuredHalves, ...]:
    """Both, ordered by what they are of. Of the same FFN, ``found`` replaces what was there ``before``."""
    return tuple(sorted({entry.key: entry for entry in (*before, *found)}.values(), key=lambda entry: entry.key))
