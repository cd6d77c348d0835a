"""Routes over links without native atomics, tried on two GPUs whose link has them: all are right there, and one may hang."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from gpu.test_p2p import require_gpus
from tw_compile.harness.launch import Progress
from tw_compile.harness.ranks import Keep, Ranks, work_as_rank
from tw_compile.peer_routes import HOST, PULL, PUSH
from tw_compile.tuning import peer_routes as trying

pytestmark = pytest.mark.gpu

RANKS = 2


@pytest.fixture(autouse=True)
def links_without_atomics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TW_COMPILE_PEER_ATOMICS", "0")


def hanging_process(spec: trying.RouteSpec, rank: int, scratch: str, messages: Connection) -> None:
    """As the trial's process. Loads never end: on one rank a kernel runs for ever."""

    def work(ranks: Ranks, progress: Progress, keep: Keep) -> dict[str, Any]:
        if spec.route == PULL:
            if rank == 1:
                torch.cuda._sleep(2**60)
                torch.cuda.synchronize()
            ranks.barrier()
        return trying.try_route(spec, ranks, progress, keep)

    work_as_rank(spec, rank, scratch, messages, work)


@pytest.mark.timeout(300)
def test_all_routes_are_right_and_the_fastest_is_taken() -> None:
    require_gpus(RANKS)
    assert trying.needs_trial(RANKS)
    begun = time.monotonic()
    tried = trying.try_routes(RANKS, print)
    print(tried.line, f"{time.monotonic() - begun:.0f} s")
    assert tried.reasons == {} and set(tried.us) == {HOST, PUSH, PULL}
    assert tried.route == trying.fastest(tried.us) != HOST, "NVLink is faster than host memory"
    assert all(len(times) >= 3 for times in tried.us.values())


@pytest.mark.timeout(300)
def test_a_route_that_never_ends_is_out_and_leaves_the_gpus_to_others() -> None:
    require_gpus(RANKS)
    tried = trying.try_routes(RANKS, print, hanging_process, seconds=30.0)
    print(tried.line)
    assert set(tried.reasons) == {PULL} and "30 s" in tried.reasons[PULL]
    assert tried.route == PUSH
    assert torch.ones(4, device="cuda").sum().item() == 4
