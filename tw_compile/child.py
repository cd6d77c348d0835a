"""Processes that live no longer than the one that started them: ranks, and the engines of ``bench vllm``.

A child leads its own session and process group. Everything that it starts is in that group: Inductor's compile workers, nvcc,
vLLM's workers. So Ctrl-C in a terminal reaches only the parent. A thread of the child reads from a pipe, called the line, even
while the main thread waits for something. The thread ends the group when the parent says so. It also ends the group when the
parent is gone, even by SIGKILL: the kernel then closes the parent's end of the pipe.

The kernel's own mechanism (PR_SET_PDEATHSIG) is tied to the thread that started the child, and that thread may end before its
process does. It ends only the child itself, and leaves no time to clean up.
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
        exitcode: As in multiprocessing; None until :meth:`join` has seen that the child has ended.
    """

    def __init__(self, target: Callable[..., None], *args: Any, scratch: str, daemon: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        theirs, self._line = context.Pipe(duplex=False)
        util.Finalize(self, self._line.close, exitpriority=0)  # else a parent that exits waits for the child first
        # Unpickling imports the target's module, which may import torch for many seconds. The child watches its line first.
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
        """Wait up to ``timeout`` seconds for the child's end; whether it has ended. What it has left behind is then killed."""
        if self.exitcode is None and wait([self._process.sentinel], timeout):
            kill_group(self.pid)  # the child is not reaped yet, so no other process can have its pid
            self._process.join()
            self.exitcode = self._process.exitcode
        return self.exitcode is not None

    def kill(self) -> None:
        """Kill the child and all processes that it has started."""
        self._process.kill()
        kill_group(self.pid)


def end(children: Sequence[Child], grace: float) -> None:
    """Tell all children to end; kill those that still run after ``grace`` seconds."""
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
    """End this process and its whole process group when the parent says so, or when the parent is gone.

    This process must lead the group.

    Args:
        line: File descriptor of the pipe's end for reading, which stays open.
        scratch: A folder of the parent's, which a killed parent can't remove itself.
    """

    def watch() -> None:
        told = os.read(line, 1)
        too_long = threading.Timer(_RELEASE_SECONDS, os.killpg, (0, signal.SIGKILL))
        too_long.daemon = True
        too_long.start()
        if not told:
            # rm has its own session, so it outlives this group. Until the group ends, compile workers may write to the folder.
            with contextlib.suppress(OSError):
                subprocess.Popen(["rm", "-rf", "--", scratch], stderr=subprocess.DEVNULL, start_new_session=True)
        release_semaphores()  # last, as the main thread may still make some
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="tw_compile parent", daemon=True).start()


def wait_for_end() -> NoReturn:
    """Sleep until the thread of :func:`live_with` cleans up and ends this process. For a main thread whose parent is gone."""
    while True:
        time.sleep(60)


def _run(line: Connection, scratch: str, target: bytes, args: tuple[Any, ...]) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a SIGINT from before setsid() went to the parent, too
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD)
    live_with(line.fileno(), scratch)
    pickle.loads(target)(*args)


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Hold back signals that end a command until the ``with`` block ends; a process that starts inside has them blocked."""
    resource_tracker.ensure_running()  # else starting a process would start the tracker, and unblock the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
