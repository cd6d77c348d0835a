"""More ranks than GPUs, for checks of results where there are not enough GPUs.

The driver runs the processes of one GPU in turn, a slice of time each, so kernels that wait for each other do make progress:
a slice or more for each wait. NCCL refuses two ranks on one GPU, so gloo joins them.

With CUDA's multi-process service (MPS) they run at the same time, and checks are as long as where each rank has a GPU. Start it
as the same user, and give the checks its folder::

    export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps CUDA_MPS_LOG_DIRECTORY=/tmp/mps-log
    mkdir -p $CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_LOG_DIRECTORY && nvidia-cuda-mps-control -d
    python tests/gpu/checks --world-size 8 --gpus 2 --only host_ --timeout 580
    echo quit | nvidia-cuda-mps-control
"""

from __future__ import annotations

import os

from tw_compile.kernels.collective import p2p_group

IN_TURN_SHORTENED_BY = 100
"""What checks of very many calls divide their number by where ranks have a GPU in turn: a call takes milliseconds there."""
MPS = "CUDA_MPS_PIPE_DIRECTORY"

NEED_NCCL = ("nccl_", "capture_without_room_uses_nccl")
"""How the names of checks begin that are about NCCL, or capture what gloo would have to do on the host."""


def shortened_by() -> int:
    """What checks of very many calls divide their number by where ranks share GPUs. The same on all ranks."""
    return 1 if os.environ.get(MPS) else IN_TURN_SHORTENED_BY


def share_gpus() -> None:
    """From now on the P2P transport of this process serves groups whose ranks share GPUs, as products never may.

    Everything else that rules a group out still does. Before the first group is made.
    """
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # read at every rendezvous
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this host, whose name may not resolve
    p2p_group.sharing_obstacle = lambda facts: None
