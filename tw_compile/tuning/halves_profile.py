"""Puts measured halves into a device profile of the user's config folder. All else in the file stays as it is."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tw_compile.files import read_if_there, write_whole
from tw_compile.harness.requests import UsageError
from tw_compile.planning.device import USER_FILE, DeviceProfile, parse_profile, profile_names, shipped_profile
from tw_compile.planning.measured_halves import MeasuredHalves, with_measured
from tw_compile.planning.tables import toml_of
from tw_compile.tuning.profile import profile_text

MARK = "# Halves of FFNs, measured by tw-compile tune --halves"
"""The line behind which the file has the halves and nothing else."""


def base_profile(folder: Path, device_name: str) -> DeviceProfile:
    """The profile that ``folder`` has of the device, or else the shipped one.

    Raises:
        UsageError: The folder's file is wrong, or about another device, or the device has no profile.
    """
    own, _ = _read(folder / USER_FILE)
    if own is not None:
        if device_name not in own.device_names:
            about = ", ".join(own.device_names)
            raise UsageError(
                f"--out: expected a folder whose profile is about {device_name}, got {folder / USER_FILE} about {about}"
            )
        return own
    shipped = shipped_profile(device_name)
    if shipped is None:
        names = ", ".join(profile_names())
        raise UsageError(f"--halves: expected a device with a profile ({names}), got {device_name!r}")
    return shipped


def measured_rows(report: dict[str, Any]) -> list[MeasuredHalves]:
    """The halves that a report of ``tuning/halves.py`` has found."""
    versions = report["versions"]
    measured = (
        f"{versions['date']}, {report['device_name']}, torch {versions['torch']}, tw_compile {versions['commit']}"
    )
    return [
        MeasuredHalves(
            row["hidden_size"],
            row["intermediate_size"],
            row["dtype"],
            row["tokens"],
            row["first"],
            round(row["us"], 1),
            round(row["equal_us"], 1),
            measured,
        )
        for row in report["rows"]
    ]


def check_halves_fit(folder: Path, device_name: str) -> None:
    """Raise UsageError where :func:`write_halves` would. Called before anything is measured. The folder is made."""
    _with_halves(folder, device_name, (), "")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--out: expected a folder that is there or can be made, got {str(folder)!r} ({error})"
        ) from error
    if not os.access(folder, os.W_OK):
        raise UsageError(f"--out: expected a folder that can be written to, got {str(folder)!r}")


def write_halves(folder: Path, device_name: str, found: Iterable[MeasuredHalves], comment: str) -> Path:
    """Add ``found`` to the profile in ``folder``. Where there is none, the shipped one is written, with ``comment`` above.

    Raises:
        UsageError: As :func:`base_profile`; or the file has halves in a place where this function would not put them; or it
            can't be written.
    """
    text = _with_halves(folder, device_name, found, comment)
    file = folder / USER_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(file, text)
    except OSError as error:
        raise UsageError(f"--out: expected a folder that can be written to, got {str(folder)!r} ({error})") from error
    return file


def _with_halves(folder: Path, device_name: str, found: Iterable[MeasuredHalves], comment: str) -> str:
    """The text of the profile in ``folder``, and ``found`` in it; see :func:`write_halves`."""
    file = folder / USER_FILE
    own, text = _read(file)
    base = base_profile(folder, device_name)
    if own is None:
        base = replace(base, name=f"{base.name}, tuned")
        text = profile_text(base, frozenset(), comment)
    profile = replace(base, halves=with_measured(base.halves, found))
    whole = text.partition(MARK)[0].rstrip("\n") + "\n" + halves_text(profile.halves)
    try:
        same = parse_profile(whole, USER_FILE) == profile  # a wrong file would stop every compile
    except ValueError:
        same = False
    if not same:
        raise UsageError(f"--out: expected a file whose tables [[halves]] are behind the line {MARK!r}, got {file}")
    return whole


def halves_text(halves: tuple[MeasuredHalves, ...]) -> str:
    """The end of a profile's file; empty without halves."""
    return f"\n{MARK}\n{toml_of({'halves': halves})}" if halves else ""


def kept_halves(folder: Path, device_name: str) -> tuple[MeasuredHalves, ...]:
    """The halves in the profile of ``folder``; none where it is about another device.

    Raises:
        UsageError: The file is wrong.
    """
    own, _ = _read(folder / USER_FILE)
    return own.halves if own is not None and device_name in own.device_names else ()


def _read(file: Path) -> tuple[DeviceProfile | None, str]:
    """The profile in ``file`` and its text; None and no text where there is no such file."""
    try:
        text = read_if_there(file, "device profile")
        return (None, "") if text is None else (parse_profile(text, str(file)), text)
    except ValueError as error:
        raise UsageError(f"--out: expected a profile that can be read, got {error}") from error
