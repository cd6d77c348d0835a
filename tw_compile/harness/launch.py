"""Start ranks as processes on this machine, and find out how many ranks a launcher has started."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any, NoReturn, TypeVar

from tw_compile.child import Child, end, wait_for_end
from tw_compile.config import whole_number
from tw_compile.harness.requests import INTERRUPTED, RankError, RanksSpec, UsageError
from tw_compile.leave import leave

Progress = Callable[[str], None]
Spec = TypeVar("Spec", bound=RanksSpec)
Entry = Callable[[Spec, int, str, Connection], None]

_GRACE_SECONDS = 5.0
_WHERE = signal.SIGUSR1
_ANSWER_SECONDS = 2.0
"""The time that a rank has to print the stacks of its threads before it is ended."""


def torchrun_world_size() -> int | None:
    """The number of ranks that a launcher has started, including this process; None without a launcher."""
    if "RANK" not in os.environ:
        return None
    text = os.environ.get("WORLD_SIZE", "")
    world_size = whole_number(text)
    if not world_size:
        raise UsageError(f"WORLD_SIZE: expected a launcher's number of ranks beside RANK, got {text!r}")
    return world_size


def spawn_ranks(spec: Spec, progress: Progress, entry: Entry[Spec]) -> dict[str, Any]:
    """Run ``entry`` on ``spec.world_size`` new processes and return what rank 0 found.

    Raises:
        UsageError: The ranks found the request to be impossible.
        RankError: A rank failed, died or did not finish in time; the other ranks have been ended. Its ``so_far`` is what rank 0
            last sent as ``"so far"``. Ctrl-C and SIGTERM raise it, too, if rank 0 has sent anything.
    """
    with tempfile.TemporaryDirectory(prefix="tw_compile_") as scratch, contextlib.ExitStack() as stack:
        stack.enter_context(sigterm_interrupts())
        ranks: list[_Rank] = []
        stack.callback(_end, ranks)
        for rank in range(spec.world_size):
            ours, theirs = multiprocessing.Pipe(duplex=False)
            with theirs:
                ranks.append(_Rank(rank, Child(entry, spec, rank, scratch, theirs, scratch=scratch), ours))
        try:
            return _watch(ranks, spec.timeout, progress)
        except RankError as error:
            error.so_far = ranks[0].so_far
            raise
        except KeyboardInterrupt:
            if ranks[0].so_far is None:
                raise
            raise RankError(INTERRUPTED, ranks[0].so_far) from None


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Have SIGTERM raise KeyboardInterrupt inside of a ``with`` block, as Ctrl-C does.

    So a time limit from outside ends a command's ranks, and the command's results are not lost. If SIGTERM already has a
    handler, nothing changes.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _Rank:
    """The parent's end of one rank."""

    def __init__(self, rank: int, child: Child, messages: Connection) -> None:
        self.rank = rank
        self.child = child
        self.messages = messages
        self.doing = "starting"
        self.so_far: dict[str, Any] | None = None
        self.finished = False

    def receive(self) -> Iterator[tuple[str, Any]]:
        """Every message that has arrived; ``("died", reason)`` when the process has ended without a result or an error."""
        try:
            while self.messages.poll():
                kind, payload = self.messages.recv()
                if kind == "doing":
                    self.doing = payload
                elif kind == "so far":
                    self.so_far = payload
                else:
                    self.finished = True
                yield kind, payload
        except (EOFError, ConnectionError):
            self.child.join(_GRACE_SECONDS)
            if not self.finished:
                self.finished = True
                yield "died", _describe_exit(self.child.exitcode)

    def ask(self) -> None:
        """Have the rank print the stacks of its threads; a rank that has not begun its work yet ends instead."""
        if not self.child.join(0):
            os.kill(self.child.pid, _WHERE)


def _end(ranks: list[_Rank]) -> None:
    """Wait for the ranks to leave if all have finished. Then end those that are still there."""
    if all(rank.finished for rank in ranks):
        for rank in ranks:
            rank.child.join(_GRACE_SECONDS)
    end([rank.child for rank in ranks], _GRACE_SECONDS)
    for rank in ranks:
        rank.messages.close()


def _watch(ranks: list[_Rank], timeout: float, progress: Progress) -> dict[str, Any]:
    deadline = time.monotonic() + timeout
    result: dict[str, Any] | None = None
    failures: list[tuple[_Rank, str, str]] = []
    while any(not rank.finished for rank in ranks):
        left = deadline - time.monotonic()
        if left <= 0:
            if failures:
                break
            unfinished = [rank for rank in ranks if not rank.finished]
            for rank in unfinished:
                rank.ask()
            time.sleep(_ANSWER_SECONDS)
            waiting = "; ".join(f"rank {rank.rank}: {rank.doing}" for rank in unfinished)
            raise RankError(f"no result after {timeout:.0f} s; unfinished: {waiting}")
        wait([rank.messages for rank in ranks if not rank.finished], timeout=min(left, 1.0))
        for rank in ranks:
            for kind, payload in rank.receive() if not rank.finished else ():
                if kind == "doing" and rank.rank == 0 and not failures:
                    progress(payload)
                elif kind == "result" and rank.rank == 0:
                    result = payload
                elif kind in ("usage", "failed", "died"):
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
                    failures.append((rank, kind, payload))
    if failures:
        _raise_cause(failures)
    assert result is not None
    return result


def _raise_cause(failures: list[tuple[_Rank, str, str]]) -> NoReturn:
    """Raise the failure that most likely caused the others, as one rank's end makes the other ranks fail, too.

    A usage error goes first, then a rank that died without a message, then the earliest failure.
    """
    for _, kind, text in failures:
        if kind == "usage":
            raise UsageError(text)
    rank, kind, text = min(failures, key=lambda failure: failure[1] != "died")
    others = [str(other.rank) for other, _, _ in failures if other is not rank]
    then = f"\n(then failed too: rank {', '.join(others)})" if others else ""
    raise RankError(f"rank {rank.rank} {kind} while {rank.doing}: {text.rstrip()}{then}")


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "it closed its connection and did not end"
    if code < 0:
        return f"killed by {signal.Signals(-code).name} (SIGKILL often means out of memory)"
    return f"exit code {code}"


def report_to_parent(messages: Connection, work: Callable[[Progress], dict[str, Any]]) -> None:
    """Send the parent what ``work`` is doing, and then its result or how it failed; end this process.

    On request (:meth:`_Rank.ask`) this process prints the stacks of its threads.
    """
    faulthandler.register(_WHERE)
    try:
        messages.send(("result", work(lambda what: messages.send(("doing", what)))))
        leave(0)
    except UsageError as error:
        last_word = "usage", str(error)
    except BaseException as error:
        last_word = "failed", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    with contextlib.suppress(BrokenPipeError):
        messages.send(last_word)
        leave(1)
    wait_for_end()
