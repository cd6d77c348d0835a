"""Hosts: the programs that compile a model and call the passes. Each has a folder, and only code there knows it by name.

Importing this package registers the hosts in it; ``import tw_compile`` does so. Neither torch nor a host program is imported.
"""

from tw_compile.hosts.contract import Host
from tw_compile.hosts.pytorch.host import PYTORCH
from tw_compile.hosts.registry import host_named, register
from tw_compile.hosts.vllm.host import VLLM

for host in (PYTORCH, VLLM):
    register(host)

__all__ = ["Host", "host_named", "register"]
