"""What becomes of the others when one rank is killed between two calls through host memory.

    python tests/gpu/killed_rank.py --world-size 3 [--gpus 2] [--json killed.json] [--timeout 60]

For each kernel through host memory the ranks make some calls. Then the last rank ends by SIGKILL, which leaves it no time to
tidy up. The others make one more call, with TW_COMPILE_SPIN_LIMIT, so that waits end. Each of them must report the rank that is
gone, and no file may stay in /dev/shm. With fewer GPUs than ranks they share them, as in ``tests/gpu/checks``.

Exits 0 when all of that holds for all kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # The folder of tests in the place of this one, as pytest has it. Ranks get the same path.
    sys.path.pop(0)
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from gpu.checks.run import join
from gpu.checks.transports import ALGORITHMS, TRANSPORT_OF, finished
from tw_compile.child import Child, end
from tw_compile.environment import SPIN_LIMIT
from tw_compile.harness.problems import Form, expect_right, make_problem
from tw_compile.kernels.collective.transports import TRANSPORTS

KERNELS = tuple(name for name, transport in TRANSPORT_OF.items() if transport == "host")
CALLS = 20
SHARED_MEMORY = Path("/dev/shm")
_SPIN_LIMIT = "200000"
_APART_SECONDS = 1.0
_GRACE_SECONDS = 5.0


def run_rank(rank: int, world_size: int, gpus: int, folder: str, kernel: str) -> None:
    """One rank, which writes to ``folder`` what it was told by the call after the last rank was killed."""
    os.environ[SPIN_LIMIT] = _SPIN_LIMIT  # read when a transport is made
    ctx = join(rank, world_size, gpus, folder)
    transport = TRANSPORTS["host"].make(ALGORITHMS[kernel]())
    problem = make_problem(ctx, 64, 1024, Form())
    # Ranks compile for different times and may give up on each other: on a slot that is not used again.
    transport.start(problem.request(ctx, slot=1))
    torch.cuda.synchronize()
    dist.barrier()
    transport.states[ctx.group_name, ctx.device].slots[1].status.zero_()
    request = problem.request(ctx)
    for _ in range(CALLS):
        results = finished(transport.start(request))
        torch.cuda.synchronize()
    transport.check()
    expect_right(ctx, problem, results, kernel)
    dist.barrier()
    time.sleep(_APART_SECONDS)  # all have left the barrier
    if rank == world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(_APART_SECONDS)
    message = "nothing was reported"
    try:
        transport.start(request)
        torch.cuda.synchronize()
        transport.check()
    except RuntimeError as error:
        message = str(error)
    (Path(folder) / f"rank{rank}.txt").write_text("\n".join([message, *ctx.failures]))
    os._exit(0)  # a group that has lost a rank can't be left together


def judged(world_size: int, codes: Sequence[int | None], messages: Mapping[int, str], left: Sequence[str]) -> list[str]:
    """What is wrong: by the ranks' exit ``codes``, what each survivor was told, and the files that are ``left``."""
    killed = world_size - 1
    wrong = [] if codes[killed] == -signal.SIGKILL else [f"rank {killed} ended with {codes[killed]}, not by SIGKILL"]
    for rank in range(killed):
        if codes[rank] != 0:
            wrong.append(f"rank {rank} ended with {codes[rank]}")
            continue
        message = messages[rank]
        silent = re.search(r"silent ranks: ([\d, ]+)\)", message)
        if silent is None or str(killed) not in silent[1].split(", ") or "\n" in message.strip():
            wrong.append(f"rank {rank} reported: {message}")
    return wrong + [f"{SHARED_MEMORY} still has {name}" for name in left]


def left_since(before: set[str], seconds: float = _GRACE_SECONDS) -> list[str]:
    """Our files in /dev/shm that were not there ``before`` and still are after ``seconds``. Other groups' come and go."""
    left = ours() - before
    end_of_wait = time.monotonic() + seconds
    while left and time.monotonic() < end_of_wait:
        time.sleep(0.1)
        left &= ours()
    return sorted(left)


def ours() -> set[str]:
    """The names of our files in /dev/shm."""
    return {path.name for path in SHARED_MEMORY.glob("tw_compile-*")}


def run_kernel(world_size: int, gpus: int, kernel: str, timeout: float) -> dict[str, Any]:
    """Kill a rank of ``kernel``'s group: what the others were told, and what is ``wrong``."""
    before = ours()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [Child(run_rank, rank, world_size, gpus, folder, kernel, scratch=folder) for rank in range(world_size)]
        try:
            while not all([rank.join(0) for rank in ranks]) and time.monotonic() < begin + timeout:
                time.sleep(0.1)
            codes = [rank.exitcode for rank in ranks]
        finally:
            end(ranks, _GRACE_SECONDS)
        messages = {
            rank: path.read_text() if (path := Path(folder) / f"rank{rank}.txt").exists() else "nothing"
            for rank in range(world_size - 1)
        }
    wrong = judged(world_size, codes, messages, left_since(before))
    seconds = round(time.monotonic() - begin, 1)
    return {"kernel": kernel, "seconds": seconds, "reported": list(messages.values()), "wrong": wrong}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--world-size", type=int, required=True, help="number of ranks")
    parser.add_argument(
        "--gpus", type=int, help="number of GPUs, which ranks share if it is lower (default: one a rank)"
    )
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--timeout", type=float, default=60, help="seconds that a kernel's ranks may take")
    arguments = parser.parse_args()
    world_size = arguments.world_size
    gpus = world_size if arguments.gpus is None else arguments.gpus
    if world_size < 2:
        parser.error(f"--world-size: expected at least 2, got {world_size}")
    if not 1 <= gpus <= world_size:
        parser.error(f"--gpus: expected 1 to {world_size}, the world size, got {gpus}")
    results = []
    for kernel in KERNELS:
        result = run_kernel(world_size, gpus, kernel, arguments.timeout)
        results.append(result)
        outcome = "; ".join(result["wrong"]) or f"ok, {result['reported'][0]}"
        print(f"{result['seconds']:6.1f} s  {kernel}, {world_size} ranks on {gpus} GPUs: {outcome}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1))
    return int(any(result["wrong"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
