"""The gate that this process would use if it were alone, from options, environment variables and tables. Imports no torch.

And whether these tables say what a node does, or a calibration does.
"""

from __future__ import annotations

import importlib.util
import os
import sys

from tw_compile.config import Config
from tw_compile.gating.facts import Backend, HostFacts, Node, Settings
from tw_compile.gating.gate import Gate
from tw_compile.gating.layers import OFF_SOURCE, Layer, tables_of, threshold_layers
from tw_compile.gating.wire_accuracy import load_accuracy
from tw_compile.kernels.transports.selection import shipped_steps, user_steps
from tw_compile.planning import profile_of_device


def own_gate(config: Config, node: Node, calibrated: Layer | None = None) -> Gate:
    """The gate for ``node``. ``calibrated``: see :func:`threshold_layers`.

    Raises:
        ValueError: A thresholds file, or an environment variable, is wrong.
    """
    facts = HostFacts(
        config.all_reduce_backend,
        _one_shot_bytes(),
        config.disable_custom_all_reduce,
        installed=lambda package: importlib.util.find_spec(package) is not None,
    )
    settings = Settings.from_environment(config.host, os.environ, facts)
    layers = threshold_layers(config.thresholds, node.device_class, calibrated=calibrated)
    accuracy = None if config.wire_accuracy is None else load_accuracy(config.wire_accuracy)
    return Gate(node, settings, tables_of(layers, node.device_class), accuracy)


def calibrates(config: Config) -> bool:
    """Whether a calibration may count, if the node is not measured otherwise: it is about the transport that ``auto`` takes."""
    return config.calibrate != "off" and config.fuse and config.transport == "auto"


def is_measured(config: Config, node: Node, device_name: str, world_size: int, transport: str) -> bool:
    """Whether tables that are shipped, or the user's, say what such ranks do. Then no calibration counts.

    Without a profile of the device the planner needs a calibration, whatever tables there are: else nothing would be split.

    Raises:
        ValueError: A thresholds file, a profile of the user's, or an environment variable, is wrong.
    """
    plans = config.split != "off" and config.device_profile == "auto"
    if plans and profile_of_device(device_name) is None:
        return False
    steps = any(of(device_name, world_size, transport) for of in (user_steps, shipped_steps))
    entries = own_gate(config, node).entries(world_size, Backend.NCCL)
    return steps and any(entry.source.kind == "measured" or entry.source == OFF_SOURCE for entry in entries)


def _one_shot_bytes() -> int:
    """The largest message, in bytes, that Inductor gives to its one-shot kernel.

    Only Python code sets this option. So it has its default, 0, while nothing has imported Inductor.
    """
    if "torch._inductor" not in sys.modules:
        return 0
    from tw_compile import compat

    return compat.one_shot_all_reduce_bytes()
