"""How a process that was a rank ends."""

from __future__ import annotations

import atexit
import os
import sys
from multiprocessing import util
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End this process, a rank, without finalising Python or the libraries.

    The libraries' destructors may wait for ranks that are gone. Also, a gloo thread that drops its last reference to a tensor
    while Python finalises aborts the process. DTensor's caches keep the group, and so these threads, alive until then.

    After a success (``code`` 0) all exit handlers run; they release what is shared with other processes. After a failure only
    the exit handlers of multiprocessing run, as they wait for no other process.
    """
    if code == 0:
        atexit._run_exitfuncs()
    else:
        release_semaphores()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def release_semaphores() -> None:
    """Unlink this process's named semaphores, as its exit would.

    Otherwise multiprocessing's resource tracker, which ranks share with the process that started them, unlinks them and
    warns of a leak. A rank has a named semaphore as soon as any code makes a tqdm progress bar; torch.fx's interpreter does.
    """
    util._run_finalizers(0)  # type: ignore[attr-defined]
