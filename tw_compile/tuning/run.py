"""Measure stage by stage; finished stages survive an interruption."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tw_compile.benchmark.worker import rank_process
from tw_compile.calibration import Calibration, text_of
from tw_compile.files import read_if_there, write_whole
from tw_compile.harness.launch import spawn_ranks
from tw_compile.harness.requests import UsageError
from tw_compile.harness.rows import SCHEMA_VERSION
from tw_compile.harness.start import all_versions
from tw_compile.harness.variables import MULTICAST_OFF, PEERS_UNUSED, for_measurements
from tw_compile.harness.versions import machine, peer_access_word
from tw_compile.tuning import beside
from tw_compile.tuning.spec import Stage, TuneSpec

PARTIAL = "tune-partial.json"
_UNKEYED = ("date", "commit")
"""Versions that may change between two parts of one tuning. The digest of the sources is compared instead."""


def steps(stage: Stage) -> int:
    """How often a stage calls ``progress``."""
    return 2 + len(list(stage.bench.sizes())) * (2 + stage.contenders)


def key_of(spec: TuneSpec, devices: list[str]) -> dict[str, Any]:
    """Everything that must be unchanged for an interrupted tuning to go on."""
    made_with = {name: value for name, value in all_versions(spec.device).items() if name not in _UNKEYED}
    here = {"node": platform.node(), "cpus": os.cpu_count(), "devices": devices, "peer_access": peer_access_word()}
    switches = {name: os.environ.get(name) for name in (*MULTICAST_OFF, *PEERS_UNUSED)}
    # Through JSON and back, because JSON turns tuples into lists.
    key: dict[str, Any] = json.loads(json.dumps({**here, **made_with, **switches, "stages": spec.options()}))
    return key


def earlier_stages(folder: Path, key: dict[str, Any]) -> dict[str, Any]:
    """The stages that an interrupted tuning with the same key finished; UsageError where the keys differ."""
    file = folder / PARTIAL
    try:
        text = read_if_there(file, "partial results")
        if text is None:
            return {}
        partial = json.loads(text)
        theirs, stages = partial["key"], partial["stages"]
        stages.keys(), theirs.keys()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"--resume: expected partial results in {file}, got {error!r}; --fresh begins anew") from error
    for name in sorted(key.keys() | theirs.keys()):
        if key.get(name) != theirs.get(name):
            shown = "" if name == "stages" else f" ({theirs.get(name)}, now {key.get(name)})"
            what = "options" if name == "stages" else name
            raise UsageError(
                f"--resume: expected partial results of this machine, these versions and options, got others in {file}: "
                f"{what} differ{shown}; --fresh begins anew"
            )
    return dict(stages)


def tune(
    spec: TuneSpec,
    key: dict[str, Any],
    stages: dict[str, Any],
    folder: Path,
    progress: Callable[[str], None],
    calibrations: Sequence[Calibration] = (),
) -> dict[str, Any]:
    """Measures the stages that ``stages`` lacks, writes each one into ``folder`` once it is done, and returns the report.

    ``calibrations``: what ranks measured on this node before. They become part of the report.

    Raises:
        RankError: A rank failed, died or did not finish in time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for stage in spec.stages():
        if stage.name in stages:
            continue
        begin = time.monotonic()
        progress(f"{stage.name}: starting {stage.bench.world_size} ranks")
        entry = beside.rank_process if stage.kind == "beside" else rank_process
        with for_measurements() as environment:
            result = spawn_ranks(stage.bench, _prefixed(progress, stage.name), entry)
        done = {"kind": stage.kind, "world_size": stage.bench.world_size, "environment": environment}
        stages = {**stages, stage.name: done | result | {"seconds": time.monotonic() - begin}}
        write_whole(folder / PARTIAL, json.dumps({"key": key, "stages": stages}))
    return {
        "schema_version": SCHEMA_VERSION,
        "command": "tune",
        "machine": machine(),
        "peer_access": peer_access_word(),
        "device": spec.device,
        "world_sizes": list(spec.world_sizes),
        "calibrations": [json.loads(text_of(calibration)) for calibration in calibrations],
        "stages": stages,
        "versions": all_versions(spec.device),
    }


def _prefixed(progress: Callable[[str], None], name: str) -> Callable[[str], None]:
    return lambda what: progress(f"{name}: {what}")
