"""Parts of the package import each other in one direction."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "docs" / "draw_imports.py"


def test_no_two_parts_import_each_other_and_the_drawing_is_of_today() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_cycle_is_found_and_named(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    copy = tmp_path / "docs" / "draw_imports.py"
    copy.write_text(SCRIPT.read_text())
    for name, other in (("first", "second"), ("second", "third"), ("third", "first")):
        folder = tmp_path / "tw_compile" / name
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(f"def late():\n    from tw_compile import {other}\n")
    done = subprocess.run([sys.executable, str(copy)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "first imports second, which imports it in turn" in done.stderr
