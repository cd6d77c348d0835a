"""Start the ranks of a benchmark and put what they found into a report."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any
from unittest import mock

from tw_compile.benchmark.contenders import contenders
from tw_compile.benchmark.results import SCHEMA_VERSION
from tw_compile.benchmark.spec import LINK_GB_PER_S, BenchSpec
from tw_compile.benchmark.worker import rank_process
from tw_compile.runner.launch import Progress, spawn_ranks
from tw_compile.runner.machine import installed_version, nccl_version
from tw_compile.runner.spec import RankError
from tw_compile.runner.versions import versions

MULTICAST_OFF = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}


@contextlib.contextmanager
def multicast_off() -> Iterator[None]:
    """Processes started meanwhile have NVLink multicast off before they import anything, unless the environment says."""
    unset = {name: value for name, value in MULTICAST_OFF.items() if name not in os.environ}
    with mock.patch.dict(os.environ, unset):
        yield


def steps(spec: BenchSpec) -> int:
    """How often :func:`run` calls ``progress``."""
    return 2 + len(list(spec.sizes())) * (2 + len(contenders(spec)))


def run(spec: BenchSpec, progress: Progress) -> dict[str, Any]:
    """The whole benchmark, as plain values.

    Raises:
        UsageError: ``spec`` names contenders that are not there.
        RankError: A rank failed, died or did not finish in time, before any size was done.
    """
    contenders(spec)
    return launch(spec, "bench kernel", rank_process, progress) | {"link_gb_per_s": LINK_GB_PER_S}


def launch(spec: Any, command: str, entry: Callable[..., None], progress: Progress) -> dict[str, Any]:
    """Run ``entry`` on the ranks of ``spec``; the report has what was asked for, what they found, and what it was made with.

    ``incomplete`` says why it lacks sizes, of which ``rows`` has none; None where all are there.

    Raises:
        UsageError: The ranks found the request to be impossible.
        RankError: A rank failed, died or did not finish in time, before any size was done.
    """
    incomplete = None
    with multicast_off():
        progress(f"starting {spec.world_size} ranks")
        try:
            found = spawn_ranks(spec, progress, entry)
        except RankError as error:
            if error.so_far is None:
                raise
            found, incomplete = error.so_far, str(error)
        environment = {name: os.environ[name] for name in MULTICAST_OFF}
    return {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "machine": machine(),
        **asdict(spec),
        **found,
        "incomplete": incomplete,
        "environment": environment,
        "versions": all_versions(spec.device),
    }


def machine() -> str:
    return f"{platform.machine()} {os.cpu_count()} cpus"


def all_versions(device: str) -> dict[str, Any]:
    return {
        **versions(),
        "triton": installed_version("triton"),
        "nccl": nccl_version() if device == "cuda" else None,
        "flashinfer": installed_version("flashinfer-python"),
    }
