"""Start the ranks of a benchmark and put their rows into a report."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from tw_compile.benchmark.contenders import contenders
from tw_compile.benchmark.results import SCHEMA_VERSION
from tw_compile.benchmark.spec import LINK_GB_PER_S, BenchSpec
from tw_compile.benchmark.worker import rank_process
from tw_compile.runner.launch import spawn_ranks
from tw_compile.runner.machine import installed_version, nccl_version
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


def run(spec: BenchSpec, progress: Callable[[str], None]) -> dict[str, Any]:
    """The whole benchmark, as plain values.

    Raises:
        UsageError: ``spec`` names contenders that are not there.
        RankError: A rank failed, died or did not finish in time.
    """
    contenders(spec)
    with multicast_off():
        progress(f"starting {spec.world_size} ranks")
        found = spawn_ranks(spec, progress, rank_process)
        environment = {name: os.environ[name] for name in MULTICAST_OFF}
    return {
        "schema_version": SCHEMA_VERSION,
        "command": "bench kernel",
        "machine": f"{platform.machine()} {os.cpu_count()} cpus",
        "device": spec.device,
        "device_name": found["device_name"],
        "cache_bytes": found["cache_bytes"],
        "world_size": spec.world_size,
        "dtype": spec.dtype,
        "hidden": list(spec.hidden),
        "tokens": list(spec.tokens),
        "calls": spec.calls,
        "repeats": spec.repeats,
        "rotate_from": spec.rotate_from,
        "seed": spec.seed,
        "link_gb_per_s": LINK_GB_PER_S,
        "environment": environment,
        "rows": found["rows"],
        "versions": {
            **versions(),
            "triton": installed_version("triton"),
            "nccl": nccl_version() if spec.device == "cuda" else None,
            "flashinfer": installed_version("flashinfer-python"),
        },
    }
