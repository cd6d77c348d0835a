"""Whether a vLLM process uses the passes, and with which options."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from tw_compile.config import Config
from tw_compile.environment import enabled
from tw_compile.hosts.vllm.settings import NAMES

KEY = "tw_compile"
"""The key of the passes' options in vLLM's ``additional_config``."""

_GIVEN_BY_VLLM = ("host", "disable_custom_all_reduce")


def switched_off(environment: Mapping[str, str]) -> bool:
    """Whether ``TW_COMPILE=0`` switches the passes off, whatever else asks for them; ValueError for values but 0 and 1."""
    return enabled(environment) is False


def asked_options(additional_config: object, environment: Mapping[str, str]) -> dict[str, Any] | None:
    """The options that the user gave; None where nobody asked for the passes.

    ``additional_config`` is vLLM's. Its entry ``tw_compile`` is a table of :class:`tw_compile.Config`'s fields, true or false.

    Raises:
        ValueError: The entry is no table, true or false; it is missing, and another one has nearly its name; or ``TW_COMPILE``
            has a bad value.
    """
    if switched_off(environment):
        return None
    entries = additional_config if isinstance(additional_config, Mapping) else {}
    near = difflib.get_close_matches(KEY, [str(key) for key in entries], n=1, cutoff=0.8)
    if near and KEY not in entries:
        raise ValueError(f"additional_config: expected the key {KEY!r}, got {near[0]!r}")
    asked = entries.get(KEY)
    if isinstance(asked, Mapping):
        return dict(asked)
    if asked not in (None, True, False):
        raise ValueError(f"additional_config[{KEY!r}]: expected options, true or false, got {asked!r}")
    return {} if asked or (asked is None and enabled(environment)) else None


def vllm_config(options: Mapping[str, Any], version: str, disable_custom_all_reduce: bool) -> Config:
    """The passes' configuration in vLLM ``version``.

    Raises:
        ValueError, TypeError: An option is unknown, has a bad value, or follows vLLM and so can't be given.
    """
    for key in _GIVEN_BY_VLLM:
        if key in options:
            raise ValueError(
                f"additional_config[{KEY!r}]: expected no {key!r}, which follows vLLM, got {options[key]!r}"
            )
    given = {"host": host_of(version), "disable_custom_all_reduce": disable_custom_all_reduce}
    return Config.from_mapping({**options, **given})


def host_of(version: str) -> str:
    """The newest known dispatch that is not newer than vLLM ``version``; the oldest dispatch for still older versions."""
    minor = _minor(version)
    fitting = [host for host in NAMES if minor is None or _minor(host.removeprefix("vllm-")) <= minor]  # type: ignore[operator]
    return fitting[-1] if fitting else NAMES[0]


def _minor(version: str) -> tuple[int, int] | None:
    """``(0, 24)`` of ``0.24.0``; None for versions that a build from source may have. Such builds are taken to be new."""
    parts = version.split(".")
    if len(parts) < 2 or not (parts[0].isdecimal() and parts[1].isdecimal()) or ".dev" in version:
        return None
    return int(parts[0]), int(parts[1])
