"""Digests of sources, the package's own and users': parts of the compile caches' key, and of reports. Imports no torch."""

from __future__ import annotations

import functools
import hashlib
import inspect
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parent
SOURCES = tuple(
    _PACKAGE / part for part in ("", "passes", "kernels", "configs")
)  # rglob does not follow links to folders
_SOURCE_KINDS = ("*.py", "*.cu", "*.cuh", "*.toml")


def source_digest() -> str:
    """Hash of the package's own source files and tables; read once per process."""
    return digest_of(SOURCES)


@functools.cache
def digest_of(folders: tuple[Path, ...]) -> str:
    """Hash of all source files and tables in ``folders``; ``digest_of.cache_clear()`` has them read again."""
    hasher = hashlib.sha256()
    files = sorted({path for folder in folders for kind in _SOURCE_KINDS for path in folder.rglob(kind)})
    for path in files:
        hasher.update(path.name.encode())
        hasher.update(path.read_bytes())
    return hasher.hexdigest()


@functools.cache
def source_of(function: Callable[..., Any]) -> str:
    """The digest of the file that a user's function is in; empty for the package's own functions.

    The package's digest already covers its own functions. Where there is no file, the result is a random value, which equals
    no other digest.
    """
    try:
        file = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:
        file = None
    if file is None or not Path(file).is_file():
        return uuid.uuid4().hex
    path = Path(file).resolve()
    if any(path.is_relative_to(folder.resolve()) for folder in SOURCES):
        return ""
    return hashlib.sha256(path.read_bytes()).hexdigest()
