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
"""Hands a result that lacks what is not done yet to the parent, which has it should a rank fail later."""


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
        """``work()`` on every rank; when it raises on one, :class:`UnavailableError` on all.

        May be nested: a rank that fails before an inner call meets the others, which are in the inner one, in the agreement
        of its outer one.
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
"""Never given back: a pool hands freed blocks out again in an order that ranks need not share."""


def symmetric_memory(ranks: Ranks, nbytes: int, device: torch.device) -> tuple[torch.Tensor, Any]:
    """So many bytes on every rank, and torch's handle of those of all ranks. Collective."""
    # Ranks meet after the part that can fail on one of them alone: the rendezvous waits for all.
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
    """Be a spawned rank: join the others, do ``work``, tell the parent what comes of it and on which device, and end."""
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
    """Type and first line of the message; of what a backend of torch.compile raised, if that is what failed."""
    error = getattr(error, "inner_exception", error)
    lines = str(error).strip().splitlines() or ["no message"]
    text = f"{type(error).__name__}: {lines[0]}"
    return text if len(text) <= limit else text[: limit - 1] + "…"
