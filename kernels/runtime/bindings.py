"""cuda-bindings, imported when a kernel is needed and not before."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def load(module: str) -> Any:
    """``cuda.bindings.<module>``; RuntimeError when the package is missing."""
    try:
        return importlib.import_module(f"cuda.bindings.{module}")
    except ImportError as error:
        raise RuntimeError(
            f"CUDA kernels need cuda.bindings.{module}, of the package cuda-bindings, which CUDA builds of torch for Linux "
            f"bring along (otherwise: pip install cuda-bindings): {error}"
        ) from error


def call(function: Callable[..., tuple[Any, ...]], *arguments: object, where: str) -> Any:
    """Call ``function``; RuntimeError if its status code is an error. Returns the rest: None, a value, or a tuple."""
    code, *values = function(*arguments)
    if code:
        raise RuntimeError(f"{where}: {function.__name__} failed with {code.name}")
    return values[0] if len(values) == 1 else tuple(values) or None
