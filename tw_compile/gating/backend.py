"""Which all_reduce would run if a message were not fused.

Each host has a pure function of its own for this, of values that all ranks know.
"""

from __future__ import annotations

from tw_compile.gating.facts import Active, Backend, Node, Settings
from tw_compile.gating.hosts import dispatch_of


def active_backend(
    node: Node, settings: Settings, *, world_size: int, dtype: str, nbytes: int, hosts: int = 1
) -> Active:
    """What an all_reduce of ``nbytes`` per rank would use.

    GPUs of one host that have peer access are assumed to be joined by NVLink, each with all others, like the tables' machines.
    """
    if settings.backend != "auto":
        return Active(Backend(settings.backend), "requested")
    return dispatch_of(settings.host).active(node, settings, world_size, dtype, nbytes, hosts)


def backend_bounds(settings: Settings) -> set[int]:
    """Every number of bytes at which :func:`active_backend` may change its answer."""
    return set() if settings.backend != "auto" else dispatch_of(settings.host).bounds(settings)
