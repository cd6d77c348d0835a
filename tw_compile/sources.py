"""The package's own source files, as one digest: part of the compile caches' key and of every report. Imports no torch."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

_PACKAGE = Path(__file__).parent
SOURCES = (_PACKAGE, _PACKAGE / "passes", _PACKAGE / "kernels")  # rglob does not follow links to folders
_SOURCE_KINDS = ("*.py", "*.cu", "*.cuh")


def source_digest() -> str:
    """Hash of the package's own source files; read once per process."""
    return digest_of(SOURCES)


@functools.cache
def digest_of(folders: tuple[Path, ...]) -> str:
    """Hash of all source files in ``folders``; ``digest_of.cache_clear()`` has them read again."""
    hasher = hashlib.sha256()
    files = sorted({path for folder in folders for kind in _SOURCE_KINDS for path in folder.rglob(kind)})
    for path in files:
        hasher.update(path.name.encode())
        hasher.update(path.read_bytes())
    return hasher.hexdigest()
