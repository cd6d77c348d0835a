"""What checks of calls that overlap take for right, with perfect results and with those of other ranks."""

from __future__ import annotations

import pytest
import torch
from gpu.checks import stress


@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_are_right_however_much_the_residual_cancels(ranks: int) -> None:
    generator = torch.Generator().manual_seed(ranks)
    for _ in range(40):
        *messages, residual = (
            torch.randn(64, 4096, generator=generator, dtype=torch.bfloat16) for _ in range(ranks + 1)
        )
        total = torch.stack(messages).double().sum(0)
        rounded = (total.bfloat16() + residual).bfloat16()
        assert stress.is_sum(rounded, total, residual)
        # One rank's message is missing, is another call's in one row, or the residual is.
        assert not stress.is_sum((total - messages[0].double()).bfloat16() + residual, total, residual)
        other = rounded.clone()
        other[5] = rounded[6]
        assert not stress.is_sum(other, total, residual)
        assert not stress.is_sum(total.bfloat16(), total, residual)
    total, residual = torch.full((1, 1), 6.02, dtype=torch.float64), torch.full((1, 1), -6.0, dtype=torch.bfloat16)
    assert stress.is_sum(total.bfloat16() + residual, total, residual)  # 0.03, not 0.02
    assert not stress.is_sum(torch.full((1, 1), float("nan")), total, residual)
