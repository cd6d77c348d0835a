"""Copies of a kernel in which a line is another: what lets one pass has not looked at that line."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from emulator import EmulationError
from tw_compile.kernels.runtime.program import HEADERS

Changes = tuple[tuple[str, str], ...]
"""Texts, and what is there in their place."""


def broken_copy(folder: Path, source: Path, file: str, changes: Changes) -> Path:
    """``source`` and the headers in ``folder``, ``file`` with ``changes``, all of which apply."""
    for one in (source, *HEADERS.glob("*.cuh")):
        shutil.copy(one, folder)
    text = (folder / file).read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / file).write_text(text)
    return folder / source.name


def check_caught(run: Callable[[Path, int], None], source: Path, seeds: Sequence[int]) -> None:
    """``run`` of ``source`` fails for some seed: wrong results, or what the emulator calls an error."""
    with pytest.raises((EmulationError, AssertionError)):
        for seed in seeds:
            run(source, seed)
