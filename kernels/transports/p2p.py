"""The P2P transport: kernels over symmetric memory, which all GPUs of a node read and write.

Whether NVLink multicast is used is decided once buffers exist: only then does symmetric memory know whether they have a
multicast address. Nothing here asks for an address: torch makes it by itself, unless TORCH_SYMM_MEM_DISABLE_MULTICAST=1.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from tw_compile.kernels.algorithms import ALGORITHMS
from tw_compile.kernels.collective.algorithm import Algorithm
from tw_compile.kernels.collective.cuda_variant import LOADS_AND_STORES, row_obstacle
from tw_compile.kernels.collective.p2p_group import group_obstacle
from tw_compile.kernels.collective.peer_access import local_world_size, plain_route
from tw_compile.kernels.collective.slot import SymmetricMemory
from tw_compile.kernels.collective.spec import Request
from tw_compile.kernels.collective.transport import Transport, get_transport
from tw_compile.kernels.epilogues import EPILOGUES
from tw_compile.kernels.transports.slot_transport import SlotTransport


class P2PTransport(SlotTransport):
    """Kernels over symmetric memory.

    With the name "multimem" it uses the kernel of that name if all buffers of the group have multicast, else the kernel that
    serves all messages. ``algorithm`` replaces the multimem kernel.
    """

    label = "P2P transport"
    kernels_of = "p2p"
    memory = SymmetricMemory()
    instead = "host"

    def __init__(self, name: str = "p2p", algorithm: Algorithm | None = None) -> None:
        self.multicast = name == "multimem"
        if self.multicast and algorithm is None:
            algorithm = ALGORITHMS["multimem"].make()
        super().__init__(name, algorithm)

    def group_obstacle(self, group: dist.ProcessGroup, device: torch.device) -> str | None:
        """See :class:`SlotTransport`."""
        return group_obstacle(group, device)

    def route(self, group: dist.ProcessGroup) -> str:
        """See :class:`SlotTransport`. Ranks' GPUs have the ranks' local numbers, as launchers set them up."""
        on_each_host = local_world_size()
        return plain_route(rank % on_each_host for rank in dist.get_process_group_ranks(group))

    def other_for(self, request: Request) -> Transport | None:
        """See :class:`SlotTransport`. Kernels of one route serve fewer forms; host memory serves the others of such a node."""
        if (other := super().other_for(request)) is not None:
            return other
        self.check_rows(request)
        state = self.group_state(request.group_name, request.x.device)
        if state.obstacle is not None or not state.selector.route or state.selector.serves(request, state):
            return None
        return get_transport(self.instead)

    def serves(self, request: Request) -> bool:
        """See :class:`SlotTransport`. The kernel that serves all messages is Triton's."""
        if request.norm.scale_columns and row_obstacle(request, LOADS_AND_STORES, wires=True, scales=True) is not None:
            return False  # neither push nor Triton's kernel makes these scales
        return EPILOGUES[request.norm.epilogue].triton_row is not None
