"""Facts about the installed torch, read from its files: importing torch takes seconds, and not every command needs it."""

from __future__ import annotations

import functools
import importlib.util
import mmap
import runpy
from pathlib import Path
from typing import Any


def torch_version() -> str:
    """``torch.__version__``. The installed package's metadata lacks its end, such as ``+cu130``."""
    version: str = _build()["__version__"]
    return version


def cuda_version() -> str | None:
    """``torch.version.cuda``, the CUDA that torch was built with; None for a build without."""
    version: str | None = _build()["cuda"]
    return version


def has_symmetric_memory() -> bool:
    """Whether torch has the module ``torch.distributed._symmetric_memory``."""
    return (_folder() / "distributed" / "_symmetric_memory" / "__init__.py").is_file()


@functools.cache
def has_gloo() -> bool:
    """``torch.distributed.is_gloo_available()``: whether the library of torch's Python bindings has ``ProcessGroupGloo``."""
    library = _folder() / "lib" / "libtorch_python.so"
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(b"\0ProcessGroupGloo\0") >= 0


@functools.cache
def _folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None, "torch is a dependency of this package"
    return Path(spec.origin).parent


@functools.cache
def _build() -> dict[str, Any]:
    return runpy.run_path(str(_folder() / "version.py"))
