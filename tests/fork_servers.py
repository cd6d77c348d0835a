"""Processes that tests start, forked from servers that have imported torch: an import takes seconds, a fork none.

``tw_compile.child`` starts processes by spawning. Here its processes come from two servers in turn, so that two ranks order
their sets of strings in different ways, as spawned ones do. All else is as there: targets and arguments are pickled, modules
but torch's are imported anew, and variables of the environment are those of the process that starts the child. Commands that
tests start as processes of their own do spawn, see ``test_child.py``.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.forkserver import ForkServer
from types import SimpleNamespace
from typing import Any
from unittest import mock

IMPORTED = ["torch", "torch.distributed", "torch._dynamo", "torch._inductor.compile_fx"]
_SERVERS = (ForkServer(), ForkServer())
_TURNS = itertools.cycle(_SERVERS)


@contextmanager
def children_are_forked() -> Iterator[None]:
    """Children of this process come from servers, which start with the first child and end with this process."""
    from tw_compile import child

    for server in _SERVERS:
        server.set_forkserver_preload(IMPORTED)
    with mock.patch.object(child, "multiprocessing", SimpleNamespace(get_context=lambda method: ForkContext())):
        yield


class ForkedProcess(ForkServerProcess):
    def __init__(self, *, target: Callable[..., None], args: tuple[Any, ...], daemon: bool) -> None:
        super().__init__(target=run_in_environment, args=(dict(os.environ), target, args), daemon=daemon)

    @staticmethod
    def _Popen(process: ForkedProcess) -> popen_forkserver.Popen:
        with mock.patch.object(forkserver, "connect_to_new_process", next(_TURNS).connect_to_new_process):
            return popen_forkserver.Popen(process)


class ForkContext(ForkServerContext):
    Process = ForkedProcess


def run_in_environment(variables: dict[str, str], target: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    target(*args)
