"""The ranks of a benchmark as one of them sees them, and how they fail together."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tw_compile import compat
from tw_compile.agree import first_obstacle, gather
from tw_compile.harness.group import host_group, meet, process_group
from tw_compile.harness.launch import Progress, report_to_parent
from tw_compile.harness.problems import Context
from tw_compile.harness.requests import RanksSpec

T = TypeVar("T")
Keep = Callable[[dict[str, Any]], None]
"""Sends an unfinished result to the parent, so that the parent has this result if a rank fails later."""


class UnavailableError(RuntimeError):
    """A contender cannot take part; raised on all ranks alike, with the reason."""


class Ranks:
    """``ctx`` names the group that does the work; ``control`` is a gloo group, which works whatever state the GPU is in."""

    def __init__(self, ctx: Context, control: dist.ProcessGroup) -> None:
        self.ctx = ctx
        self.control = control

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, by rank."""
        return gather(value, self.control)

    def barrier(self) -> None:
        """On the host: no rank returns before all have called."""
        meet(self.control)

    def agree(self, obstacle: str | None) -> str | None:
        """The first obstacle that any rank has, the same on all ranks; None when no rank has one."""
        obstacles = self.gather(obstacle)
        if len(set(obstacles)) == 1:
            return obstacles[0]
        return first_obstacle(obstacles)

    def together(self, work: Callable[[], T]) -> T:
        """Run ``work()`` on every rank; if it raises on any rank, raise :class:`UnavailableError` on all ranks.

        Calls may be nested. A rank that fails before an inner call goes on to the agreement of its outer call. There it meets
        the other ranks, which are in the agreement of the inner call.
        """
        obstacle: str | None = None
        result: list[T] = []
        try:
            result.append(work())
        except UnavailableError:
            raise
        except Exception as error:
            obstacle = one_line(error)
        obstacle = self.agree(obstacle)
        if obstacle is not None:
            raise UnavailableError(obstacle)
        return result[0]


_symmetric_memory: list[tuple[torch.Tensor, Any]] = []
"""Keeps all buffers alive: if they were freed, a pool could reuse the blocks in a different order on each rank."""


def symmetric_memory(ranks: Ranks, nbytes: int, device: torch.device) -> tuple[torch.Tensor, Any]:
    """A buffer of ``nbytes`` bytes on every rank, and torch's handle to the buffers of all ranks. Collective."""
    # The allocation can fail on one rank alone, so ranks agree on it before the rendezvous, which waits for all ranks.
    buffer = ranks.together(lambda: compat.symm_mem_empty(nbytes, device))
    handle, *_ = compat.symm_mem_rendezvous(buffer, ranks.ctx.group_name)
    _symmetric_memory.append((buffer, handle))
    return buffer, handle


def work_as_rank(
    spec: RanksSpec,
    rank: int,
    scratch: str,
    messages: Connection,
    work: Callable[[Ranks, Progress, Keep], dict[str, Any]],
) -> None:
    """Work as a spawned rank: join the others, do ``work``, send its result and the device's name to the parent, and end."""
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(spec.world_size))

    def joined(progress: Progress) -> dict[str, Any]:
        progress("joining")
        with process_group(spec, rank, rank, f"file://{scratch}/store"), torch.no_grad():
            if spec.device == "cuda":
                device, name = torch.device("cuda", rank), torch.cuda.get_device_name()
            else:
                torch.set_num_threads(1)
                device, name = torch.device("cpu"), platform.machine()
            assert dist.group.WORLD is not None
            context = Context(rank, spec.world_size, device, compat.group_name(dist.group.WORLD))

            def keep(so_far: dict[str, Any]) -> None:
                messages.send(("so far", {"device_name": name, **so_far}))

            return {"device_name": name, **work(Ranks(context, host_group(spec)), progress, keep)}

    report_to_parent(messages, joined)


def one_line(error: BaseException, limit: int = 300) -> str:
    """Type and first line of the message of ``error``, or of the inner error if a backend of torch.compile raised one."""
    error = getattr(error, "inner_exception", error)
    lines = str(error).strip().splitlines() or ["no message"]
    text = f"{type(error).__name__}: {lines[0]}"
    return text if len(text) <= limit else text[: limit - 1] + "…"
