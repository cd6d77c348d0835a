"""vLLM's entry in the registry of hosts."""

from __future__ import annotations

from tw_compile.gating.hosts import Dispatch
from tw_compile.hosts.contract import Host
from tw_compile.hosts.vllm.dispatch import active_backend, bounds
from tw_compile.hosts.vllm.operators import OPERATORS
from tw_compile.hosts.vllm.reasons import HostRefusal
from tw_compile.hosts.vllm.settings import NAMES, VllmSettings, read_settings

VLLM = Host(
    names=NAMES,
    dispatch=Dispatch(VllmSettings, read_settings, active_backend, bounds),
    operators=OPERATORS,
    rules="tw_compile.hosts.vllm.rules",
    refusals=HostRefusal,
    compiles_ranges=True,
    own_fusion="tw_compile.hosts.vllm.flashinfer:explained",
)
