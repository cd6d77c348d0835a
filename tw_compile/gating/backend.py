"""Which all_reduce would run if a message were not fused: a pure function of what all ranks know.

For plain PyTorch that is NCCL (or Inductor's one-shot kernel, where that is switched on). vLLM has several; its rules and size
tables are in :mod:`tw_compile.gating.vllm`.
"""

from __future__ import annotations

from tw_compile.gating import vllm
from tw_compile.gating.facts import Active, Backend, Node, Settings


def active_backend(
    node: Node, settings: Settings, *, world_size: int, dtype: str, nbytes: int, hosts: int = 1
) -> Active:
    """What an all_reduce of ``nbytes`` per rank would use.

    GPUs of one host are taken to be joined by NVLink, all with all, as the tables' machines are.
    """
    if settings.backend != "auto":
        return Active(Backend(settings.backend), "requested")
    if settings.host == "pytorch":
        if nbytes <= settings.one_shot_max_bytes and hosts == 1:
            return Active(Backend.SYMM_MEM_ONE_SHOT, f"Inductor's, up to {settings.one_shot_max_bytes} bytes")
        return Active(Backend.NCCL, "torch.distributed")
    return vllm.active_backend(node, settings, world_size, dtype, nbytes, hosts)


def backend_bounds(settings: Settings) -> set[int]:
    """Every number of bytes at which :func:`active_backend` may change its answer."""
    if settings.backend != "auto":
        return set()
    if settings.host == "pytorch":
        return {settings.one_shot_max_bytes}
    return vllm.bounds()
