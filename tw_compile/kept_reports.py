"""Reports kept on disk beside Inductor's cache.

A graph that comes out of that cache is not rewritten again. Its report is the one from when it was rewritten, kept in a JSON
file. The file's name is a digest of the graph as the backend gets it, and of everything that affects its compilation. So
another option means another file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
import torch.fx as fx

from tw_compile import compat
from tw_compile.files import read_text, write_whole
from tw_compile.report import GraphReport

FOLDER = Path("tw_compile", "reports")
"""The folder of the reports, relative to the folder of Inductor's cache."""


def file_of(
    gm: fx.GraphModule, inputs: Sequence[Any], passes: compat.CustomGraphPass, options: Mapping[str, Any]
) -> Path | None:
    """The file with the reports of a graph; None where Inductor does not cache the graph.

    Inductor does not cache it if caches are off, or if ``passes`` have no identity.

    Args:
        options: Inductor's options for this graph, without ``passes``.
    """
    folder = compat.graph_cache_folder(options)
    identity = None if folder is None else passes.uuid()
    if folder is None or identity is None:
        return None
    parts = [repr(identity), compat.compile_settings(options), *_described_graph(gm), *map(_described, inputs)]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return folder / FOLDER / f"{digest}.json"


def keep(file: Path, reports: Sequence[GraphReport]) -> None:
    """Write ``reports`` for :func:`read`, in place of what is there.

    Raises:
        ValueError: The file can't be written, or a pass of the user's own has counted something that JSON can't hold.
    """
    try:
        text = json.dumps([dataclasses.asdict(report) for report in reports])
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, text)
    except (OSError, TypeError) as error:
        raise ValueError(f"report: expected to be kept in {str(file)!r} ({error})") from error


def read(file: Path) -> list[GraphReport]:
    """The reports that :func:`keep` has written, marked ``from_cache``.

    Raises:
        ValueError: There is no such file, or it holds something else.
    """
    text = read_text(file, "report")
    try:
        reports: list[GraphReport] = _typed(list[GraphReport], json.loads(text))
    except ValueError as error:
        raise ValueError(f"report: expected a file as it was kept, got {str(file)!r} ({error})") from error
    return [dataclasses.replace(report, from_cache=True) for report in reports]


def _described_graph(gm: fx.GraphModule) -> list[str]:
    """Text of each graph of a module, and of the module's tensors without their values."""
    graphs = [f"{name}: {module.graph}" for name, module in gm.named_modules() if isinstance(module, fx.GraphModule)]
    tensors = itertools.chain(gm.named_parameters(), gm.named_buffers())
    return graphs + [f"{name}: {_described(tensor)}" for name, tensor in tensors]


def _described(value: Any) -> str:
    """Text of a graph's input, without the values of tensors.

    The text of a symbolic size has its bounds. The text of a tensor subclass has the tensors inside it, too.
    """
    if isinstance(value, torch.SymInt):
        return f"{value} {compat.size_bounds(value)}"
    if not isinstance(value, torch.Tensor):
        return repr(value)
    stride = value.stride() if value.layout is torch.strided else None
    facts = (value.dtype, tuple(value.shape), stride, value.device, value.layout, value.requires_grad)
    if not hasattr(value, "__tensor_flatten__"):
        return str(facts)
    names, context = value.__tensor_flatten__()
    return f"{facts} {context!r} {[_described(getattr(value, name)) for name in names]}"


def _typed(kind: Any, value: Any) -> Any:
    """Convert ``value``, which was read from JSON, back to the type ``kind``.

    Raises:
        ValueError: ``value`` does not fit ``kind``.
    """
    origin, members = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        names = [field.name for field in dataclasses.fields(kind)]
        if isinstance(value, dict) and value.keys() == set(names):
            return kind(**{name: _typed(hints[name], value[name]) for name in names})  # type: ignore[operator]
    elif origin in (Union, UnionType):
        for member in members:
            try:
                return _typed(member, value)
            except ValueError:
                continue
    elif origin is Literal:
        if value in members:
            return value
    elif origin is list and isinstance(value, list):
        return [_typed(members[0], item) for item in value]
    elif origin is tuple and isinstance(value, list):
        kinds = [members[0]] * len(value) if members[1:] == (...,) else members
        return tuple(_typed(kind_of_item, item) for kind_of_item, item in zip(kinds, value, strict=True))
    elif origin is dict and isinstance(value, dict):
        return {_typed(members[0], key): _typed(members[1], item) for key, item in value.items()}
    elif kind is float and type(value) in (int, float):
        return float(value)
    elif issubclass(kind, StrEnum):
        return kind(value)
    elif type(value) is kind:
        return value
    raise ValueError(f"expected {kind}, got {value!r}")
