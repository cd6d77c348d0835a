"""The package's own source files, as one digest: part of the compile caches' key and of every report. Imports no torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

_PACKAGE = Path(__file__).parent
_SOURCES = (_PACKAGE, _PACKAGE / "passes", _PACKAGE / "kernels")  # rglob does not follow links to folders
_SOURCE_KINDS = ("*.py", "*.cu", "*.cuh")

_digests: dict[tuple[Path, ...], str] = {}


def source_digest() -> str:
    """Hash of the package's own source files; read once per process."""
    if _SOURCES not in _digests:
        hasher = hashlib.sha256()
        files = sorted({path for folder in _SOURCES for kind in _SOURCE_KINDS for path in folder.rglob(kind)})
        for path in files:
            hasher.update(path.name.encode())
            hasher.update(path.read_bytes())
        _digests[_SOURCES] = hasher.hexdigest()
    return _digests[_SOURCES]
