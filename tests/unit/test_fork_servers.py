"""Processes that tests fork are as unlike each other as spawned ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from fork_servers import run_script

SCRIPT = """
import os, sys, torch
rank = int(os.environ["RANK"])
print(f"{rank} {sys.argv[1:]} {hash('tokens')} {os.environ['SAID']} {os.getcwd()}\\n", end="", flush=True)
sys.exit(rank if os.environ["SAID"] == "fails" else 0)
"""


def test_ranks_have_their_own_order_of_sets_and_the_environment_of_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    hashes = set()
    for said in ("first", "second"):
        monkeypatch.setenv("SAID", said)
        (tmp_path / said).mkdir()
        lines = sorted(run_script(tmp_path / said, script, "argument", ranks=2).splitlines())
        places = [(rank, given, word, where) for rank, given, _, word, where in map(str.split, lines)]
        assert places == [(str(rank), "['argument']", said, str(tmp_path / said)) for rank in (0, 1)]
        hashes |= {line.split()[2] for line in lines}
    assert len(hashes) == 2
    monkeypatch.setenv("SAID", "fails")
    (tmp_path / "third").mkdir()
    with pytest.raises(AssertionError, match="fails"):
        run_script(tmp_path / "third", script, ranks=2)
