"""Start the ranks of a benchmark, and say what a report was made with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from tw_compile.harness.launch import Progress, spawn_ranks
from tw_compile.harness.requests import RankError
from tw_compile.harness.rows import SCHEMA_VERSION
from tw_compile.harness.variables import for_measurements
from tw_compile.harness.versions import installed_version, machine, nccl_version, peer_access_word, versions


def launch(spec: Any, command: str, entry: Callable[..., None], progress: Progress) -> dict[str, Any]:
    """Run ``entry`` on the ranks of ``spec``; the report has the request, the results, and what it was made with.

    The key ``incomplete`` says why sizes are missing in ``rows``; None where no size is missing.

    Raises:
        UsageError: The ranks found the request to be impossible.
        RankError: A rank failed, died or did not finish in time, before any size was done.
    """
    incomplete = None
    with for_measurements() as environment:
        progress(f"starting {spec.world_size} ranks")
        try:
            result = spawn_ranks(spec, progress, entry)
        except RankError as error:
            if error.so_far is None:
                raise
            result, incomplete = error.so_far, str(error)
    return {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "machine": machine(),
        "peer_access": peer_access_word(),
        **asdict(spec),
        **result,
        "incomplete": incomplete,
        "environment": environment,
        "versions": all_versions(spec.device),
    }


def all_versions(device: str) -> dict[str, Any]:
    return {
        **versions(),
        "triton": installed_version("triton"),
        "nccl": nccl_version() if device == "cuda" else None,
        "flashinfer": installed_version("flashinfer-python"),
    }
