"""PyTorch's entry in the registry of hosts: the functional collective, and NCCL behind it."""

from __future__ import annotations

from collections.abc import Mapping

from tw_compile.gating.facts import Active, Backend, HostFacts, Node, Settings
from tw_compile.gating.hosts import DEFAULT_HOST, Dispatch
from tw_compile.hosts.contract import Host
from tw_compile.passes.operators import AllReduceOperator


def read_settings(host: str, environment: Mapping[str, str], facts: HostFacts) -> Settings:
    """The settings of plain PyTorch. They depend on no environment variable."""
    return Settings(host, facts.backend, facts.one_shot_max_bytes)


def active_backend(node: Node, settings: Settings, world_size: int, dtype: str, nbytes: int, hosts: int) -> Active:
    """NCCL, or Inductor's one-shot kernel where that is switched on and can run."""
    if nbytes <= settings.one_shot_max_bytes and hosts == 1 and node.peer_access:
        return Active(Backend.SYMM_MEM_ONE_SHOT, f"Inductor's, up to {settings.one_shot_max_bytes} bytes")
    return Active(Backend.NCCL, "torch.distributed")


def bounds(settings: Settings) -> set[int]:
    return {settings.one_shot_max_bytes}


PYTORCH = Host(
    names=(DEFAULT_HOST,),
    dispatch=Dispatch(Settings, read_settings, active_backend, bounds),
    operators=(AllReduceOperator("_c10d_functional::all_reduce", reduce_op="reduce_op", waited_for=True),),
)
