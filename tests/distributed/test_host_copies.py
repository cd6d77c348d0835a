"""Bare copies through host memory, on gloo ranks: what is copied, and how much."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tw_compile import compat
from tw_compile.benchmark import host_copies
from tw_compile.benchmark.host_copies import HostCopies, pieces
from tw_compile.benchmark.spec import MessageSize
from tw_compile.harness.problems import Context, Form, make_problem
from tw_compile.harness.ranks import Ranks, UnavailableError
from tw_compile.kernels.collective.host_memory import HostMemory
from tw_compile.kernels.collective.slot import Shared
from tw_compile.testing import GlooRanks

RANKS, TOKENS, HIDDEN = 4, 1536, 64
PART = 64 * 1024


@pytest.mark.parametrize(
    ("nbytes", "most", "expected"),
    [(10, 4, [(0, 4), (4, 4), (8, 2)]), (8, 4, [(0, 4), (4, 4)]), (3, 4, [(0, 3)]), (0, 4, [])],
)
def test_pieces_are_all_of_the_message(nbytes: int, most: int, expected: list[tuple[int, int]]) -> None:
    assert list(pieces(nbytes, most)) == expected


def test_gpus_that_reach_each_other_need_no_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    size = MessageSize(128, 4096, "bfloat16")
    monkeypatch.setattr(host_copies, "peer_access_obstacle", lambda ranks: None)
    assert "reach each other" in str(HostCopies().obstacle(size, RANKS))
    monkeypatch.setattr(host_copies, "peer_access_obstacle", lambda ranks: "no peer access")
    assert HostCopies().obstacle(size, RANKS) is None
    assert "tried from 1 MiB" in str(HostCopies().obstacle(MessageSize(127, 4096, "bfloat16"), RANKS))


@contextmanager
def without_cuda(memory: HostMemory) -> Iterator[None]:
    """Streams do nothing, and memory is reached where it is mapped."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    with (
        mock.patch.object(host_copies, "HostMemory", lambda: memory),
        mock.patch.object(host_copies, "ALL_PARTS_BYTES", PART * RANKS),
        mock.patch("torch.cuda.Stream", lambda priority: stream),
        mock.patch("torch.cuda.current_stream", lambda: stream),
        mock.patch("torch.cuda.stream", lambda other: nullcontext()),
    ):
        yield


def copied(rank: int, folder: str) -> dict[str, Any]:
    world = dist.group.WORLD
    assert world is not None
    ranks = Ranks(Context(rank, RANKS, torch.device("cpu"), compat.group_name(world)), world)
    problem = make_problem(ranks.ctx, TOKENS, HIDDEN, Form())
    shared: list[Shared] = []

    class Watched(HostMemory):
        def share_in(self, *arguments: Any) -> dict[str, Shared]:
            made = super().share_in(*arguments)
            shared.extend(made.values())
            return made

    count = {"out": 0, "in": 0}
    copy = torch.Tensor.copy_

    def counting(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        own = shared[0].handle[rank]
        into_own = own.data_ptr() <= to.data_ptr() < own.data_ptr() + own.numel()
        count["out" if into_own else "in"] += to.numel()
        return copy(to, source)

    with without_cuda(Watched(Path(folder), lambda address, nbytes: address, lambda address: None)):
        contender = HostCopies()
        call = contender.prepare(ranks, problem)
        contender.prepare(ranks, problem)
        with mock.patch.object(torch.Tensor, "copy_", counting):
            call()
    message = problem.x.view(torch.uint8).view(-1)
    (begin, nbytes) = list(pieces(message.numel(), PART))[-1]
    last = shared[0].handle[rank][:nbytes]
    return {
        **count,
        "last piece": torch.equal(last, message[begin:]),
        "parts": [part.numel() for part in shared[0].handle],
        "shared": len(shared),
    }


def test_each_rank_copies_what_two_shot_moves(tmp_path: Path) -> None:
    nbytes = TOKENS * HIDDEN * 2
    assert nbytes == 3 * PART
    with GlooRanks(RANKS, timeout=120) as ranks:
        found = ranks.run(copied, str(tmp_path))
    for one in found:
        assert (one["out"], one["in"]) == (nbytes, 2 * (RANKS - 1) * nbytes // RANKS)
        assert one["last piece"] and one["parts"] == [PART] * RANKS and one["shared"] == 1
    # All ranks are done: nothing has a name any more.
    assert not list(tmp_path.iterdir())


def without_memory(rank: int, folder: str) -> str:
    """Rank 1 has no memory for its part."""
    world = dist.group.WORLD
    assert world is not None
    ranks = Ranks(Context(rank, RANKS, torch.device("cpu"), compat.group_name(world)), world)
    problem = make_problem(ranks.ctx, TOKENS, HIDDEN, Form())
    fallocate = os.posix_fallocate

    def full(descriptor: int, offset: int, nbytes: int) -> None:
        if rank == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        fallocate(descriptor, offset, nbytes)

    memory = HostMemory(Path(folder), lambda address, nbytes: address, lambda address: None)
    with without_cuda(memory), mock.patch("os.posix_fallocate", full), pytest.raises(UnavailableError) as raised:
        HostCopies().prepare(ranks, problem)
    return str(raised.value)


def test_a_rank_without_memory_is_told_by_all_and_no_file_is_left(tmp_path: Path) -> None:
    with GlooRanks(RANKS, timeout=120) as ranks:
        found = ranks.run(without_memory, str(tmp_path))
    assert len(set(found)) == 1 and "no 0 MiB for a rank" in found[0]
    assert not list(tmp_path.iterdir())
