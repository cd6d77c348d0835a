"""The transport of GPUs without peer access: kernels over pinned host memory that all ranks of a node share."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tw_compile.kernels.collective.cuda_variant import HOST_KERNELS, row_obstacle
from tw_compile.kernels.collective.host_memory import HostMemory
from tw_compile.kernels.collective.p2p_group import host_group_obstacle
from tw_compile.kernels.collective.spec import Request
from tw_compile.kernels.transports.selection import Step
from tw_compile.kernels.transports.slot_transport import SlotTransport

_WORDS_BYTES = 64 * 1024
"""Up to so many bytes a message is fastest in words that say that they have arrived: what a fence takes is what they save."""
_ONE_SHOT_BYTES = 2**20
_UNLIMITED = 2**62


class HostTransport(SlotTransport):
    """Kernels over host memory. A group that can't share any uses NCCL."""

    label = "host transport"
    kernels_of = "host"
    memory = HostMemory()
    instead = "nccl"

    def group_obstacle(self, group: dist.ProcessGroup, device: torch.device) -> str | None:
        """See :class:`SlotTransport`."""
        return host_group_obstacle(group, device)

    def serves(self, request: Request) -> bool:
        """See :class:`SlotTransport`."""
        return row_obstacle(request, HOST_KERNELS) is None

    def steps(self, device_name: str, world_size: int) -> tuple[Step, ...]:
        """See :class:`SlotTransport`. What limits these kernels is the bus, so a device without a table has one, too."""
        return super().steps(device_name, world_size) or default_steps(world_size)


def default_steps(world_size: int) -> tuple[Step, ...]:
    """For nodes that nobody has measured.

    One-shot waits once where two-shot waits twice, but all ranks read and compute all rows: two ranks gain by that as long as
    the message is short, more ranks never do.
    """
    one_shot = (Step(world_size, _ONE_SHOT_BYTES, "host_one_shot", 16),) if world_size == 2 else ()
    return (
        Step(world_size, _WORDS_BYTES, "host_words", 128),
        *one_shot,
        Step(world_size, _UNLIMITED, "host_two_shot", 16),
    )
