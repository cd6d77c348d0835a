"""What a prefill is predicted to gain on this machine, for models that many people know. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tw_compile.calibration import Calibration
from tw_compile.kernels.collective.planned_wires import planned_wires
from tw_compile.kernels.collective.wires import EXACT
from tw_compile.planning import DeviceProfile, Link, plan_layer, profile_of_device
from tw_compile.planning.links import link_of_node
from tw_compile.planning.presets import preset_layer

Report = dict[str, Any]

MODELS = ("llama-3.1-8b", "llama-3.3-70b")
TOKENS = 2048
WIRE = "int8"
"""Also predicted where rows go through host memory. There it gains most, and no default takes it, as it changes results."""


def expected_gains(
    world_size: int, transport: str | None, device_name: str, calibrations: Sequence[Calibration]
) -> list[Report]:
    """A row for each model and wire: its name, and how many times faster its layer is planned to be than the unfused one.

    Empty where nothing is known of the device yet, or of the transport.

    Raises:
        ValueError: The user's own profile or link is wrong.
    """
    calibrated = next((one for one in calibrations if one.measured_on.world_size == world_size), None)
    profile = profile_of_device(device_name)
    if profile is None and calibrated is not None:
        profile = calibrated.profile
    if profile is None or transport is None:
        return []
    kernel = profile.kernel_of_transport(transport, named=False)
    if kernel is not None:
        return _rows(profile, world_size, kernel, None, (EXACT,))
    link = link_of_node(None if calibrated is None else calibrated.link)
    if transport not in link.transports:
        return []
    return _rows(profile, world_size, transport, link, (EXACT, WIRE) if transport == "host" else (EXACT,))


def _rows(
    profile: DeviceProfile, world_size: int, kernel: str, link: Link | None, wires: Sequence[str]
) -> list[Report]:
    rows = []
    for model in MODELS:
        known = preset_layer(model, world_size)
        assert known is not None, f"{model} is a shipped model"
        layer, _ = known
        for wire in wires:
            shares = planned_wires(layer.hidden_size, wire, wire)
            plan = plan_layer(profile, layer, TOKENS, kernel=kernel, link=link, wires=shares)
            rows.append({"model": model, "tokens": TOKENS, "wire": wire, "mode": plan.mode, "gain": plan.gain})
    return rows


def in_words(rows: Sequence[Report]) -> str:
    """The rows as a line, such as ``llama-3.1-8b 1.83x, with wire int8 at most 2.31x; llama-3.3-70b 1.67x, ...``."""
    words = {model: "" for model in dict.fromkeys(row["model"] for row in rows)}
    for row in rows:
        if row["wire"] == EXACT:
            words[row["model"]] += f"{row['model']} {row['gain']:.2f}x"
        else:
            words[row["model"]] += f", with wire {row['wire']} at most {row['gain']:.2f}x"
    return "; ".join(words.values())
