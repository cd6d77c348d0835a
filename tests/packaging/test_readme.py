"""What the README shows runs as pasted, and what it lists is complete."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tw_compile.passes.reasons import Refusal, refusals

README = (Path(__file__).parents[2] / "README.md").read_text()
HUGGING_FACE, OPTIONS, BARE_PASS, TESTING = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def run(tmp_path: Path, code: str, *launcher: str) -> str:
    """Run ``code`` as a script in an empty folder; the output, both streams."""
    script = tmp_path / "script.py"
    script.write_text(code)
    result = subprocess.run(
        [sys.executable, *launcher, str(script)],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=400,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


@pytest.mark.full
def test_hugging_face_example_fuses_every_all_reduce(tmp_path: Path) -> None:
    output = run(tmp_path, HUGGING_FACE, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    found = re.search(r"'all_reduce': (\d+), 'fused': (\d+).*\n?.*uncompiled model ([\d.]+)%", output)
    assert found is not None, output
    all_reduces, fused, percent = found.groups()
    assert all_reduces == fused
    assert int(fused) >= 4
    assert float(percent) < 2


@pytest.mark.full
@pytest.mark.parametrize("code", [OPTIONS, BARE_PASS], ids=["options", "bare pass"])
def test_snippet_runs(tmp_path: Path, code: str) -> None:
    run(tmp_path, code)


@pytest.mark.full
def test_testing_example_passes(tmp_path: Path) -> None:
    run(tmp_path, TESTING + "\n\ntest_block_is_fused()\n")


def test_every_refusal_is_listed() -> None:
    assert {*refusals()} - {Refusal.REWRITE_FAILED} <= set(re.findall(r"`(\w+)`", README))
