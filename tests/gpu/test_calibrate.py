"""A calibration on real GPUs: in time, complete, the same on all ranks, and its choices are the fastest there are.

TW_COMPILE_CALIBRATED_JSON names a file that keeps what was measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpu.calibrated_choices import RANKS, RUNS, SECONDS, TOKENS
from gpu.test_p2p import require_gpus
from tw_compile.environment import PEER_ACCESS

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(300)
def test_two_gpus_measure_themselves_and_choose_the_fastest(tmp_path: Path) -> None:
    require_gpus(RANKS)
    file = Path(os.environ.get("TW_COMPILE_CALIBRATED_JSON") or tmp_path / "calibrated.json")
    script = Path(__file__).with_name("calibrated_choices.py")
    done = subprocess.run(
        [sys.executable, str(script), "--json", str(file), "--timeout", "200"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    print(done.stdout)
    assert file.exists(), done.stderr[-4000:]
    runs = json.loads(file.read_text())["runs"]
    assert list(runs) == list(RUNS), done.stderr[-4000:]
    for run, variables in zip(runs.values(), RUNS.values(), strict=True):
        assert run["peer_access"] == (variables[PEER_ACCESS] == "1") and not run["multicast"]
        assert run["failures"] == [], run["failures"]
        assert run["calibration"]["seconds"][0] <= SECONDS + 0.5
        assert {row["tokens"] for row in run["calibration"]["rows"]} == set(TOKENS)
