"""Processes that live no longer than the one that started them: ranks, and the engines of ``bench vllm``.

A child leads a session and process group of its own, with all that it starts: Inductor's compile workers, nvcc, vLLM's workers.
So Ctrl-C in a terminal reaches the parent alone. A thread of the child reads from a pipe, the line, whatever its main thread
waits for. It ends the group when the parent says so, or when the kernel has closed the other end because the parent is gone,
even by SIGKILL.

The kernel's own means (PR_SET_PDEATHSIG) is tied to the thread that started the child, which may end before its process does;
it ends nothing but the child, and leaves no time to clean up.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker, util
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

from tw_compile.leave import release_semaphores

_HELD = (signal.SIGINT, signal.SIGTERM)
_RELEASE_SECONDS = 2.0


class Child:
    """A new Python process that runs ``target(*args)``, which are pickled.

    Args:
        scratch: A folder of the parent's, which the child removes when the parent is gone.
        daemon: Such a child can't start processes with multiprocessing. A parent that exits doesn't wait for it.

    Attributes:
        exitcode: As in multiprocessing; None until :meth:`join` has seen that it has ended.
    """

    def __init__(self, target: Callable[..., None], *args: Any, scratch: str, daemon: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        theirs, self._line = context.Pipe(duplex=False)
        util.Finalize(self, self._line.close, exitpriority=0)  # a parent that exits would first wait for the child
        # The target's module, which may import torch for many seconds, is imported when the child already watches its line.
        pickled = pickle.dumps(target)
        self._process = context.Process(target=_run, args=(theirs, scratch, pickled, args), daemon=daemon)
        self.exitcode: int | None = None
        with theirs, _signals_held():
            self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def tell_to_end(self) -> None:
        with contextlib.suppress(OSError):  # it has ended already
            self._line.send_bytes(b"")
        self._line.close()

    def join(self, timeout: float) -> bool:
        """Wait up to so many seconds for its end; whether it has ended. What it has left behind is killed."""
        if self.exitcode is None and wait([self._process.sentinel], timeout):
            kill_group(self.pid)  # while it is not waited for its number can't be another's
            self._process.join()
            self.exitcode = self._process.exitcode
        return self.exitcode is not None

    def kill(self) -> None:
        """The child and all that it has started."""
        self._process.kill()
        kill_group(self.pid)


def end(children: Sequence[Child], grace: float) -> None:
    """Have all end at once; those that still run after ``grace`` seconds are killed."""
    for child in children:
        child.tell_to_end()
    deadline = time.monotonic() + grace
    for child in children:
        if not child.join(max(0.0, deadline - time.monotonic())):
            child.kill()
            child.join(grace)


def kill_group(leader: int) -> None:
    """Kill the processes of a group, also those that its leader has left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def live_with(line: int, scratch: str) -> None:
    """From now on this process, which leads a process group, ends with all of it as its parent says, or when that is gone.

    Args:
        line: File descriptor of a pipe that can be read, which stays open.
        scratch: A folder of the parent's, which can't remove it when it has been killed.
    """

    def watch() -> None:
        told = os.read(line, 1)
        too_long = threading.Timer(_RELEASE_SECONDS, os.killpg, (0, signal.SIGKILL))
        too_long.daemon = True
        too_long.start()
        if not told:
            # By a process that goes on when this group is gone: until then compile workers may write to the folder.
            with contextlib.suppress(OSError):
                subprocess.Popen(["rm", "-rf", "--", scratch], stderr=subprocess.DEVNULL, start_new_session=True)
        release_semaphores()  # last, as the main thread may still make some
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="tw_compile parent", daemon=True).start()


def wait_for_end() -> NoReturn:
    """For a main thread that finds its parent gone: the thread of :func:`live_with` ends this process, and cleans up."""
    while True:
        time.sleep(60)


def _run(line: Connection, scratch: str, target: bytes, args: tuple[Any, ...]) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # one that came before there was the session is the parent's, too
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD)
    live_with(line.fileno(), scratch)
    pickle.loads(target)(*args)


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Signals that end a command come before or after; a process that starts meanwhile has them blocked."""
    resource_tracker.ensure_running()  # or starting a process would start it, and unblock them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
