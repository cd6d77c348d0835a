"""The device profile of this process, agreed on with the other ranks: halves of different sizes would be a hang."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from tw_compile import compat
from tw_compile.config import OPTION_PREFIX, Config
from tw_compile.gating.current import agreed
from tw_compile.planning import DeviceProfile, load_profile, profile_of_device

logger = logging.getLogger("tw_compile")

_agreed: dict[str, tuple[object, DeviceProfile | None]] = {}


def current_profile(config: Config) -> DeviceProfile | None:
    """What the halves are planned for; the same on all ranks of the process group.

    None where nothing is planned, and for devices without a profile.

    Raises:
        ValueError: ``tw_compile.device_profile`` is neither a profile's name nor a profile.
    """
    if config.split == "off" or (config.device_profile == "auto" and not torch.cuda.is_initialized()):
        return None
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return _own(config)
    world, key = dist.group.WORLD, config.digest()
    known = _agreed.get(key)
    if known is None or known[0] is not world:
        own = _own(config)
        known = (world, agreed(own, compat.default_store(), f"device_profile/{key}"))
        _agreed[key] = known
        if known[1] != own:
            logger.warning("tw_compile: device profiles differ between ranks; all use that of the rank that came first")
    return known[1]


def _own(config: Config) -> DeviceProfile | None:
    if config.device_profile == "auto":
        return profile_of_device(torch.cuda.get_device_name())
    try:
        return load_profile(config.device_profile)
    except ValueError as error:
        raise ValueError(f"{OPTION_PREFIX}device_profile: {error}") from error
