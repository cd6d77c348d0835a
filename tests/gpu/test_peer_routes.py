"""Routes over links without native atomics, tried on two GPUs whose link has them: all are right there, and one may hang."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpu.test_p2p import require_gpus
from gpu.tried_routes import HANG, RANKS
from tw_compile.environment import PEER_ATOMICS
from tw_compile.peer_routes import HOST, PULL, PUSH, Tried, tried_of
from tw_compile.tuning.peer_routes import fastest

pytestmark = pytest.mark.gpu


def tried(*arguments: str) -> Tried:
    script = Path(__file__).with_name("tried_routes.py")
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env={**os.environ, PEER_ATOMICS: "0"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = tried_of(done.stdout, script.name)
    print(found.line)
    return found


@pytest.mark.timeout(200)
def test_all_routes_are_right_and_the_fastest_is_taken() -> None:
    require_gpus(RANKS)
    found = tried()
    assert found.reasons == {} and set(found.us) == {HOST, PUSH, PULL}
    assert found.route == fastest(found.us) != HOST, "NVLink is faster than host memory"
    assert all(len(times) >= 3 for times in found.us.values())


@pytest.mark.timeout(200)
def test_a_route_that_never_ends_is_out_and_leaves_the_gpus_to_others() -> None:
    require_gpus(RANKS)
    found = tried(HANG)
    assert set(found.reasons) == {PULL} and "30 s" in found.reasons[PULL]
    assert found.route == PUSH
    assert tried().reasons == {}, "the GPUs serve others as before"
