"""The GPU transports on real GPUs; the checks themselves are in ``tw_compile.testing.gpu_checks``.

Each world size is started once and runs every check; the tests here read its results. TW_COMPILE_REQUIRE_GPUS=N turns a skip
for lack of GPUs into a failure.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tw_compile.testing.gpu_checks import CHECKS

pytestmark = pytest.mark.gpu

SECONDS = 240


def require_gpus(count: int) -> None:
    """Skip without ``count`` GPUs, or fail when the environment promises that many."""
    present = torch.cuda.device_count()
    if present >= count:
        return
    if int(os.environ.get("TW_COMPILE_REQUIRE_GPUS", "0")) >= count:
        pytest.fail(f"TW_COMPILE_REQUIRE_GPUS asks for GPU tests with {count} GPUs, found {present}")
    pytest.skip(f"needs {count} GPUs, found {present}")


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Any]]:
    """World size -> check -> outcome; runs a world size when it is first asked for."""
    cache: dict[int, dict[str, Any]] = {}

    def run(world_size: int) -> dict[str, Any]:
        if world_size not in cache:
            path: Path = tmp_path_factory.mktemp("gpu_checks") / f"{world_size}.json"
            command = [sys.executable, "-m", "tw_compile.testing.gpu_checks", f"--world-size={world_size}"]
            finished = subprocess.run(
                [*command, f"--json={path}", f"--timeout={SECONDS}"],
                capture_output=True,
                text=True,
                timeout=SECONDS + 60,
                check=False,
            )
            cache[world_size] = json.loads(path.read_text()) if path.exists() else {}
            if finished.returncode:
                print(finished.stdout[-4000:], finished.stderr[-4000:], sep="\n", file=sys.stderr)
        return cache[world_size]

    return run


@pytest.mark.timeout(SECONDS + 120)
@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_check(outcomes: Callable[[int], dict[str, Any]], world_size: int, name: str) -> None:
    require_gpus(world_size)
    outcome = outcomes(world_size).get(name, {"outcome": "no result: the run died"})["outcome"]
    assert outcome == "ok", outcome
