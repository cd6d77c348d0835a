"""What ``tests/gpu/killed_rank.py`` calls wrong, and what it refuses."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from gpu import killed_rank
from gpu.killed_rank import judged

from tw_compile.kernels.algorithms import ALGORITHMS

TOLD = "rank 0, CTA 0 gave up waiting for rank 2 at barrier 1 of a launch (8 (CTA, peer) pairs in all; silent ranks: 2). That"
ALL = TOLD.replace("waiting for rank 2", "waiting for rank 1").replace("ranks: 2", "ranks: 1, 2")
KILLED = -signal.SIGKILL


def test_all_kernels_through_host_memory_are_tried() -> None:
    there = {checked.name for entry in ALGORITHMS if entry.transport == "host" for checked in entry.checked}
    assert there == set(killed_rank.KERNELS) and len(there) == 3


@pytest.mark.parametrize(
    ("codes", "messages", "left", "wrong"),
    [
        ([0, 0, KILLED], {0: TOLD, 1: TOLD}, [], []),
        ([0, 0, KILLED], {0: ALL, 1: TOLD}, [], []),
        ([0, 0, 0], {0: TOLD, 1: TOLD}, [], ["rank 2 ended with 0, not by SIGKILL"]),
        ([0, None, KILLED], {0: TOLD, 1: "nothing"}, [], ["rank 1 ended with None"]),
        ([0, 0, KILLED], {0: TOLD, 1: "nothing was reported"}, [], ["rank 1 reported: nothing was reported"]),
        (
            [0, 0, KILLED],
            {0: TOLD, 1: TOLD.replace("ranks: 2", "ranks: 0")},
            [],
            ["rank 1 reported: rank 0, CTA 0"],
        ),
        ([0, 0, KILLED], {0: TOLD, 1: f"{TOLD}\nhidden: not finite"}, [], ["rank 1 reported: rank 0, CTA 0"]),
        ([0, 0, KILLED], {0: TOLD, 1: TOLD}, ["tw_compile_1"], ["/dev/shm still has tw_compile_1"]),
    ],
)
def test_survivors_name_the_rank_that_is_gone_and_no_file_stays(
    codes: list[int | None], messages: dict[int, str], left: list[str], wrong: list[str]
) -> None:
    found = judged(3, codes, messages, left)
    assert len(found) == len(wrong) and all(line.startswith(begin) for line, begin in zip(found, wrong, strict=True))


def test_a_file_that_stays_is_left_and_one_that_goes_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(killed_rank, "SHARED_MEMORY", tmp_path)
    for name in ("tw_compile-old", "tw_compile-ours", "tw_compile-passing", "cuda.shm.0.4242.1"):
        (tmp_path / name).touch()
    passing = tmp_path / "tw_compile-passing"
    monkeypatch.setattr(killed_rank.time, "sleep", lambda seconds: passing.unlink(missing_ok=True))
    assert killed_rank.left_since({"tw_compile-old"}, 0.2) == ["tw_compile-ours"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--world-size=1"], "--world-size: expected at least 2, got 1"),
     (["--world-size=3", "--gpus=4"], "--gpus: expected 1 to 3, the world size, got 4")],
)  # fmt: skip
def test_bad_numbers_are_refused_before_a_rank_starts(arguments: list[str], said: str) -> None:
    command = [sys.executable, str(Path(killed_rank.__file__)), *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 2 and said in finished.stderr
