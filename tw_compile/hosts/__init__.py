"""Hosts: what compiles a model and calls the passes. Each has a folder, and only there it is known by name.

Importing this package registers those that are here, which ``import tw_compile`` does. It imports neither torch nor a host.
"""

from tw_compile.hosts.contract import Host
from tw_compile.hosts.pytorch.host import PYTORCH
from tw_compile.hosts.registry import host_named, register
from tw_compile.hosts.vllm.host import VLLM

for host in (PYTORCH, VLLM):
    register(host)

__all__ = ["Host", "host_named", "register"]
