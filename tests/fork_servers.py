"""Processes that tests start, forked from servers that have imported torch and transformers: a fork takes no seconds.

``tw_compile.child`` starts processes by spawning. Here its processes come from two servers in turn, so that two ranks order
their sets of strings in different ways, as spawned ones do. All else is as there: targets and arguments are pickled, other
modules are imported anew, and variables of the environment are those of the process that starts the child. Commands that
tests start as processes of their own do spawn, see ``test_child.py``.
"""

from __future__ import annotations

import itertools
import os
import runpy
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.forkserver import ForkServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from collector import collect_rarely

IMPORTED = [
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    # What a first compilation and a first model import beyond these.
    "torch.distributed.tensor.experimental",
    "torch.export._trace",
    "torch.utils.cpp_extension",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
]
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
    collect_rarely()
    target(*args)


def run_script(folder: Path, script: Path, *arguments: str, ranks: int = 1, seconds: float = 300.0) -> str:
    """What a script prints that runs in ``folder``: by itself, or on several ranks with the variables of torchrun.

    Each is a process of its own, forked from a server, so torch and tw_compile are imported already. Returns both streams of
    all ranks, which must end with 0.
    """
    from tw_compile.child import Child, end

    output, scratch = folder / f"{script.stem}.output", folder / f"{script.stem}.scratch"
    scratch.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    children = []
    for rank in range(ranks):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks} if ranks > 1 else {}
        variables = {"OMP_NUM_THREADS": "1", **address, **{name: str(value) for name, value in place.items()}}
        command = (str(script), *arguments)
        children.append(Child(_run_main, folder, command, variables, output, scratch=str(scratch)))
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(child.exitcode is None for child in children):
        if any([child.join(0.1) and child.exitcode != 0 for child in children]):
            break
    end(children, 2.0)
    text = output.read_text() if output.exists() else ""
    assert [child.exitcode for child in children] == [0] * ranks, text
    return text


def _run_main(folder: Path, command: tuple[str, ...], variables: dict[str, str], output: Path) -> None:
    os.environ.update(variables)
    os.chdir(folder)
    with output.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = list(command)
    sys.path.insert(0, os.path.dirname(command[0]))
    runpy.run_path(command[0], run_name="__main__")
