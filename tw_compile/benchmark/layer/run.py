"""Start the ranks of a benchmark of layers and put their rows into a report."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from typing import Any

from tw_compile.benchmark.layer.results import SCHEMA_VERSION, LayerRow, sweeps
from tw_compile.benchmark.layer.spec import LayerSpec
from tw_compile.benchmark.layer.variants import variants
from tw_compile.benchmark.layer.worker import rank_process
from tw_compile.benchmark.run import MULTICAST_OFF, multicast_off
from tw_compile.runner.launch import spawn_ranks
from tw_compile.runner.machine import installed_version, nccl_version
from tw_compile.runner.versions import versions


def steps(spec: LayerSpec) -> int:
    """How often :func:`run` calls ``progress``."""
    return 3 + sum(2 + len(variants(spec, tokens)) for tokens in spec.tokens)


def run(spec: LayerSpec, progress: Callable[[str], None]) -> dict[str, Any]:
    """The whole benchmark, as plain values.

    Raises:
        UsageError: ``spec`` names variants that are not there, or a model that can't be built so.
        RankError: A rank failed, died or did not finish in time.
    """
    variants(spec, max(spec.tokens))
    with multicast_off():
        progress(f"starting {spec.world_size} ranks")
        found = spawn_ranks(spec, progress, rank_process)
        environment = {name: os.environ[name] for name in MULTICAST_OFF}
    return {
        "schema_version": SCHEMA_VERSION,
        "command": "bench layer",
        "machine": f"{platform.machine()} {os.cpu_count()} cpus",
        "model": spec.model,
        "device": spec.device,
        "device_name": found["device_name"],
        "world_size": spec.world_size,
        "dtype": spec.dtype,
        "hidden_size": found["hidden_size"],
        "tokens": list(spec.tokens),
        "batch": spec.batch,
        "layers": spec.layers,
        "repeats": spec.repeats,
        "seed": spec.seed,
        "environment": environment,
        "rows": found["rows"],
        "sweeps": sweeps([LayerRow(**row) for row in found["rows"]]) if spec.device == "cuda" else [],
        "versions": {
            **versions(),
            "triton": installed_version("triton"),
            "nccl": nccl_version() if spec.device == "cuda" else None,
        },
    }
