"""Where tables come from: what is shipped, what ranks measured, the user's file, the environment, an option; later ones win.

A table of a higher layer replaces the ranges of the world sizes and backends that it has, and no others. A table about another
class of devices is read, so that its errors show, but not used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from tw_compile import environment as variables
from tw_compile.files import read_if_there, read_text, user_file
from tw_compile.gating.table import ANY, DEVICE_CLASSES, Entry, Source, Table, read_table

OFF = "off"
AUTO = "auto"
_FILE_NAME = "thresholds.toml"

OFF_SOURCE = Source("off", "default", ("thresholds are off: everything that can be fused is fused",))
"""The source of the only entry where thresholds are off."""
_OFF_TABLE = Table("no table", "generic", (Entry(ANY, ANY, 0, None, "fused", AUTO, OFF_SOURCE),))


@dataclass(frozen=True)
class Layer:
    """One place that tables come from: its name, the file, and the table there, None when there is no file."""

    name: str
    file: str
    table: Table | None


def threshold_layers(
    chosen: str,
    device_class: str,
    environment: Mapping[str, str] = os.environ,
    calibrated: Layer | None = None,
) -> list[Layer]:
    """All layers, the lowest first.

    Args:
        chosen: ``auto``, ``off``, or the file that an option names.
        calibrated: The layer of what ranks measured by themselves; None where there is no such layer.

    Raises:
        ValueError: A file cannot be read, or is wrong; the message names it and the key.
    """
    layers = [Layer("shipped", f"{name}.toml", _shipped(name)) for name in dict.fromkeys(("generic", device_class))]
    layers += [] if calibrated is None else [calibrated]
    own = user_file(_FILE_NAME, environment)
    text = read_if_there(own, "thresholds")
    layers.append(Layer("user file", str(own or "-"), None if text is None else read_table(text, str(own))))
    layers.append(_named(variables.THRESHOLDS, variables.thresholds(environment), f"{variables.THRESHOLDS}: "))
    layers.append(_named("option", chosen, ""))
    return layers


def _named(layer: str, value: str, who: str) -> Layer:
    """The layer that a variable or an option names; ``who`` goes before what error messages say about the file."""
    if value == OFF:
        return Layer(layer, OFF, _OFF_TABLE)
    if value == AUTO:
        return Layer(layer, AUTO, None)
    text = read_text(_expanded(value), f"{who}thresholds")
    try:
        return Layer(layer, value, read_table(text, value))
    except ValueError as error:
        raise ValueError(f"{who}{error}") from error


def _expanded(file: str) -> Path:
    try:
        return Path(file).expanduser()
    except RuntimeError as error:
        raise ValueError(f"thresholds: expected a file that can be read, got {file!r} ({error})") from error


def tables_of(layers: list[Layer], device_class: str) -> tuple[Table, ...]:
    """The tables that count for a device class, highest layer first."""
    fitting = [layer.table for layer in layers if layer.table and layer.table.device_class in (device_class, "generic")]
    return tuple(reversed(fitting))


def shipped_tables() -> dict[str, Table]:
    """Every table of ``configs/thresholds`` by its device class."""
    return {name: _shipped(name) for name in DEVICE_CLASSES}


@cache
def _shipped(device_class: str) -> Table:
    file = resources.files("tw_compile.configs") / "thresholds" / f"{device_class}.toml"
    return read_table(file.read_text(), f"{device_class}.toml")
