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

from tw_compile.kernels.collective import host_memory, slot
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


def no_room_in(folder: str | Path) -> Any:
    """Files of that folder get no memory, as in a container with a small /dev/shm. Files without a name do."""
    fallocate = os.posix_fallocate

    def full(descriptor: int, offset: int, nbytes: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(folder):
            raise OSError(28, "No space left on device")
        fallocate(descriptor, offset, nbytes)

    return mock.patch("os.posix_fallocate", full)


def without_names() -> int:
    """How many files without a name this process has open. A mapping has one of its own."""
    return sum("memfd:tw_compile" in os.path.realpath(link) for link in Path("/proc/self/fd").iterdir())


def words_where_some_have_no_room(rank: int, folder: str, without_room: list[int]) -> tuple[list[int], list[str], int]:
    with no_room_in(folder if rank in without_room else "/nowhere"):
        return *words_of_all(rank, folder), without_names()


@pytest.mark.parametrize("without_room", [[1], [0, 1, 2]])
def test_ranks_without_room_share_files_without_a_name(
    ranks: GlooRanks, tmp_path: Path, without_room: list[int]
) -> None:
    for read, left, opened in ranks.run(words_where_some_have_no_room, str(tmp_path), without_room):
        assert read == [1, 2, 3] * len(SIZES)
        assert (left, opened) == ([], 0)


def obstacle_of_closed_processes(rank: int, folder: str) -> tuple[str | None, list[str], int]:
    """What is said where ranks can't open each other's files without a name, as in containers of their own."""
    state, opened = state_on(rank, memory_in(folder)), os.open

    def closed(file: Path, *rest: Any) -> int:
        if str(file).startswith("/proc/"):
            raise PermissionError(13, "Permission denied", str(file))
        return opened(file, *rest)

    unsynchronised = mock.patch("torch.cuda.synchronize", lambda device: None)  # rank 1 alone gets there
    with no_room_in(folder if rank == 1 else "/nowhere"), mock.patch("os.open", closed), unsynchronised:
        assert grow(state, 0, SIZES) is None
    dist.barrier()
    return state.obstacle, os.listdir(folder), without_names()


def test_ranks_that_can_not_open_them_say_so_and_what_helps(ranks: GlooRanks, tmp_path: Path) -> None:
    answers = ranks.run(obstacle_of_closed_processes, str(tmp_path))
    assert len({obstacle for obstacle, _, _ in answers}) == 1
    for obstacle, left, opened in answers:
        assert obstacle is not None and obstacle.startswith("rank 0: host memory: no 0 MiB for a rank in ")
        assert "--shm-size" in obstacle and "is not open to another rank" in obstacle
        assert (left, opened) == ([], 0)


def of_a_process_of_the_same_number(rank: int, folder: str) -> tuple[str | None, int]:
    """Ranks whose containers have processes of their own, with the same numbers: each finds a file of its own there."""
    state, readlink, mine = state_on(rank, memory_in(folder)), os.readlink, os.getpid()

    def own(path: str) -> str:
        return (
            str(path).replace(f"/proc/{path.split('/')[2]}/", f"/proc/{mine}/")
            if str(path).startswith("/proc/")
            else path
        )

    opened = os.open
    unsynchronised = mock.patch("torch.cuda.synchronize", lambda device: None)
    with (
        no_room_in(folder),
        mock.patch("os.readlink", lambda path: readlink(own(path))),
        mock.patch("os.open", lambda path, *rest: opened(own(path), *rest)),
        unsynchronised,
    ):
        assert grow(state, 0, SIZES) is None
    return state.obstacle, without_names()


def test_a_number_that_means_another_file_is_found_out(ranks: GlooRanks, tmp_path: Path) -> None:
    for obstacle, opened in ranks.run(of_a_process_of_the_same_number, str(tmp_path)):
        assert obstacle is not None and "is not open to another rank" in obstacle
        assert "expected the file tw_compile-" in obstacle and "of another process" in obstacle
        assert opened == 0


def test_a_file_without_a_name_that_can_not_be_made_names_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "memfd_create", refused)
    with pytest.raises(RuntimeError, match=r"none is not there: .*; without a file there: \[Errno 13\]"):
        memory_in(tmp_path / "none").allocate({"a": 65536}, torch.device("cpu"))


def test_no_file_stays_if_anything_else_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, mapped = [], host_memory._mapped

    def second_fails(descriptor: int, nbytes: int) -> torch.Tensor:
        made.append(descriptor)
        if len(made) == 2:
            raise ValueError("no addresses")
        return mapped(descriptor, nbytes)

    monkeypatch.setattr(host_memory, "_mapped", second_fails)
    with pytest.raises(ValueError, match="no addresses"):
        memory_in(tmp_path).allocate({"a": 65536, "b": 65536}, torch.device("cpu"))
    assert len(made) == 2 and not list(tmp_path.iterdir())


def test_a_python_without_memfd_create_says_what_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(RuntimeError, match=r"^host memory: .* is not there: .*; this Python has no memfd_create"):
        memory_in(tmp_path / "none").allocate({"a": 65536}, torch.device("cpu"))


def test_a_machine_without_shared_memory_has_files_without_a_name(tmp_path: Path) -> None:
    forgotten: list[int] = []
    memory = HostMemory(tmp_path / "none", lambda address, nbytes: address, forgotten.append)
    tensors = memory.allocate({"a": 65536}, torch.device("cpu"))
    assert without_names() == 2 and tensors["a"].numel() == 65536 and not tensors["a"].any()
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd/")]
    modes = {stat.S_IMODE(os.stat(link).st_mode) for link in links if "memfd:tw_compile" in os.path.realpath(link)}
    assert modes == {0o600}
    address = memory.address(tensors["a"])
    memory.settle(tensors)
    assert without_names() == 1  # the mapping's own
    tensors["a"].fill_(7)  # there still
    del tensors
    assert forgotten == [address] and without_names() == 0


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

    def seen(file: str | Path, *rest: Any) -> int:
        """A container sees its own folder alone."""
        if not Path(file).is_relative_to(own):
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
    other = {"a": (host_memory._File(str(file)), 2 * 65536)}
    state: Any = SimpleNamespace(rank=0, group=None)
    with (
        mock.patch("tw_compile.kernels.collective.host_memory.gather", lambda own, group: [own, other]),
        pytest.raises(RuntimeError, match=r"expected 131072 bytes of user \d+, got 65536"),
    ):
        memory.share(tensors, state)
    memory.settle(tensors)
    assert list(tmp_path.iterdir()) == []
