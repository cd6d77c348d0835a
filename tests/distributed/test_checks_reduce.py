"""Ranks that share GPUs in checks: what the error budget's all_reduce is, by gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tw_compile.testing import GlooRanks

RANKS = 4


def inputs_of_all(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(1000, generator=generator) * (0.5 + rank)).to(dtype) for rank in range(RANKS)]


def reduced(rank: int, dtype: torch.dtype) -> torch.Tensor:
    own = inputs_of_all(dtype)[rank]
    dist.all_reduce(own)
    return own


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gloo_rounds_the_sum_at_every_hop_of_a_ring(dtype: torch.dtype) -> None:
    """So the unfused way of a budget is no more exact than one that sends the message's dtype must be, and no less."""
    inputs = inputs_of_all(dtype)
    with GlooRanks(RANKS, timeout=120) as ranks:
        outputs = ranks.run(reduced, dtype)
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    right = torch.zeros(1000, dtype=torch.bool)
    for begin in range(RANKS):
        for step in (1, -1):
            total = inputs[begin]
            for hop in range(1, RANKS):
                total = total + inputs[(begin + step * hop) % RANKS]
            right |= total == outputs[0]
    assert right.all()
    once = torch.stack(inputs).double().sum(0).to(dtype)
    assert not torch.equal(once, outputs[0])
