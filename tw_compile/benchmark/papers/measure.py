"""Ask the benchmarks for what exhibits need, within a time, and keep what they found. Imports no torch before it measures."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from tw_compile.benchmark.papers.timed import Timed, parse
from tw_compile.environment import peer_access
from tw_compile.files import read_text, write_whole
from tw_compile.harness.requests import INTERRUPTED, RankError, UsageError

BENCHES = {
    "bench kernel": ("tw_compile.benchmark.run", "tw_compile.benchmark.results"),
    "bench layer": ("tw_compile.benchmark.layer.run", "tw_compile.benchmark.layer.results"),
    "bench ffn": ("tw_compile.benchmark.layer.ffn", "tw_compile.benchmark.layer.ffn"),
}
"""The module that has ``run``, and the one that has ``as_csv``."""
LEAST_SECONDS = 30.0
"""Less time is not enough to start ranks and measure anything."""
HERE = "measured here"


@dataclass(frozen=True)
class Request:
    """A request to one of ``BENCHES``, with its own spec. The benchmark takes about ``minutes`` minutes.

    ``depends_on``: what else its rows depend on, in words: measured halves of the user's own device profile.
    """

    bench: str
    spec: Any
    gpus: int
    minutes: float
    depends_on: tuple[str, ...] = ()

    def digest(self, made_with: str) -> str:
        """A hash that is the same for all parts of a request that are measured with the same machine and sources."""
        values = asdict(self.spec)
        for part in ("tokens", "timeout"):
            del values[part]
        key = [self.bench, values, made_with, *self.depends_on]
        return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:10]


@dataclass(frozen=True)
class Measured:
    """Rows that were measured here, and by request why some or all rows are missing."""

    rows: list[Timed]
    missing: dict[Request, str]


def through_host() -> bool:
    """Whether ranks on this machine's GPUs exchange rows through host memory: kernels can't, or may not, use peers' memory."""
    import torch

    from tw_compile.kernels.collective.peer_access import link_obstacle

    return not peer_access() or link_obstacle(range(torch.cuda.device_count())) is not None


def made_with() -> str:
    """GPUs, link, versions and sources: what must not change between two parts of one measurement."""
    import torch

    from tw_compile.harness.start import all_versions

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    kept = {name: value for name, value in all_versions("cuda").items() if name not in ("date", "commit")}
    return json.dumps([names, through_host(), kept])


def files_of(request: Request, folder: Path, key: str) -> list[Path]:
    """The files that earlier calls have kept for the request, in order."""
    return sorted(folder.glob(f"{request.bench.replace(' ', '-')}-{request.digest(key)}-*.csv"))


def left_of(request: Request, files: Iterable[Path]) -> Any:
    """The request's spec with only the tokens that no file has rows of; None where the files have all."""
    done = {int(row["tokens"]) for file in files for row in csv.DictReader(io.StringIO(read_text(file, "--out")))}
    tokens = tuple(count for count in request.spec.tokens if count not in done)
    return replace(request.spec, tokens=tokens) if tokens else None


def measure(
    requests: Sequence[Request],
    gpus: int,
    folder: Path,
    minutes: float,
    key: str,
    progress: Callable[[str], None],
    resume: bool = True,
    clock: Callable[[], float] = time.monotonic,
    host: bool = False,
) -> Measured:
    """Measure what is not in ``folder`` yet, short requests first. Rows are kept there after each benchmark.

    ``resume``: whether rows of earlier calls count; if not, they are deleted. ``host``: see :func:`through_host`.
    """
    deadline = clock() + 60.0 * minutes
    missing: dict[Request, str] = {}
    wanted = list(dict.fromkeys(requests))
    for file in () if resume else [file for request in wanted for file in files_of(request, folder, key)]:
        file.unlink()
    for request in sorted(wanted, key=lambda request: request.minutes):
        if gpus < request.gpus:
            missing[request] = f"it needs {request.gpus} GPU{'s' * (request.gpus > 1)}, and torch finds {gpus} here"
            continue
        spec = left_of(request, files_of(request, folder, key))
        if spec is None:
            continue
        seconds = deadline - clock()
        if seconds < LEAST_SECONDS:
            missing[request] = "--minutes were over before it; the same command goes on from there"
            continue
        missing |= _measure(request, replace(spec, timeout=min(spec.timeout, seconds)), folder, key, progress)
    rows = []
    for request in wanted:
        for file in files_of(request, folder, key):
            found = parse(read_text(file, "--out"), str(file), HERE, "--out")
            rows += [replace(row, through_host=row.through_host or host) for row in found]
    return Measured(rows, missing)


def _measure(
    request: Request, spec: Any, folder: Path, key: str, progress: Callable[[str], None]
) -> dict[Request, str]:
    """Run one benchmark and keep its rows. Returns why rows are missing, if some are."""
    run, results = (import_module(module) for module in BENCHES[request.bench])
    try:
        report = run.run(spec, lambda what: progress(f"{request.bench}: {what}"))
    except (RankError, UsageError) as error:
        return {request: str(error).splitlines()[0]}
    number = len(files_of(request, folder, key)) + 1
    name = f"{request.bench.replace(' ', '-')}-{request.digest(key)}-{number:03d}.csv"
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / name, results.as_csv(report))
    if report["incomplete"] == INTERRUPTED:
        raise KeyboardInterrupt  # rows are kept, and no further benchmark begins
    return {} if report["incomplete"] is None else {request: str(report["incomplete"]).splitlines()[0]}
