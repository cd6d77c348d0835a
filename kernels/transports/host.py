"""The transport of GPUs without peer access: kernels over pinned host memory that all ranks of a node share."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tw_compile.kernels.collective.cuda_variant import LOADS_AND_STORES, row_obstacle
from tw_compile.kernels.collective.host_memory import HostMemory
from tw_compile.kernels.collective.p2p_group import host_group_obstacle
from tw_compile.kernels.collective.spec import Request
from tw_compile.kernels.transports.slot_transport import SlotTransport


class HostTransport(SlotTransport):
    """Kernels over host memory. A group that can't share host memory uses NCCL.

    Long calls with exact rows go in turn, because each fills the one link that a GPU has to the host. Short calls leave the
    link idle while a rank waits for another rank's rows. Calls with rows in codes wait for their SMs, not for the link. So of
    both, two at the same time are faster.
    """

    label = "host transport"
    kernels_of = "host"
    memory = HostMemory()
    instead = "nccl"
    # By two-shot, 16 layers of Llama-3.1-8B in halves of 16, 8, 4 MiB were 3%, 3%, 1% faster in turn, and with int8 4% slower.
    in_turn_from = 2**23

    def group_obstacle(self, group: dist.ProcessGroup, device: torch.device) -> str | None:
        """See :class:`SlotTransport`."""
        return host_group_obstacle(group, device)

    def serves(self, request: Request) -> bool:
        """See :class:`SlotTransport`."""
        return row_obstacle(request, LOADS_AND_STORES, wires=True, scales=True) is None

    def reserved_bytes(self) -> int:
        """See :class:`Transport`. The slots take no device memory."""
        return 0
