"""Host memory that ranks share: its files, what is left of them, and what is said where it can't be had."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tw_compile.kernels.collective import slot
from tw_compile.kernels.collective.host_memory import HostMemory
from tw_compile.kernels.collective.slot import OUTBOX, WORDS, GroupState, grow
from tw_compile.kernels.transports.selection import Selector
from tw_compile.testing import GlooRanks

RANKS = 3
SIZES = {OUTBOX: 200_000, WORDS: 4096}


@pytest.fixture(scope="module")
def ranks() -> Iterator[GlooRanks]:
    with GlooRanks(RANKS, timeout=120) as started:
        yield started


def memory_in(folder: str | Path) -> HostMemory:
    """Without CUDA: memory is reached where it is mapped."""
    return HostMemory(Path(folder), lambda address, nbytes: address, lambda address: None)


def state_on(rank: int, memory: HostMemory) -> GroupState:
    group: Any = dist.group.WORLD
    return GroupState("g", group, torch.device("cpu"), rank, RANKS, Selector((), "host"), memory=memory, instead="nccl")


def grown(rank: int, state: GroupState) -> slot.Slot | None:
    with mock.patch("torch.cuda.synchronize", lambda device: dist.barrier()):
        return grow(state, 0, SIZES)


def words_of_all(rank: int, folder: str) -> tuple[list[int], list[str]]:
    """Each rank writes its number to its own parts; what it then reads in everybody's, and the files that are left."""
    made = grown(rank, state_on(rank, memory_in(folder)))
    assert made is not None
    read = []
    for name in SIZES:
        made.buffers[name].tensor.fill_(rank + 1)
        dist.barrier()
        for address in made.buffers[name].table[:RANKS].tolist():
            parts = made.buffers[name].handle
            read.append(next(int(part[-1]) for part in parts if part.data_ptr() == address))
        dist.barrier()
    return read, os.listdir(folder)


def test_ranks_read_what_the_others_write_and_leave_no_file(ranks: GlooRanks, tmp_path: Path) -> None:
    for read, left in ranks.run(words_of_all, str(tmp_path)):
        assert read == [1, 2, 3] * len(SIZES)
        assert left == []


def obstacle_with(rank: int, folder: str, full_rank: int | None, apart: bool) -> tuple[str | None, list[str]]:
    own = Path(folder) / str(rank if apart else 0)
    own.mkdir(exist_ok=True)
    state = state_on(rank, memory_in(own))
    fallocate = os.posix_fallocate

    def full(descriptor: int, offset: int, nbytes: int) -> None:
        if rank == full_rank:
            raise OSError(28, "No space left on device")
        fallocate(descriptor, offset, nbytes)

    opened = os.open

    def seen(file: Path, *rest: Any) -> int:
        """A container sees its own folder alone."""
        if not file.is_relative_to(own):
            raise FileNotFoundError(2, "No such file or directory", str(file))
        return opened(file, *rest)

    with mock.patch("os.posix_fallocate", full), mock.patch("os.open", seen):
        assert grown(rank, state) is None
    dist.barrier()
    return state.obstacle, os.listdir(own)


def test_a_full_folder_is_said_with_its_size_by_all_ranks(ranks: GlooRanks, tmp_path: Path) -> None:
    answers = ranks.run(obstacle_with, str(tmp_path), 1, False)
    assert len({obstacle for obstacle, _ in answers}) == 1
    obstacle, left = answers[0]
    assert obstacle is not None and obstacle.startswith("rank 1: host memory: no ") and "--shm-size" in obstacle
    assert left == []


def test_ranks_that_do_not_share_a_folder_say_so(ranks: GlooRanks, tmp_path: Path) -> None:
    answers = ranks.run(obstacle_with, str(tmp_path), None, True)
    for obstacle, left in answers:
        assert obstacle is not None and "do not share" in obstacle
        assert left == []


def test_files_are_their_users_alone_and_memory_is_given_back(tmp_path: Path) -> None:
    forgotten: list[int] = []
    memory = HostMemory(tmp_path, lambda address, nbytes: address, forgotten.append)
    tensors = memory.allocate({"a": memory.capacity_for(1)}, torch.device("cpu"))
    (file,) = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and file.stat().st_size == tensors["a"].numel() == 65536
    assert not tensors["a"].any()
    address = memory.address(tensors["a"])
    memory.settle(tensors)
    assert not file.exists() and forgotten == []
    tensors["a"].fill_(7)  # there still
    del tensors
    assert forgotten == [address]


def test_a_file_that_is_not_as_large_as_was_said_is_refused(tmp_path: Path) -> None:
    memory = memory_in(tmp_path)
    tensors = memory.allocate({"a": 65536}, torch.device("cpu"))
    (file,) = tmp_path.iterdir()
    other = {"a": (str(file), 2 * 65536)}
    state: Any = SimpleNamespace(rank=0, group=None)
    with (
        mock.patch("tw_compile.kernels.collective.host_memory.gather", lambda own, group: [own, other]),
        pytest.raises(RuntimeError, match=r"expected 131072 bytes of user \d+, got 65536"),
    ):
        memory.share(tensors, state)
    memory.settle(tensors)
    assert list(tmp_path.iterdir()) == []
