"""How a process that was a rank ends."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End this process, a rank, without finalising Python or the libraries.

    Their destructors may wait for ranks that are gone. And a gloo thread that drops its last reference to a tensor while
    Python finalises aborts the process; DTensor's caches keep the group, and so those threads, alive until then. After a
    success (``code`` 0) exit handlers run, which give back what is shared with other processes.
    """
    if code == 0:
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
