"""Facts about this machine that decide how ranks exchange rows. Nothing here creates a context or a communicator.

Importing torch takes seconds. So torch is imported only where there is a driver (``gpus.py``); without one torch has no GPU.
"""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from typing import Any

from tw_compile.calibration import LAYER, Calibration, default_folder, merged_table
from tw_compile.config import Config
from tw_compile.environment import peer_access
from tw_compile.files import user_file
from tw_compile.gating.facts import Node
from tw_compile.gating.gate import Gate
from tw_compile.gating.layers import Layer, threshold_layers
from tw_compile.gating.table import size
from tw_compile.harness.versions import has_driver, installed_version, nccl_version, versions
from tw_compile.kernels.collective.transports import GroupFacts, choose_transport
from tw_compile.kernels.transports import selection
from tw_compile.own_gate import own_gate
from tw_compile.planning.device import USER_FILE as PROFILE_FILE
from tw_compile.planning.device import shipped_profile, user_profile
from tw_compile.runner import topology
from tw_compile.runner.expected import expected_gains
from tw_compile.runner.topology import NO_GPUS, WORLD_SIZES, Gpus
from tw_compile.torch_files import cuda_version, has_gloo, has_symmetric_memory

Report = dict[str, Any]

# The report shows which transport is chosen for these sizes, which stand for any Llama-like model.
_HIDDEN_SIZE = 8192
_ELEMENT_BYTES = 2
_DISABLE_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


def examine() -> Report:
    """Everything that ``tw-compile doctor`` shows."""
    found = _gpus()
    gpus = found.each
    nvml = topology.nvml(found.uuids)
    calibrations = found.calibrations
    calibrated = calibrated_layer(calibrations, found.node) if gpus else None
    gate = own_gate(Config(), found.node, calibrated)
    return {
        "schema_version": 1,
        "command": "doctor",
        "versions": {
            **versions(),
            "triton": installed_version("triton"),
            "cuda": cuda_version(),
            "driver": nvml["driver"],
            "nccl": nccl_version(),
            "os": platform.platform(),
            "cpus": os.cpu_count(),
        },
        "gpus": gpus,
        "peer_access": found.reachable,
        "native_atomics": found.atomics,
        "routes_tried": None if found.tried is None else asdict(found.tried),
        "nvlinks": nvml["links"],
        "pcie": nvml["pcie"],
        "shared_memory": topology.shared_memory(),
        "peer_access_used": peer_access(),
        "symmetric_memory": {
            "importable": has_symmetric_memory(),
            "multicast_supported": found.multicast,
            _DISABLE_MULTICAST: os.environ.get(_DISABLE_MULTICAST),
        },
        "thresholds": thresholds_report(gate, calibrated),
        "kernel_tables": kernel_tables_report(gpus, calibrations),
        "device_profile": device_profile_report(gpus, calibrations),
        "plans": [_plan(world_size, found, gate) for world_size in WORLD_SIZES],
    }


def _gpus() -> Gpus:
    if not has_driver():
        return NO_GPUS
    from tw_compile.runner.gpus import examine as examine_gpus

    return examine_gpus()


def calibrated_layer(calibrations: list[Calibration], node: Node) -> Layer:
    """The thresholds that ``calibrations`` hold, as a layer of tables; an empty one where there are none."""
    return Layer(LAYER, str(default_folder() or "-"), merged_table(calibrations, node.device_class))


def thresholds_report(gate: Gate, calibrated: Layer | None) -> Report:
    """Where the tables come from, the lowest layer first; a higher one wins."""
    device_class = gate.node.device_class
    layers = []
    for layer in threshold_layers("auto", device_class, calibrated=calibrated):
        if layer.table is None:
            state = "absent" if layer.name in ("user file", LAYER) else "not set"
        elif layer.table not in gate.tables:
            state = f"not used: it is about {layer.table.device_class}, this device is {device_class}"
        else:
            count = len(layer.table.entries)
            state = f"{count} range{'s' * (count != 1)}"
        layers.append({"layer": layer.name, "from": layer.file, "state": state})
    return {"device_class": device_class, "digest": gate.digest(), "layers": layers}


def kernel_tables_report(gpus: list[Report], calibrations: list[Calibration]) -> Report:
    """Where the choice of kernels comes from, the lowest layer first; a higher one wins for the world sizes that it has."""
    file, table = user_file(selection.USER_FILE), selection.user_table()
    name = gpus[0]["name"] if gpus else None
    own = sorted({step.world_size for step in table.get(name or "", ())})
    state = f"{_ranks(own)}" if own else f"not used: it is about {', '.join(table)}" if table else "absent"
    measured = sorted({n for n in WORLD_SIZES if name and selection.shipped_steps(name, n)})
    shipped = {"layer": "shipped", "from": "configs/kernels", "state": _ranks(measured)}
    ranks = [calibration.measured_on.world_size for calibration in calibrations]
    calibrated = {"layer": LAYER, "from": str(default_folder() or "-"), "state": _ranks(ranks) if ranks else "absent"}
    user = {"layer": "user file", "from": str(file or "-"), "state": state}
    return {"layers": [shipped, *([calibrated] if gpus else []), user]}


def _ranks(world_sizes: list[int]) -> str:
    return f"{', '.join(map(str, world_sizes))} ranks" if world_sizes else "none for this device"


def device_profile_report(gpus: list[Report], calibrations: list[Calibration]) -> Report:
    """Where the planner's profile comes from, the lowest layer first. The layer ``option`` is an option of a compile."""
    name = gpus[0]["name"] if gpus else None
    shipped, own = shipped_profile(name) if name else None, user_profile()
    measured = next((calibration.profile for calibration in calibrations if calibration.profile is not None), None)
    calibrated = {
        "layer": LAYER,
        "from": str(default_folder() or "-"),
        "state": "absent" if measured is None else measured.name,
    }
    if own is None:
        state = "absent"
    elif name in own.device_names:
        state = own.name + (f", halves of {len(own.halves)} FFNs measured" if own.halves else "")
    else:
        state = f"not used: it is about {', '.join(own.device_names)}"
    return {
        "layers": [
            *([calibrated] if gpus else []),  # the lowest: made only for a device that nothing else is known about
            {
                "layer": "shipped",
                "from": "configs/devices",
                "state": shipped.name if shipped else "none for this device",
            },
            {"layer": "user file", "from": str(user_file(PROFILE_FILE) or "-"), "state": state},
            {"layer": "option", "from": "tw_compile.device_profile", "state": "not set"},
        ]
    }


def _plan(world_size: int, found: Gpus, gate: Gate) -> Report:
    """What a group of ``world_size`` ranks of this host would use."""
    plan: Report = {"world_size": world_size}
    gpus = found.each
    if world_size not in found.groups:
        choice = choose_transport(GroupFacts("cpu", world_size, 1), _HIDDEN_SIZE, _ELEMENT_BYTES)
        why = "no GPU" if not gpus else f"{world_size} ranks need as many GPUs, here are {len(gpus)}"
        return plan | {
            "device": "cpu",
            "transport": choice.name,
            "transport_why": f"{why}; {choice.reason}",
            "all_reduce": "gloo" if has_gloo() else None,
            "all_reduce_why": "the backend of CPU tensors",
        }
    choice = choose_transport(found.groups[world_size], _HIDDEN_SIZE, _ELEMENT_BYTES)
    transport = choice.name
    return plan | {
        "device": "cuda",
        "transport": transport,
        "transport_why": choice.reason,
        "kernels": kernels_by_size(gpus[0]["name"], world_size, transport) if transport in ("p2p", "host") else None,
        "all_reduce": "nccl" if found.nccl else None,
        "all_reduce_why": "torch's all_reduce of CUDA tensors" if found.nccl else "torch has no NCCL",
        "thresholds": [
            f"from {size(crossover.nbytes)} {'fused' if crossover.fused else 'gated'}, unfused {crossover.backend} "
            f"({crossover.backend_why}): {crossover.entry}; {crossover.source}"
            for crossover in gate.crossovers(_ELEMENT_BYTES * _HIDDEN_SIZE, world_size=world_size, dtype="bfloat16")
        ],
        "expected": expected_gains(world_size, transport, gpus[0]["name"], found.calibrations),
    }


def kernels_by_size(device_name: str, world_size: int, transport: str) -> str:
    """Which kernel of ``p2p`` or ``host`` serves messages up to which size."""
    steps = selection.steps_for(device_name, world_size, transport)
    *smaller, last = steps or selection.default_steps(transport, world_size)
    named = [f"{step.algorithm} ({step.sms} CTAs) to {step.up_to_bytes / 2**20:g} MiB" for step in smaller]
    if last.up_to_bytes < selection.UNLIMITED:
        named.append(f"{last.algorithm} ({last.sms} CTAs) to {last.up_to_bytes / 2**20:g} MiB and beyond")
    else:
        named.append(f"{last.algorithm} ({last.sms} CTAs) beyond")
    measured = "" if steps else f" (none measured for {device_name}, {world_size} ranks)"
    return ", ".join(named) + measured
