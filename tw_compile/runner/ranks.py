"""The ranks of a run: processes that were spawned for the run, or this process, if torchrun started it as a rank."""

from __future__ import annotations

import os
import shutil
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tw_compile.harness.launch import Progress, report_to_parent
from tw_compile.runner.spec import RunSpec


def join_ranks(spec: RunSpec, progress: Progress) -> dict[str, Any] | None:
    """Work as the rank that torchrun's environment variables name. Only rank 0 gets the result; the others get None."""
    import torch.distributed as dist

    from tw_compile.harness.group import process_group
    from tw_compile.runner.worker import run_rank

    rank, local_rank = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    with process_group(spec, rank, local_rank, "env://"):
        token: list[str] = [os.urandom(8).hex()]
        dist.broadcast_object_list(token)
        scratch = Path(tempfile.gettempdir()) / f"tw_compile_{token[0]}"
        scratch.mkdir(exist_ok=True)
        try:
            result = run_rank(spec, scratch, progress)
        finally:
            if local_rank == 0:
                shutil.rmtree(scratch, ignore_errors=True)
    return result if rank == 0 else None


def run_in_process_group(spec: RunSpec, rank: int, scratch: str, messages: Connection) -> None:
    """Entry point of a spawned rank of a run."""
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(spec.world_size))

    def work(doing: Progress) -> dict[str, Any]:
        doing("importing torch and transformers")
        from tw_compile.harness.group import process_group
        from tw_compile.runner.worker import run_rank

        with process_group(spec, rank, rank, f"file://{scratch}/store"):
            return run_rank(spec, Path(scratch), doing)

    report_to_parent(messages, work)
