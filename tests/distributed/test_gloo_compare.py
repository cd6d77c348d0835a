"""``compare_on_gloo`` with modules that write in place, and ranks that have died."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tw_compile.testing import GlooRanks, RankError, compare_on_gloo


class InPlace(nn.Module):
    """Adds the sum to the residual in place; what is compiled also adds 1, as a wrong rewrite might."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.wrong = wrong

    def forward(self, x, residual):
        x = x * 1
        dist.all_reduce(x)
        residual.add_(x)
        if self.wrong and torch.compiler.is_compiling():
            residual.add_(1)
        return residual


def right(rank: int) -> nn.Module:
    return InPlace(False)


def wrong(rank: int) -> nn.Module:
    return InPlace(True)


def arguments(rank: int, call: int):
    generator = torch.Generator().manual_seed(call)
    return torch.randn(4, 8, generator=generator), torch.randn(4, 8, generator=generator)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen.add_(1)
        return x + self.seen


def counting(rank: int) -> nn.Module:
    return Counting()


def one(rank: int, call: int):
    return (torch.ones(4),)


class Greedy(nn.Module):
    def forward(self, x):
        return x.argmax(-1)


def greedy(rank: int) -> nn.Module:
    return Greedy()


def test_what_writes_to_its_arguments_is_compared_on_equal_arguments() -> None:
    with GlooRanks(2) as ranks:
        assert not compare_on_gloo(wrong, arguments, ranks=ranks).passed  # at HEAD a wrong result passes
        assert compare_on_gloo(right, arguments, calls=2, ranks=ranks).passed
        assert compare_on_gloo(counting, one, calls=2, ranks=ranks).passed


def test_integers_can_be_compared() -> None:
    with GlooRanks(2) as ranks:
        assert compare_on_gloo(greedy, arguments_greedy, ranks=ranks).passed


def arguments_greedy(rank: int, call: int):
    return (arguments(0, call)[0],)


def test_ranks_that_have_died_between_calls_are_replaced() -> None:
    with GlooRanks(2, timeout=60) as ranks:
        pids = ranks.run(pid)
        os.kill(pids[1], signal.SIGKILL)
        ranks._workers[1][0].join(10)
        with pytest.raises(RankError, match="rank 1"):
            ranks.run(pid)
        assert len(ranks.run(pid)) == 2


def pid(rank: int) -> int:
    return os.getpid()


class Cached(nn.Module):
    def forward(self, x, cache):
        cache.add_(x)
        return cache * 2


def cached(rank: int) -> nn.Module:
    return Cached()


_CACHE = torch.zeros(4)


def with_cache(rank: int, call: int):
    return torch.full((4,), call + 1.0), _CACHE


def test_a_cache_that_all_calls_get() -> None:
    with GlooRanks(2) as ranks:
        assert compare_on_gloo(cached, with_cache, calls=3, ranks=ranks).passed
