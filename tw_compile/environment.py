"""The environment variables of tw_compile: one reader for each, so that everything reads a value alike. Empty means unset."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

ENABLE = "TW_COMPILE"
STRICT = "TW_COMPILE_STRICT"
THRESHOLDS = "TW_COMPILE_THRESHOLDS"
SPIN_LIMIT = "TW_COMPILE_SPIN_LIMIT"
CHECK_INPUTS = "TW_COMPILE_CHECK_INPUTS"
CACHE_DIR = "TW_COMPILE_CACHE_DIR"
PEER_ACCESS = "TW_COMPILE_PEER_ACCESS"
PEER_ATOMICS = "TW_COMPILE_PEER_ATOMICS"
REQUIRE_GPUS = "TW_COMPILE_REQUIRE_GPUS"

_MOST = 2**31 - 1


def enabled(environment: Mapping[str, str] = os.environ) -> bool | None:
    """What ``TW_COMPILE`` says: to use the passes, or not to; None where it is unset.

    vLLM uses the passes if the variable is 1. torch.compile's backend ``tw_compile`` uses them unless it is 0.
    """
    return _switch(environment, ENABLE)


def strict(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether internal errors raise, by ``TW_COMPILE_STRICT``."""
    return _switch(environment, STRICT) or False


def thresholds(environment: Mapping[str, str] = os.environ) -> str:
    """``TW_COMPILE_THRESHOLDS``: the path of a table, ``off``, or ``auto`` where it is unset.

    A path must exist and be a regular file, no folder or FIFO. Whoever reads the file checks its content.
    """
    value = environment.get(THRESHOLDS) or "auto"
    if value in ("auto", "off"):
        return value
    try:
        path = Path(value).expanduser()
        regular = stat.S_ISREG(path.stat().st_mode)
        reason = "no regular file"
    except (OSError, RuntimeError, ValueError) as error:
        regular, reason = False, str(error)
    if not regular:
        raise ValueError(f"{THRESHOLDS}: expected auto, off or a file that can be read, got {value!r} ({reason})")
    return str(path)


def spin_limit(environment: Mapping[str, str] = os.environ) -> int:
    """Polls (about 1 us each) before a wait for another rank gives up, from ``TW_COMPILE_SPIN_LIMIT``; 0 (default): never."""
    return _number(environment, SPIN_LIMIT)


def checks_inputs(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether ranks compare operands that must be equal on all of them, by ``TW_COMPILE_CHECK_INPUTS``."""
    return _switch(environment, CHECK_INPUTS) or False


def cache_dir(environment: Mapping[str, str] = os.environ) -> Path | None:
    """``TW_COMPILE_CACHE_DIR``: the folder of compiled kernels; None where it is unset.

    No value is refused: with a folder that cannot be written to, kernels are compiled again.
    """
    value = environment.get(CACHE_DIR)
    return Path(value) if value else None


def peer_access(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether kernels may use peer access between GPUs that have it: yes, unless ``TW_COMPILE_PEER_ACCESS`` is 0."""
    return _switch(environment, PEER_ACCESS) is not False


def peer_atomics(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether links that have native atomics count as such: yes, unless ``TW_COMPILE_PEER_ATOMICS`` is 0, for tests."""
    return _switch(environment, PEER_ATOMICS) is not False


def required_gpus(environment: Mapping[str, str] = os.environ) -> int:
    """How many GPUs tests must find, by ``TW_COMPILE_REQUIRE_GPUS``; 0 where it is unset."""
    return _number(environment, REQUIRE_GPUS)


def check_environment(environment: Mapping[str, str] = os.environ) -> None:
    """Read every variable that can be wrong, so that a command fails at once, not later or in another process.

    Raises:
        ValueError: The message names the variable, what was expected and what came.
    """
    for read in (enabled, strict, thresholds, spin_limit, checks_inputs, peer_access, peer_atomics, required_gpus):
        read(environment)


def _switch(environment: Mapping[str, str], name: str) -> bool | None:
    value = environment.get(name)
    if not value:
        return None
    if value not in ("0", "1"):
        raise ValueError(f"{name}: expected '0' or '1', got {value!r}")
    return value == "1"


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name) or "0"
    number = int(text) if text.isascii() and text.isdecimal() and len(text) <= len(str(_MOST)) else -1
    if not 0 <= number <= _MOST:
        raise ValueError(f"{name}: expected an integer from 0 to {_MOST}, got {text!r}")
    return number
