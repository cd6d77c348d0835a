"""Ranks that share GPUs in checks: what that lifts, and what it leaves."""

from __future__ import annotations

import os

import pytest
from gpu.checks.sharing import share_gpus

from tw_compile.kernels.collective import p2p_group
from tw_compile.kernels.collective.p2p_group import RankFacts, peer_obstacle
from tw_compile.kernels.collective.transports import NO_PEER_ATOMICS

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


def obstacle(facts: list[RankFacts], between: str | None = None) -> str | None:
    return peer_obstacle(0, facts, ["a", "b"], lambda own, peer: between)


def test_only_the_decision_about_shared_gpus_is_lifted(restored: None) -> None:
    assert "share a GPU" in str(obstacle(SHARING))
    share_gpus()
    assert obstacle(SHARING) is None
    assert "2 hosts" in str(obstacle([*SHARING, RankFacts("other", "a", (9, 0))]))
    assert obstacle(SHARING, NO_PEER_ATOMICS) == f"{NO_PEER_ATOMICS} (to the GPU of rank 1)"


def test_symmetric_memory_is_told(restored: None) -> None:
    share_gpus()
    assert os.environ[ALLOW] == "1"
