"""The hosts whose dispatch of an unfused all_reduce is known, by name.

Hosts add themselves here. This module imports none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tw_compile.gating.facts import Active, HostFacts, Node, Settings

DEFAULT_HOST = "pytorch"
"""The host that compiles a model where no other host is named."""


@dataclass(frozen=True)
class Dispatch:
    """What a host does with an all_reduce that is not fused. All functions are pure, as ranks must get the same results.

    Attributes:
        settings: The class of what the host has been told about its all_reduces.
        read: Makes ``settings`` from the host's name, environment variables and facts about the process. It reads only the
            host's own variables, and raises a ValueError that names a wrong one.
        active: From node, ``settings``, world size, dtype, bytes of a rank's message and number of hosts to the backend.
        bounds: Every number of bytes at which ``active`` may change its answer.
    """

    settings: type[Settings]
    read: Callable[[str, Mapping[str, str], HostFacts], Settings]
    active: Callable[[Node, Any, int, str, int, int], Active]
    bounds: Callable[[Any], set[int]]


dispatches: dict[str, Dispatch] = {}


def add_dispatch(name: str, dispatch: Dispatch) -> None:
    """Make the host ``name`` known.

    Raises:
        ValueError: Another host has that name.
    """
    if dispatches.get(name, dispatch) != dispatch:
        raise ValueError(f"name: expected one that no other host has, got {name!r}")
    dispatches[name] = dispatch


def host_names() -> tuple[str, ...]:
    """All hosts that are known, in the order in which they became so."""
    return tuple(dispatches)


def dispatch_of(host: str) -> Dispatch:
    """The dispatch of a host that is known; ValueError for another."""
    if host not in dispatches:
        raise ValueError(f"host: expected one of {', '.join(host_names())}, got {host!r}")
    return dispatches[host]
