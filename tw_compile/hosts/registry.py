"""The registry of hosts. It tells the passes and the gate about hosts, because these import no host."""

from __future__ import annotations

from tw_compile.gating.hosts import add_dispatch, host_names
from tw_compile.hosts.contract import Host
from tw_compile.passes.operators import declare, declare_rules
from tw_compile.passes.reasons import declare_refusals

registered_hosts: list[Host] = []


def register(host: Host) -> None:
    """Tell the passes about the host's operators, rules and refusals, and the gate about its dispatch.

    Registering a host again changes nothing.

    Raises:
        ValueError: Another host has one of its names, or the name of an operator is taken. Then nothing is registered.
    """
    if host in registered_hosts:
        return
    taken = [name for name in host.names if name in host_names()]
    if taken:
        raise ValueError(f"names: expected some that no other host has, got {', '.join(taken)}")
    declare(*host.operators)
    for name in host.names:
        add_dispatch(name, host.dispatch)
    if host.refusals is not None:
        declare_refusals(host.refusals)
    if host.rules:
        declare_rules(host.rules)
    registered_hosts.append(host)


def host_named(name: str) -> Host:
    """The host that option ``host`` calls ``name``; ValueError for a name that none has."""
    for host in registered_hosts:
        if name in host.names:
            return host
    raise ValueError(f"host: expected one of {', '.join(host_names())}, got {name!r}")
