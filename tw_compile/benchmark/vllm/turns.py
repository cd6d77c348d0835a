"""Engines that are started at once, each in processes of its own, and take turns at the traces. Imports no vLLM.

An engine's process has a socket to this process. The engine sends a byte when it is ready and after each of its turns. It waits
for a byte before each turn and before it ends. So only one engine at a time does anything. Another byte ends an engine with the
results that it has.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tw_compile import child
from tw_compile.benchmark.vllm.spec import EngineStart, VllmSpec, job, traces_of
from tw_compile.benchmark.vllm.traces import STOP, TURN, turns
from tw_compile.harness.requests import UsageError
from tw_compile.kernels.collective.wires import EXACT

_CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TW_COMPILE_CACHE_DIR")
"""Empty for every engine, so that starts can be compared."""
_ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
_FIRST_PORT, _PORTS = 21_000, 100
"""The ranks of engine ``i`` of a group try ports from 21000 + 100 ``i`` on. Systems hand out only higher ones, so no other
process gets such a port by chance between vLLM's choice and its use."""
_LOOK = 1.0
"""Seconds after which a process that is waited for is checked: if it has ended, its children may hold its socket open."""


def take_turns(
    group: Sequence[EngineStart],
    spec: VllmSpec,
    config: Any,
    scratch: Path,
    logs: Path | None,
    progress: Callable[[str], None],
) -> tuple[list[dict[str, Any]], bool]:
    """Run ``group``. Returns each engine's results or ``error``, with our ``lines`` of its output, and whether all rounds ran.

    All engines that have a trace run it before the next trace begins. In odd rounds they do so in reverse order, so that no
    engine always follows the same one. An engine that fails is ended, and the others go on. A KeyboardInterrupt after a timed
    round ends the engines with the results that they have by then. An earlier or a second one is raised. ``config``: the
    model's configuration. ``logs``: a folder to keep the engines' output in; without it the output is in ``scratch``.

    Raises:
        UsageError: ``VLLM_PORT`` is set, and is no port.
    """
    running: list[_Process] = []
    port = _first_port()

    def say(who: Sequence[_Process], what: str) -> None:
        labels = ", ".join(process.engine.variant.label for process in who)
        progress(f"{labels}, {group[0].chunk} tokens a step: {what}")

    try:
        for number, engine in enumerate(group):
            running.append(_Process(engine, port + number * _PORTS, spec, config, scratch, logs))
        say(running, "start")
        _wait(running)
        whole = _rounds(running, group, spec, say)
        for process in _alive(running):
            process.send(TURN if whole else STOP)
        for process in _alive(running):
            process.finish()
    finally:
        for process in running:
            process.end()
    return [process.result() for process in running], whole


def _first_port() -> int:
    given = os.environ.get("VLLM_PORT", str(_FIRST_PORT))
    if not given.isdecimal() or not 0 < int(given) < 2**16:
        raise UsageError(f"VLLM_PORT: expected a port, got {given!r}")
    return int(given)


def _rounds(
    running: Sequence[_Process],
    group: Sequence[EngineStart],
    spec: VllmSpec,
    say: Callable[[Sequence[_Process], str], None],
) -> bool:
    """Run all turns of all rounds. Returns False if an interrupt after a timed round ended them."""
    number = 0
    try:
        for number, trace in turns(traces_of(group), spec.repeats):
            if not (turn := [process for process in _alive(running) if trace in process.engine.traces]):
                continue
            say(turn, f"round {number + 1} of {1 + spec.repeats}, {trace.label}")
            for process in reversed(turn) if number % 2 else turn:
                process.send(TURN)
                _wait([process])
    except KeyboardInterrupt:
        if number < 2:  # round 0 warms up
            raise
        return False
    return True


class _Process:
    """The processes of one engine.

    Attributes:
        socket: Our end.
        left: Seconds that the engine may still be waited for. Turns of other engines are not counted.
        failure: Why the engine has ended without a result.
    """

    def __init__(
        self, engine: EngineStart, port: int, spec: VllmSpec, config: Any, scratch: Path, logs: Path | None
    ) -> None:
        self.engine, self.timeout, self.left = engine, spec.timeout, spec.timeout
        self.failure: str | None = None
        name = f"{engine.variant.label}-{engine.chunk}"
        self._place = scratch / name
        self._place.mkdir()
        self._log = (logs or self._place) / f"{name}.log"
        (self._place / "job.json").write_text(json.dumps(job(engine, spec, config)))
        environment = {**os.environ, **_ENVIRONMENT, **engine.variant.environment}
        environment["VLLM_PORT"] = str(port)
        environment |= {cache: str(self._place / cache.lower()) for cache in _CACHES}
        command = [sys.executable, "-m", "tw_compile.benchmark.vllm.engine"]
        command += [str(self._place / "job.json"), str(self._place / "result.json")]
        self.socket, theirs = socket.socketpair()
        line, self._line = multiprocessing.Pipe(duplex=False)
        passed = theirs.fileno(), line.fileno()
        with theirs, line, self._log.open("w") as output:
            self._process = subprocess.Popen(
                [*command, *map(str, passed), str(scratch)],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=passed,
            )

    def send(self, word: bytes) -> None:
        """Send TURN for the next turn, or, after the last turn, for the end. Send STOP for an early end."""
        with contextlib.suppress(ConnectionError):  # the engine has ended, which waiting for it finds out
            self.socket.sendall(word)

    def look(self, readable: bool, seconds: float) -> bool:
        """Whether the engine has answered, after ``seconds`` more of waiting. If not, it may have failed."""
        self.left -= seconds
        if readable:
            with contextlib.suppress(ConnectionError):
                if self.socket.recv(1):
                    return True
        if readable or self._process.poll() is not None:
            self.finish()
            self.failure = self.failure or "vLLM ended early"
        elif self.left <= 0:
            self._fail_late()
        return False

    def finish(self) -> None:
        """Wait for the engine's end."""
        try:
            code = self._process.wait(max(self.left, 0))
        except subprocess.TimeoutExpired:
            self._fail_late()
        else:
            self.failure = f"vLLM ended with {code}" if code else None
            self.end()

    def _fail_late(self) -> None:
        self.failure = f"not finished after {self.timeout:.0f} s"
        self.end()

    def end(self) -> None:
        """End the engine, and the processes that it has left behind, which would hold GPUs' memory."""
        if self.socket.fileno() < 0:  # closed: it was ended, and its process id may be another's
            return
        child.kill_group(self._process.pid)
        self._process.wait()
        self.socket.close()
        self._line.close()

    def result(self) -> dict[str, Any]:
        """The engine's result, or an ``error`` with the lines of its output that name an error."""
        lines = self._log.read_text(errors="replace").splitlines()
        ours = {"lines": list(dict.fromkeys(_own(line) for line in lines if "tw_compile: " in line))}
        if self.failure is not None:
            return ours | {"error": f"{self.failure}: {' ... '.join(_errors(lines))}"}
        result = json.loads((self._place / "result.json").read_text()) | ours
        if result["passes"] != (self.engine.variant.kind == "ours"):
            said = "; ".join(ours["lines"]) or "and said nothing"
            return ours | {"error": f"vLLM ran {'with' if result['passes'] else 'without'} the passes: {said}"}
        wire, wires = self.engine.variant.wire, result["wires"]
        if wire != EXACT and wire not in wires:
            found = ", ".join(f"{name}: {count}" for name, count in wires.items()) or "nothing is fused"
            return ours | {"error": f"no rows travelled in {wire}: {found}"}
        if self.engine.variant.prefetches and not result["prefetching"]:
            return ours | {"error": "no call prefetches anything"}
        return result


def _alive(running: Sequence[_Process]) -> list[_Process]:
    return [process for process in running if process.failure is None]


def _wait(waiting: Sequence[_Process]) -> None:
    """Wait until each engine has answered or failed."""
    while waiting:
        begin = time.monotonic()
        readable, _, _ = select.select([process.socket for process in waiting], [], [], _LOOK)
        seconds = time.monotonic() - begin
        answered = [process for process in waiting if process.look(process.socket in readable, seconds)]
        waiting = [process for process in _alive(waiting) if process not in answered]


def _errors(lines: list[str]) -> list[str]:
    """The first line that names an error, which is the cause, and the last such line. If none does, the last line."""
    named = [line.strip() for line in lines if re.search(r"\w(Error|Exception): ", line)] or lines[-1:]
    return list(dict.fromkeys((*named[:1], *named[-1:])))


def _own(line: str) -> str:
    return line[line.index("tw_compile: ") + len("tw_compile: ") :]
