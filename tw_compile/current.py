"""What this process compiles for: the gate and the device profile. All ranks of the process group agree on both."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from tw_compile import compat
from tw_compile.agree import agreed, first_value
from tw_compile.calibration import LAYER, Calibration, MeasuredOn, in_use
from tw_compile.config import OPTION_PREFIX, Config
from tw_compile.gating.facts import Node, Settings
from tw_compile.gating.gate import Gate
from tw_compile.gating.layers import Layer
from tw_compile.kernels.collective.peer_access import known_link_obstacle, local_world_size
from tw_compile.kernels.collective.transports import NO_PEER_ACCESS
from tw_compile.own_gate import own_gate
from tw_compile.peer_routes import driver_version
from tw_compile.planning import DeviceProfile, Link, load_profile, profile_of_device
from tw_compile.planning.links import link_of_node
from tw_compile.sources import source_digest

logger = logging.getLogger("tw_compile")


def current_gate(config: Config, observe: Callable[[Settings], Settings] = lambda settings: settings) -> Gate:
    """The gate for graphs that this process compiles with ``config``; the same on all ranks of the process group.

    ``observe`` gets what environment and options say about the host's all_reduces, and returns what the host has set up.
    Until CUDA is in use there is nothing to decide but what wires cost, so ranks agree on a gate only where a file says that.

    Raises:
        ValueError: A thresholds file, or an environment variable, is wrong.
    """
    if not torch.cuda.is_initialized():
        if config.wire_accuracy is None:
            return own_gate(config, Node(None, False))
        return agreed(f"gate/cpu/{config.digest()}", lambda: own_gate(config, Node(None, False)), agreed_gate)
    calibrated, key = _calibrated(config)
    return agreed(f"gate/{config.digest()}{key}", lambda: _observed_gate(config, observe, calibrated), agreed_gate)


def _calibrated(config: Config) -> tuple[Calibration | None, str]:
    """The calibration that counts, and the part that it adds to the keys of the values that ranks agree on.

    All ranks have the same calibration, because they agreed on it. Before that they have none.
    """
    calibrated = in_use() if config.calibrate != "off" else None
    return calibrated, "" if calibrated is None else f"/{calibrated.measured_on.file_name}"


def _observed_gate(config: Config, observe: Callable[[Settings], Settings], calibrated: Calibration | None) -> Gate:
    layer = None if calibrated is None else Layer(LAYER, calibrated.measured_on.file_name, calibrated.table)
    gate = own_gate(config, current_node(), layer)
    return replace(gate, settings=observe(gate.settings))


def current_node() -> Node:
    """This process's device, and how the GPUs of its host's ranks reach each other's memory.

    Without a process group, all GPUs that this process sees are asked.
    """
    device = torch.cuda.current_device()
    multicast = bool(compat.multicast_support(device))
    ranks = local_world_size() if dist.is_initialized() else torch.cuda.device_count()
    obstacle = known_link_obstacle(range(ranks))
    capability = torch.cuda.get_device_capability(device)
    return Node(capability, multicast, peer_access=obstacle != NO_PEER_ACCESS, peer_atomics=obstacle is None)


def measured_on(device_name: str, world_size: int, node: Node, peer_access: bool) -> MeasuredOn:
    """What a calibration of ``world_size`` ranks of this host is about. ``peer_access``: whether kernels use it."""
    return MeasuredOn(
        device_name,
        node.device_class,
        world_size,
        peer_access,
        node.multicast,
        driver_version(),
        torch.__version__,
        source_digest()[:12],
    )


def agreed_gate(own: Gate, store: dist.Store, key: str) -> Gate:
    """The gate of the rank that came here first: user files, variables and devices may differ from host to host."""
    gate = first_value(own, store, key)
    if gate != own:
        logger.warning(
            "tw_compile: thresholds, device or settings differ between ranks; all use those of the rank that came first "
            "(%s, %s)",
            gate.node,
            ", ".join(table.file for table in gate.tables),
        )
    return gate


def current_profile(config: Config) -> DeviceProfile | None:
    """The device profile that the halves are planned for; None where nothing is planned, and for devices without a profile.

    It is the same on all ranks of the process group, as halves of different sizes would hang.

    Raises:
        ValueError: ``tw_compile.device_profile`` is neither a profile's name nor a profile.
    """
    if config.split == "off" or (config.device_profile == "auto" and not torch.cuda.is_initialized()):
        return None
    calibrated, key = _calibrated(config)
    return agreed(f"device_profile/{config.digest()}{key}", lambda: own_profile(config, calibrated), _agreed_profile)


def own_prefetch_bytes(config: Config) -> int:
    """How much of the next weights a call may bring into the L2 cache: as the option says, or the profile of this device.

    Ranks may differ: what a rank brings into its own cache changes nothing for others.

    Raises:
        ValueError: ``tw_compile.device_profile`` is neither a profile's name nor a profile.
    """
    if config.prefetch != "auto":
        return config.prefetch_bytes
    known = config.device_profile != "auto" or torch.cuda.is_initialized()
    profile = own_profile(config) if known else None
    return 0 if profile is None or profile.prefetch_bytes is None else profile.prefetch_bytes


def current_link(profile: DeviceProfile | None, config: Config) -> Link | None:
    """The link that messages travel over where GPUs have no peer access; the same on all ranks.

    None where ``profile``, the current one, is None: then nothing is planned.

    Raises:
        ValueError: The user's file is wrong.
    """
    if profile is None:
        return None
    calibrated, key = _calibrated(config)
    measured = None if calibrated is None else calibrated.link
    return agreed(f"link{key}", lambda: link_of_node(measured), _agreed_link)


def _agreed_link(own: Link, store: dist.Store, key: str) -> Link:
    link = first_value(own, store, key)
    if link != own:
        logger.warning("tw_compile: rates of links differ between ranks; all use those of the rank that came first")
    return link


def _agreed_profile(own: DeviceProfile | None, store: dist.Store, key: str) -> DeviceProfile | None:
    profile = first_value(own, store, key)
    if profile != own:
        logger.warning("tw_compile: device profiles differ between ranks; all use that of the rank that came first")
    return profile


def own_profile(config: Config, calibrated: Calibration | None = None) -> DeviceProfile | None:
    """The profile that this process would plan for if it were alone; ranks' measurements, for a device without a profile."""
    if config.device_profile == "auto":
        profile = profile_of_device(torch.cuda.get_device_name())
        return profile if profile is not None or calibrated is None else calibrated.profile
    try:
        return load_profile(config.device_profile)
    except ValueError as error:
        raise ValueError(f"{OPTION_PREFIX}device_profile: {error}") from error
