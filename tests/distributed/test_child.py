"""Nothing that a command started outlives it, however it ends: by Ctrl-C, by SIGTERM, by SIGKILL.

Commands run as processes, with ranks and engines that sleep. Each of these notes the process it has started for itself, as
Inductor does for its compile workers, and holds a semaphore, as any that makes a progress bar of tqdm.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tw_compile.harness import launch
from tw_compile.harness.requests import RankError
from tw_compile.runner.spec import RunSpec

TESTS = str(Path(__file__).parents[1])
ASLEEP = """
import multiprocessing, os, subprocess, sys, time

def asleep(*args):
    own = multiprocessing.get_context("spawn").RLock()
    worker = subprocess.Popen(["sleep", "60"])
    with open("diary", "a") as diary:
        diary.write(f"{os.getpid()} {worker.pid}\\n")
    time.sleep(60)
"""
RUN = f"""{ASLEEP}
if __name__ == "__main__":
    from tw_compile.cli import main
    from tw_compile.runner import ranks

    ranks.run_in_process_group = asleep
    main()
"""
GLOO = f"""{ASLEEP}
if __name__ == "__main__":
    from tw_compile.testing import gloo

    gloo.serve = asleep
    with gloo.GlooRanks(2) as ranks:
        ranks.run(print)
"""
CHECKS = f"""{ASLEEP}
if __name__ == "__main__":
    from gpu.checks import run

    run.run_rank = asleep
    print(run.run_checks(2, 2, ["push"], 60))
"""
ENGINES = """
import tempfile
from pathlib import Path
from types import SimpleNamespace
from tw_compile.benchmark.vllm.spec import VllmSpec, engines
from tw_compile.benchmark.vllm.turns import take_turns

spec = VllmSpec("tiny-llama", 2, "bfloat16", (64,), (1,), together=True, only=("off", "fuse"))
with tempfile.TemporaryDirectory(prefix="tw_compile_") as scratch:
    take_turns(engines(spec, scratch), spec, SimpleNamespace(vocab_size=97), Path(scratch), None, print)
"""
RUN_ARGUMENTS = ["run", "--device", "cpu", "--tp", "2"]
SPEC = RunSpec(model="tiny-llama", world_size=2, device="cpu", tokens=(8,), dtype="bfloat16", timeout=60)


@contextlib.contextmanager
def started(folder: Path, program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The program, when two processes that it has started sleep; alone in its process group, as in a terminal."""
    (folder / "program.py").write_text(program)
    (folder / "vllm.py").write_text(f"{ASLEEP}\nSamplingParams, LLM = None, lambda **given: asleep()")
    (folder / "scratch").mkdir()
    (folder / "diary").touch()
    command = subprocess.Popen(
        [sys.executable, "program.py", *arguments],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder / "scratch"), "PYTHONPATH": os.pathsep.join([str(folder), TESTS])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    try:
        deadline = time.monotonic() + 50
        while len(noted(folder)) < 4:
            assert command.poll() is None, command.communicate()
            assert time.monotonic() < deadline, "the ranks do not start"
            time.sleep(0.05)
        assert len(list((folder / "scratch").iterdir())) == 1
        yield command
    finally:
        for pid in (command.pid, *noted(folder)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        command.communicate()


def noted(folder: Path) -> list[int]:
    """Every process that has come to its sleep, and its worker."""
    return [int(pid) for pid in (folder / "diary").read_text().split()]


def left(folder: Path, seconds: float) -> list[int]:
    """Which of them are still there after so long."""
    deadline = time.monotonic() + seconds
    while (pids := [pid for pid in noted(folder) if runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return pids


def runs(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path("/proc", str(pid), "status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.full
@pytest.mark.timeout(60)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_command_and_its_ranks_with_nothing_to_complain_of(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with started(tmp_path, RUN, *RUN_ARGUMENTS) as command:
        os.killpg(command.pid, number)
        shown, errors = command.communicate(timeout=20)
        assert (command.returncode, errors) == (code, "")
        assert "starting 2 ranks" in shown
        assert not left(tmp_path, 0.5)
    assert not list((tmp_path / "scratch").iterdir())


@pytest.mark.full
@pytest.mark.timeout(60)
def test_checks_that_are_terminated_report_how_far_they_came(tmp_path: Path) -> None:
    with started(tmp_path, CHECKS) as checks:
        checks.terminate()
        shown, errors = checks.communicate(timeout=20)
        assert (checks.returncode, errors) == (0, "")
        assert "'push': {'outcome': 'rank 0: did not start\\nrank 1: did not start'" in shown
        assert not left(tmp_path, 0.5)
    assert not list((tmp_path / "scratch").iterdir())


@pytest.mark.full
@pytest.mark.timeout(60)
def test_an_interrupt_ends_ranks_of_tests_with_no_complaint_of_theirs(tmp_path: Path) -> None:
    with started(tmp_path, GLOO) as tests:
        os.killpg(tests.pid, signal.SIGINT)
        _, errors = tests.communicate(timeout=20)
        assert errors.count("Traceback") == 1 and errors.endswith("KeyboardInterrupt\n") and "leaked" not in errors
        assert not left(tmp_path, 0.5)
    assert not list((tmp_path / "scratch").iterdir())


FORGETFUL = f"""{ASLEEP}
if __name__ == "__main__":
    from tw_compile.child import Child

    os.mkdir(f"{{os.environ['TMPDIR']}}/own")
    forgotten = [Child(asleep, scratch=f"{{os.environ['TMPDIR']}}/own") for _ in range(2)]
    input()
"""


@pytest.mark.timeout(60)
def test_a_parent_that_exits_ends_children_that_it_has_not_ended(tmp_path: Path) -> None:
    with started(tmp_path, FORGETFUL) as parent:
        _, errors = parent.communicate("\n", timeout=10)
        assert (parent.returncode, errors) == (0, "")
        assert not left(tmp_path, 0.5)


@pytest.mark.full
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("program", "arguments"),
    [(RUN, RUN_ARGUMENTS), (GLOO, []), (CHECKS, []), (ENGINES, [])],
    ids=["run", "gloo", "checks", "vllm"],
)
def test_ranks_end_when_what_started_them_is_killed(tmp_path: Path, program: str, arguments: list[str]) -> None:
    with started(tmp_path, program, *arguments) as command:
        command.kill()
        _, errors = command.communicate(timeout=10)
        assert not left(tmp_path, 5)
        assert errors == ""
        deadline = time.monotonic() + 5
        while list((tmp_path / "scratch").iterdir()) and time.monotonic() < deadline:
            time.sleep(0.05)
    assert not list((tmp_path / "scratch").iterdir())


def _dies(spec: RunSpec, rank: int, scratch: str, messages: object) -> None:
    worker = subprocess.Popen(["sleep", "60"])
    with Path(str(spec.trace)).open("a") as diary:
        diary.write(f"{os.getpid()} {worker.pid}\n")
    os.kill(os.getpid(), signal.SIGKILL) if rank else time.sleep(60)


@pytest.mark.full
@pytest.mark.timeout(60)
def test_what_a_rank_that_dies_has_started_ends_with_the_others(tmp_path: Path) -> None:
    (tmp_path / "diary").touch()
    spec = RunSpec("tiny-llama", 2, "cpu", (8,), "bfloat16", timeout=30, trace=str(tmp_path / "diary"))
    with pytest.raises(RankError, match="rank 1 died"):
        launch.spawn_ranks(spec, lambda what: None, _dies)
    assert noted(tmp_path) and not left(tmp_path, 0.5)
