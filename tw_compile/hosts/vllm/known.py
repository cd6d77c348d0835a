"""What is known of a node before its workers start: its device profile and its link, and whether the ranks will know more.

The layers are those of the workers (:mod:`tw_compile.current`): a profile is the user's, else a shipped one, else what ranks
have measured. The rates of host memory are the user's, else what ranks have measured, else the shipped ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from tw_compile.calibration import Calibration, default_folder, stored
from tw_compile.config import Config
from tw_compile.gating.facts import Node
from tw_compile.gating.gate import Gate
from tw_compile.own_gate import calibrates, is_measured
from tw_compile.planning import DeviceProfile, Link, load_profile, profile_of_device
from tw_compile.planning.links import link_of_node


class Known(NamedTuple):
    """Profile and link; None where nothing is known, and for the link where GPUs reach each other's memory.

    ``by_ranks``: the ranks plan by what they have measured, or measure when they have loaded the model. They agree on it. Other
    processes may have read other files, so a plan of theirs is a forecast.
    """

    profile: DeviceProfile | None
    link: Link | None
    by_ranks: bool


def known_before(
    config: Config, device_name: str | None, ranks: int, choices: tuple[Gate, ...], measures: bool = True
) -> Known:
    """What is known of a node of ``ranks`` ranks.

    ``device_name`` None: there is no GPU. ``choices``: the gates for the kinds of node that the workers may find.
    ``measures``: whether the workers would measure a node that nobody has measured, if options say so.

    Raises:
        ValueError: The option ``device_profile``, or a file of the user's, is wrong.
    """
    named = config.device_profile != "auto"
    profile = load_profile(config.device_profile) if named else (device_name and profile_of_device(device_name)) or None
    peers = any(gate.node.peer_kernels for gate in choices)
    nodes: list[Node] = []
    if device_name is not None and calibrates(config) and (profile is None or not peers):
        both = [replace(choices[0].node, multicast=multicast) for multicast in (True, False)]
        transport = "p2p" if peers else "host"
        nodes = [node for node in both if not is_measured(config, node, device_name, ranks, transport)]
    found = None if device_name is None else _stored(device_name, ranks, nodes)
    if profile is None and found is not None:
        profile = found.profile
    link = None if peers else link_of_node(None if found is None else found.link)
    will_measure = found is None and bool(nodes) and measures and config.calibrate == "auto"
    return Known(profile, link, will_measure or (found is not None and profile is not None))


def _stored(device_name: str, ranks: int, nodes: list[Node]) -> Calibration | None:
    """What ranks have measured on one of ``nodes``, which differ in multicast: only the workers can ask for that."""
    if not nodes:
        return None
    from tw_compile.current import measured_on  # brings torch along

    files = (measured_on(device_name, ranks, node, node.peer_kernels) for node in nodes)
    return next((found for here in files if (found := stored(default_folder(), here)) is not None), None)
