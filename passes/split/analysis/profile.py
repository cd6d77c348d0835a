"""The device profile of this process, agreed on with the other ranks: halves of different sizes would be a hang."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from tw_compile.agree import agreed, first_value
from tw_compile.config import OPTION_PREFIX, Config
from tw_compile.planning import DeviceProfile, load_profile, profile_of_device

logger = logging.getLogger("tw_compile")


def current_profile(config: Config) -> DeviceProfile | None:
    """What the halves are planned for; the same on all ranks of the process group.

    None where nothing is planned, and for devices without a profile.

    Raises:
        ValueError: ``tw_compile.device_profile`` is neither a profile's name nor a profile.
    """
    if config.split == "off" or (config.device_profile == "auto" and not torch.cuda.is_initialized()):
        return None
    return agreed(f"device_profile/{config.digest()}", lambda: _own(config), _agreed_profile)


def _agreed_profile(own: DeviceProfile | None, store: dist.Store, key: str) -> DeviceProfile | None:
    profile = first_value(own, store, key)
    if profile != own:
        logger.warning("tw_compile: device profiles differ between ranks; all use that of the rank that came first")
    return profile


def _own(config: Config) -> DeviceProfile | None:
    if config.device_profile == "auto":
        return profile_of_device(torch.cuda.get_device_name())
    try:
        return load_profile(config.device_profile)
    except ValueError as error:
        raise ValueError(f"{OPTION_PREFIX}device_profile: {error}") from error
