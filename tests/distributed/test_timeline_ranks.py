"""The traced forward begins on all ranks at once, however long each takes to start its profiler."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from tw_compile.harness.group import meet
from tw_compile.runner.timeline import Hidden, profile
from tw_compile.testing import GlooRanks

LATE_SECONDS = 0.5


def _profile_late_on_rank_1(rank: int, folder: Path) -> Hidden:
    world = dist.group.WORLD
    assert world is not None
    start = torch.profiler.profile.start_trace

    def start_late(profiler: torch.profiler.profile) -> None:
        time.sleep(LATE_SECONDS * rank)
        start(profiler)

    with mock.patch.object(torch.profiler.profile, "start_trace", start_late):
        return profile(lambda: dist.all_reduce(torch.ones(4)), folder / f"trace.{rank}.json", partial(meet, world))


def test_waiting_for_a_rank_that_starts_its_profiler_late_is_not_communication(
    gloo_ranks: GlooRanks, tmp_path: Path
) -> None:
    for found in gloo_ranks.run(_profile_late_on_rank_1, tmp_path):
        assert 0 < found.communication_us < LATE_SECONDS * 1e6 / 2
