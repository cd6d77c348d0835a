"""Host microseconds of one call of the operators, start and wait, by two ranks.

    python tests/gpu/host_cost.py [--json FILE]

Each rank has a GPU of its own, or two ranks share the only one. A line is of one form of calls: the minimum and the median of
five loops of 60 calls, after calls that make the form known. Each form is timed as it is launched, and without programmatic
dependent launch (``plain``), so that the difference is what that costs the host. ``api`` says which calls of CUDA's a call
makes, and how long each takes, by torch's profiler, which adds some time to each. ``torch.mm`` and ``torch.empty`` say how fast
the host is. The GPUs keep up with the host at these sizes, and no queue fills.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":
    # The folder of tests in the place of this one, as pytest has it. Ranks get the same path.
    sys.path.pop(0)
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from gpu.checks.sharing import share_gpus
from tw_compile import compat
from tw_compile.harness.versions import machine, versions
from tw_compile.kernels.collective import ops
from tw_compile.kernels.collective.spec import rows_per_rank
from tw_compile.kernels.runtime.launch import Kernel

RANKS, HIDDEN, INNER, LOOPS, CALLS, WARM_UP = 2, 1024, 512, 5, 60, 40
FORMS: tuple[tuple[int, dict[str, Any]], ...] = (
    (4, {}),
    (64, {"mm": True, "sharded": True}),
    (1024, {"mm": True}),
    (1024, {"mm": True, "sharded": True, "overlap_sms": 4}),
    (1024, {"mm": True, "sharded": True, "overlap_sms": 4, "reserved_sms": 8}),
)
"""Tokens, and how a call differs from one that is given its message and returns all rows of the residual."""


def host_us(call: Callable[[], object]) -> tuple[float, float]:
    """The minimum and the median of a loop's microseconds for each call."""
    for _ in range(WARM_UP):
        call()
    times = []
    for _ in range(LOOPS):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - begin) / CALLS * 1e6)
    return min(times), statistics.median(times)


def call_of(
    tokens: int, mm: bool = False, sharded: bool = False, overlap_sms: int = 0, reserved_sms: int = 0
) -> Callable[[], None]:
    """A call of the operators of that form."""
    assert dist.group.WORLD is not None
    dtype, group = torch.bfloat16, compat.group_name(dist.group.WORLD)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=dtype)

    rows = rows_per_rank(tokens, RANKS) if sharded else tokens
    message = (random(tokens, INNER), random(INNER, HIDDEN)) if mm else (random(tokens, HIDDEN),)
    residual, weight = random(rows, HIDDEN), random(HIDDEN)
    rest = (residual, None, weight, 1e-6, 0.0, dtype, dtype, dtype, sharded, "sharded" if sharded else "replicated")
    reserved = {"reserved_sms": reserved_sms} if mm else {}
    start = ops.mm_start if mm else ops.start

    def call() -> None:
        hidden, kept = start(*message, *rest, group, "p2p", 0, overlap_sms=overlap_sms, **reserved)
        ops.wait_(hidden, kept, [*message, residual, weight], group, 0)

    return call


def api_of(call: Callable[[], object]) -> dict[str, tuple[float, float]]:
    """How often a call makes each call of CUDA's runtime and driver, and the microseconds of each of these."""
    for _ in range(WARM_UP):
        call()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    made = [row for row in profile.key_averages() if row.key.startswith("cu") and "Synchronize" not in row.key]
    return {row.key: (row.count / CALLS, row.self_cpu_time_total / row.count) for row in made}


def _plain(launch: Callable[..., None]) -> Callable[..., None]:
    def without_programmatic(self: Kernel, *arguments: Any, **options: Any) -> None:
        launch(self, *arguments, **{**options, "programmatic": False})

    return without_programmatic


def _rank(rank: int, file: str | None) -> None:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29611", "RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    if torch.cuda.device_count() < RANKS:
        share_gpus()
        torch.cuda.set_device(0)
        dist.init_process_group("gloo")
    else:
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    lines = []
    for tokens, changes in FORMS:
        launched = host_us(call_of(tokens, **changes))
        with mock.patch.object(Kernel, "launch", _plain(Kernel.launch)):
            plain = host_us(call_of(tokens, **changes))
        made = api_of(call_of(tokens, **changes))
        lines.append({"tokens": tokens, **changes, "us": launched, "plain_us": plain, "api": made})
    a, b = (torch.randn(64, 64, device="cuda") for _ in range(2))
    lines.append({"torch.mm": host_us(lambda: torch.mm(a, b))})
    lines.append({"torch.empty": host_us(lambda: torch.empty(4, HIDDEN, device="cuda"))})
    if rank == 0:
        found = {"machine": machine(), "gpus": torch.cuda.device_count(), "versions": versions(), "lines": lines}
        print("\n".join(map(str, lines)))
        if file is not None:
            Path(file).write_text(json.dumps(found, indent=1) + "\n")
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Time all forms. Returns 0, and 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the times to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: expected a CUDA GPU, got none", file=sys.stderr)
        return 2
    mp.spawn(_rank, args=(options.json,), nprocs=RANKS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
