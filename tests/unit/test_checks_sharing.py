"""Ranks that share GPUs in checks: what that lifts, what it leaves, and what the error budget's all_reduce then is."""

from __future__ import annotations

import os
from datetime import timedelta
from threading import Thread

import pytest
import torch
import torch.distributed as dist
from gpu.checks.sharing import share_gpus

from tw_compile.kernels.collective import p2p_group
from tw_compile.kernels.collective.p2p_group import RankFacts, peer_obstacle

ALLOW = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
SHARING = [
    RankFacts("host", "a", (9, 0)),
    RankFacts("host", "b", (9, 0)),
    RankFacts("host", "a", (9, 0)),
    RankFacts("host", "b", (9, 0)),
]


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``share_gpus`` changes is undone."""
    monkeypatch.setattr(p2p_group, "sharing_obstacle", p2p_group.sharing_obstacle)
    for variable in (ALLOW, "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)


def obstacle(facts: list[RankFacts], access: bool = True, atomics: bool = True) -> str | None:
    return peer_obstacle(0, facts, ["a", "b"], lambda own, peer: access, lambda own, peer: atomics)


def test_only_the_decision_about_shared_gpus_is_lifted(restored: None) -> None:
    assert "share a GPU" in str(obstacle(SHARING))
    share_gpus()
    assert obstacle(SHARING) is None
    assert "2 hosts" in str(obstacle([*SHARING, RankFacts("other", "a", (9, 0))]))
    assert "no peer access to the GPU of rank 1" in str(obstacle(SHARING, access=False))
    assert "no atomics on the memory of rank 1" in str(obstacle(SHARING, atomics=False))


def test_symmetric_memory_is_told(restored: None) -> None:
    share_gpus()
    assert os.environ[ALLOW] == "1"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gloo_rounds_the_sum_at_every_hop_of_a_ring(dtype: torch.dtype) -> None:
    """So the unfused way of a budget is no more exact than one that sends the message's dtype must be, and no less."""
    world_size, generator = 4, torch.Generator().manual_seed(0)
    inputs = [(torch.randn(1000, generator=generator) * (0.5 + rank)).to(dtype) for rank in range(world_size)]
    outputs, store = [x.clone() for x in inputs], dist.HashStore()

    def reduce(rank: int) -> None:
        gloo = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=30))
        gloo.allreduce([outputs[rank]]).wait()

    threads = [Thread(target=reduce, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    right = torch.zeros(1000, dtype=torch.bool)
    for begin in range(world_size):
        for step in (1, -1):
            total = inputs[begin]
            for hop in range(1, world_size):
                total = total + inputs[(begin + step * hop) % world_size]
            right |= total == outputs[0]
    assert right.all()
    once = torch.stack(inputs).double().sum(0).to(dtype)
    assert not torch.equal(once, outputs[0])
