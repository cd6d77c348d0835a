"""How a rank joins the others."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from tw_compile import compat
from tw_compile.harness.requests import RanksSpec


@contextlib.contextmanager
def process_group(spec: RanksSpec, rank: int, local_rank: int, init_method: str) -> Iterator[None]:
    """Join the default process group and take this rank's device."""
    options: dict[str, Any] = {}
    if spec.device == "cuda":
        torch.cuda.set_device(local_rank)
        options["device_id"] = torch.device("cuda", local_rank)
    else:
        compat.write_plain_cpp()
    dist.init_process_group(
        "nccl" if spec.device == "cuda" else "gloo",
        init_method=init_method,
        rank=rank,
        world_size=spec.world_size,
        timeout=datetime.timedelta(seconds=spec.timeout),
        **options,
    )
    yield
    # Not in a finally: after an error the other ranks may be gone, and this would wait for them.
    dist.destroy_process_group()


def host_group(spec: RanksSpec) -> dist.ProcessGroup:
    """A new gloo group of all ranks. Gloo puts nothing on a GPU, and works whatever state the GPU is in. Collective."""
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=spec.timeout))


def meet(group: dist.ProcessGroup) -> None:
    """Return when all ranks of the gloo group ``group`` have called."""
    dist.all_reduce(torch.zeros(1), group=group)
