"""The GPU transports on real GPUs; the checks themselves are in ``checks``.

Each world size is started once and runs every check; the tests here read its results. More ranks than GPUs share them.
TW_COMPILE_REQUIRE_GPUS=N turns a skip for lack of GPUs into a failure.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu.checks.run import selected
from tw_compile.environment import required_gpus

pytestmark = pytest.mark.gpu

CHECKS = Path(__file__).with_name("checks")
SECONDS = 360
SHARED_SECONDS = 1200
RUNS = ((2, 2), (4, 4), (4, 2))
"""World sizes, and the GPUs of each."""


def require_gpus(count: int) -> None:
    """Skip without ``count`` GPUs, or fail when the environment promises that many."""
    present = torch.cuda.device_count()
    if present >= count:
        return
    if required_gpus() >= count:
        pytest.fail(f"TW_COMPILE_REQUIRE_GPUS asks for GPU tests with {count} GPUs, found {present}")
    pytest.skip(f"needs {count} GPUs, found {present}")


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], dict[str, Any]]:
    """World size and GPUs -> check -> outcome; runs them when they are first asked for."""
    cache: dict[tuple[int, int], dict[str, Any]] = {}

    def run(world_size: int, gpus: int) -> dict[str, Any]:
        if (world_size, gpus) not in cache:
            path: Path = tmp_path_factory.mktemp("checks") / f"{world_size}.json"
            seconds = SECONDS if gpus == world_size else SHARED_SECONDS
            command = [sys.executable, str(CHECKS)]
            command += [f"--world-size={world_size}", f"--gpus={gpus}", f"--json={path}", f"--timeout={seconds}"]
            finished = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60, check=False)
            cache[world_size, gpus] = json.loads(path.read_text()) if path.exists() else {}
            if finished.returncode:
                print(finished.stdout[-4000:], finished.stderr[-4000:], sep="\n", file=sys.stderr)
        return cache[world_size, gpus]

    return run


@pytest.mark.timeout(SHARED_SECONDS + 120)
@pytest.mark.parametrize(
    ("world_size", "gpus", "name"),
    [(world_size, gpus, name) for world_size, gpus in RUNS for name in selected("", gpus < world_size)],
)
def test_check(outcomes: Callable[[int, int], dict[str, Any]], world_size: int, gpus: int, name: str) -> None:
    require_gpus(gpus)
    outcome = outcomes(world_size, gpus).get(name, {"outcome": "no result: the run died"})["outcome"]
    assert outcome == "ok", outcome
