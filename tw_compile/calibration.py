"""Calibrations: what ranks have measured on their node by themselves. One file for each kind of node.

A file is JSON in the folder ``calibration`` of the user's config folder. Its name has a digest of what it was measured on, so a
node with another driver or other kernels has another file. Two processes may write the same file at once: each writes it whole.
:mod:`tw_compile.tuning.calibrate` measures. This module reads, writes and selects the results, and needs no GPU.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from tw_compile.files import keep, name_of_node, read_if_there, user_folder
from tw_compile.gating.table import Table, read_table, table_text
from tw_compile.kernels.transports import selection
from tw_compile.kernels.transports.selection import Step, steps_of
from tw_compile.planning.device import DeviceProfile, parse_profile
from tw_compile.planning.links import Link, parse_link
from tw_compile.planning.tables import toml_of

logger = logging.getLogger("tw_compile")

SCHEMA_VERSION = 1
LAYER = "calibration"
"""The name of the layer of tables, and of the folder."""
_KEYS = ("schema_version", "measured_on", "seconds", "thresholds", "kernels", "profile", "link", "remarks", "rows")


@dataclass(frozen=True)
class MeasuredOn:
    """What the measured times depend on; a calibration is valid only on nodes where every field is equal.

    Attributes:
        peer_access: Whether the kernels used the GPUs' peer access.
        driver: Version of the NVIDIA driver.
        source: Digest of this package's sources.
    """

    device_name: str
    device_class: str
    world_size: int
    peer_access: bool
    multicast: bool
    driver: str
    torch: str
    source: str

    @property
    def file_name(self) -> str:
        return name_of_node(f"{self.device_name} tp{self.world_size}", asdict(self)) + ".json"


@dataclass(frozen=True)
class Calibration:
    """What one calibration found.

    Attributes:
        table: Thresholds for the world size that was measured.
        steps: Which kernel serves which message.
        remarks: What was left out, and why, a line each.
        rows: The times, as ``tw-compile bench kernel`` reports them.
        seconds: The time that measuring took, and the time before that for loading kernels and checking the first size.
        profile: What the planner uses on a device that has no profile. None where the device has a profile, or where too little
            was timed.
        link: What the planner uses for messages through host memory; None where no such messages were timed.
    """

    measured_on: MeasuredOn
    table: Table
    steps: tuple[Step, ...]
    remarks: tuple[str, ...]
    rows: tuple[dict[str, Any], ...]
    seconds: tuple[float, float]
    profile: DeviceProfile | None = None
    link: Link | None = None


def text_of(calibration: Calibration) -> str:
    """The file's text, as :func:`calibration_of` reads it."""
    here = calibration.measured_on
    values = {
        "schema_version": SCHEMA_VERSION,
        "measured_on": asdict(here),
        "seconds": calibration.seconds,
        "thresholds": table_text(calibration.table),
        "kernels": selection.table_text(here.device_name, calibration.steps, ""),
        "profile": "" if calibration.profile is None else toml_of(calibration.profile),
        "link": "" if calibration.link is None else toml_of(calibration.link),
        "remarks": calibration.remarks,
        "rows": calibration.rows,
    }
    return json.dumps(values, indent=1) + "\n"


def calibration_of(text: str, source: str) -> Calibration:
    """The calibration that ``text`` holds; ValueError names ``source``, what was expected and what came."""
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source}: expected JSON, got {error}") from error
    version = values.get("schema_version") if isinstance(values, dict) else None
    if version != SCHEMA_VERSION:
        raise ValueError(f"{source}: schema_version: expected {SCHEMA_VERSION}, got {version!r}")
    for key in _KEYS:
        if key not in values:
            raise ValueError(f"{source}: expected the keys {', '.join(_KEYS)}, got no {key!r}")
    kinds = dict.fromkeys(("thresholds", "kernels", "profile", "link"), str) | dict.fromkeys(("remarks", "rows"), list)
    for key, kind in kinds.items():
        if type(values[key]) is not kind:
            raise ValueError(f"{source}: {key}: expected {kind.__name__}, got {values[key]!r}")
    seconds = values["seconds"]
    if not isinstance(seconds, list) or [type(value) for value in seconds] != [float, float]:
        raise ValueError(f"{source}: seconds: expected two numbers, got {seconds!r}")
    here = _measured_on(values["measured_on"], source)
    # Equal thresholds must be equal tables, whatever file they are in: a table's file name is part of the compile caches' key.
    table = replace(read_table(values["thresholds"], source), file=LAYER)
    _, steps = steps_of(values["kernels"], source)
    profile = parse_profile(values["profile"], f"{source}: profile") if values["profile"] else None
    link = parse_link(values["link"], f"{source}: link") if values["link"] else None
    remarks, rows = tuple(values["remarks"]), tuple(values["rows"])
    return Calibration(here, table, steps, remarks, rows, (seconds[0], seconds[1]), profile, link)


def _measured_on(values: Any, source: str) -> MeasuredOn:
    names, hints = [field.name for field in fields(MeasuredOn)], get_type_hints(MeasuredOn)
    if not isinstance(values, dict) or sorted(values) != sorted(names):
        raise ValueError(f"{source}: measured_on: expected the keys {', '.join(names)}, got {values!r}")
    for name in names:
        if type(values[name]) is not hints[name]:
            raise ValueError(f"{source}: measured_on: {name}: expected {hints[name].__name__}, got {values[name]!r}")
    return MeasuredOn(**values)


def default_folder() -> Path | None:
    """The folder with the calibrations, which need not exist; None where the user has no home."""
    folder = user_folder()
    return None if folder is None else folder / LAYER


def stored(folder: Path | None, here: MeasuredOn) -> Calibration | None:
    """The calibration kept for a node like ``here``; None without one. If the file can't be used, one warning names it."""
    if folder is None:
        return None
    file = folder / here.file_name
    calibration = _read(file)
    if calibration is not None and calibration.measured_on != here:
        logger.warning("tw_compile: %s is not used: it was measured on another node, %s", file, calibration.measured_on)
        return None
    return calibration


def all_stored(folder: Path | None) -> list[Calibration]:
    """Every calibration in ``folder`` that can be read, sorted by file name."""
    files = [] if folder is None or not folder.is_dir() else sorted(folder.glob("*.json"))
    return [calibration for calibration in map(_read, files) if calibration is not None]


def _read(file: Path) -> Calibration | None:
    try:
        text = read_if_there(file, LAYER)
        return None if text is None else calibration_of(text, str(file))
    except ValueError as error:
        logger.warning("tw_compile: a calibration is not used: %s", error)
        return None


def store(folder: Path | None, calibration: Calibration) -> Path | None:
    """Write the file and return its path; where that fails, warn and return None. The next process then measures again."""
    return keep(folder, calibration.measured_on.file_name, text_of(calibration), "the calibration")


def merged_table(calibrations: Iterable[Calibration], device_class: str) -> Table | None:
    """The thresholds of all ``calibrations`` in one table, each having those of one world size; None where there are none."""
    entries = [entry for calibration in calibrations for entry in calibration.table.entries]
    return Table(LAYER, device_class, tuple(entries)) if entries else None


_in_use: list[Calibration] = []


def use(calibration: Calibration | None) -> None:
    """Use ``calibration`` for graphs that this process compiles, and for groups that it uses first, from now on."""
    _in_use[:] = [] if calibration is None else [calibration]
    selection.use_measured({} if calibration is None else {calibration.measured_on.device_name: calibration.steps})


def in_use() -> Calibration | None:
    """What :func:`use` was given last."""
    return _in_use[0] if _in_use else None
