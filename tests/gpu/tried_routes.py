"""Try the routes over links without native atomics on two GPUs, and print the outcome as JSON. With --hang loads never end.

A program of its own, as the ranks that it starts must not be forks of a process that uses CUDA.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection
from typing import Any

import torch

from tw_compile.harness.launch import Progress
from tw_compile.harness.ranks import Keep, Ranks, work_as_rank
from tw_compile.peer_routes import PULL, text_of
from tw_compile.tuning import peer_routes as trying

RANKS = 2
HANG, HANG_SECONDS = "--hang", 30.0


def hanging_process(spec: trying.RouteSpec, rank: int, scratch: str, messages: Connection) -> None:
    """As the trial's process. Loads never end: on one rank a kernel runs for ever."""

    def work(ranks: Ranks, progress: Progress, keep: Keep) -> dict[str, Any]:
        if spec.route == PULL:
            if rank == 1:
                torch.cuda._sleep(2**60)
                torch.cuda.synchronize()
            ranks.barrier()
        return trying.try_route(spec, ranks, progress, keep)

    work_as_rank(spec, rank, scratch, messages, work)


def main() -> None:
    def progress(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    if HANG in sys.argv:
        tried = trying.try_routes(RANKS, progress, hanging_process, HANG_SECONDS)
    else:
        tried = trying.try_routes(RANKS, progress)
    print(text_of(tried))


if __name__ == "__main__":
    main()
