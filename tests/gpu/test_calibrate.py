"""A calibration on real GPUs: in time, complete, and its choices are those of the times that it has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpu.test_p2p import require_gpus
from tw_compile.calibration import Calibration, all_stored
from tw_compile.kernels.transports.selection import step_for, steps_over, transport_of
from tw_compile.tuning.short import HIDDEN, SECONDS, TOKENS

pytestmark = pytest.mark.gpu

SLACK = 1.03


def _calibrate(folder: Path, **variables: str) -> tuple[Calibration, dict[str, Any]]:
    # Never with multicast: no switch has run it (docs/kernels.md).
    environment = os.environ | {"XDG_CONFIG_HOME": str(folder), "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"} | variables
    command = [sys.executable, "-m", "tw_compile.cli", "tune", "--quick", "--tp", "2", "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    (calibration,) = all_stored(folder / "tw_compile" / "calibration")
    return calibration, json.loads(done.stdout)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("variables", [{}, {"TW_COMPILE_PEER_ACCESS": "0"}], ids=["peers", "no peer access"])
def test_two_gpus_measure_themselves(variables: dict[str, str], tmp_path: Path) -> None:
    require_gpus(2)
    calibration, report = _calibrate(tmp_path, **variables)
    assert report["calibrations"][0]["measured_on"]["peer_access"] == (not variables)
    assert calibration.seconds[0] <= SECONDS + 0.5, calibration.seconds
    rows = calibration.rows
    assert {row["tokens"] for row in rows} == set(TOKENS) and {row["hidden"] for row in rows} == {HIDDEN}
    for nbytes in sorted({row["nbytes"] for row in rows}):
        named = [row for row in rows if row["nbytes"] == nbytes and row["algorithm"] and row["p50_us"]]
        for transport in {transport_of(row["algorithm"]) for row in named}:
            ours = [row for row in named if transport_of(row["algorithm"]) == transport]
            step = step_for(steps_over(calibration.steps, transport), nbytes)
            assert step is not None
            (chosen,) = (row for row in ours if (row["algorithm"], row["max_sms"]) == (step.algorithm, step.sms))
            assert chosen["p50_us"] <= SLACK * min(row["p50_us"] for row in ours), (nbytes, chosen)
