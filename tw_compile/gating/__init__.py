"""Whether a message should be fused: what an unfused all_reduce would use, and tables that say at which sizes fusing pays.

Nothing here imports torch. :mod:`tw_compile.current` asks torch about the process's device and group.
"""

from tw_compile.gating.backend import active_backend
from tw_compile.gating.facts import BACKENDS, Backend, HostFacts, Node, Settings
from tw_compile.gating.gate import Gate, Verdict
from tw_compile.gating.hosts import Dispatch, add_dispatch, host_names
from tw_compile.gating.layers import Layer, tables_of, threshold_layers
from tw_compile.gating.table import ANY, Entry, Source, Table, read_table, table_text

__all__ = [
    "ANY",
    "BACKENDS",
    "Backend",
    "Dispatch",
    "Entry",
    "Gate",
    "HostFacts",
    "Layer",
    "Node",
    "Settings",
    "Source",
    "Table",
    "Verdict",
    "active_backend",
    "add_dispatch",
    "host_names",
    "read_table",
    "table_text",
    "tables_of",
    "threshold_layers",
]
