"""Tables of numbers as frozen dataclasses: TOML whose keys are the fields, each value checked by its field's type."""

from __future__ import annotations

import dataclasses
import itertools
import tomllib
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

Table = TypeVar("Table")


def read_table(kind: type[Table], text: str, source: str) -> Table:
    """``kind`` from TOML; ValueError names ``source``, the key, what was expected and what came.

    Numbers are positive and finite; ``tuple[...]`` is a list that is not empty, of ascending numbers, or an array of tables;
    ``Mapping[str, ...]`` is a table of tables by name.
    """
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{source}: expected TOML, got {error}") from error
    return _part(kind, values, source)


def _part(kind: type[Table], values: Any, where: str) -> Table:
    """``kind`` with every field from the key of its name.

    No key may be left over, and only keys of fields with a default may be missing.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{where}: expected a table, got {values!r}")
    hints = get_type_hints(kind)
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    names = [field.name for field in fields]
    needed = {field.name for field in fields if field.default is dataclasses.MISSING}
    for name in (*values.keys() - set(names), *needed - values.keys()):
        raise ValueError(
            f"{where}: expected the keys {', '.join(names)}, {'got' if name in values else 'not without'} {name!r}"
        )
    return kind(**{name: _value(hints[name], values[name], f"{where}: {name}") for name in names if name in values})


def _value(hint: Any, value: Any, where: str) -> Any:
    if get_origin(hint) is UnionType:
        (hint,) = (member for member in get_args(hint) if member is not NoneType)
    if get_origin(hint) is tuple:
        item_hint = get_args(hint)[0]
        if not isinstance(value, list) or not value:
            raise ValueError(f"{where}: expected a list that is not empty, got {value!r}")
        items = tuple(_value(item_hint, item, f"{where}[{index}]") for index, item in enumerate(value))
        if item_hint is int and any(after <= before for before, after in itertools.pairwise(items)):
            raise ValueError(f"{where}: expected ascending numbers, got {value!r}")
        return items
    if get_origin(hint) is Mapping:
        if not isinstance(value, dict) or not value:
            raise ValueError(f"{where}: expected tables by name, got {value!r}")
        entry_kind = get_args(hint)[1]
        return {name: _part(entry_kind, table, f"{where}.{name}") for name, table in value.items()}
    if hint is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{where}: expected true or false, got {value!r}")
        return value
    if hint is str or get_origin(hint) is Literal:
        if not isinstance(value, str) or not value:
            raise ValueError(f"{where}: expected text, got {value!r}")
        if hint is not str and value not in get_args(hint):
            raise ValueError(f"{where}: expected one of {', '.join(get_args(hint))}, got {value!r}")
        return value
    if hint in (int, float):
        allowed = (int,) if hint is int else (int, float)
        if type(value) not in allowed or not 0 < value < float("inf"):
            raise ValueError(f"{where}: expected a positive {hint.__name__}, got {value!r}")
        return hint(value)
    return _part(hint, value, where)


def toml_of(part: object, origin: Callable[[str], str] | None = None) -> str:
    """The TOML of a table, as :func:`read_table` reads it. ``origin``: makes the comment of a value from its dotted name.

    Values in arrays of tables have no comment.
    """
    return "\n".join(_lines(part, "", origin)) + "\n"


def _lines(part: object, path: str, origin: Callable[[str], str] | None) -> list[str]:
    """Plain values first, then tables."""
    values = part if isinstance(part, Mapping) else {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}  # type: ignore[arg-type]
    lines, tables = [], []
    for key, value in values.items():
        name = f"{path}{key}"
        if value is None or value == ():
            continue
        if isinstance(value, tuple) and dataclasses.is_dataclass(value[0]):
            for entry in value:
                tables += ["", f"[[{name}]]", *_lines(entry, f"{name}.", None)]
        elif isinstance(value, Mapping):
            for inner, entry in value.items():
                tables += ["", f"[{name}.{inner}]", *_lines(entry, f"{name}.{inner}.", origin)]
        elif dataclasses.is_dataclass(value):
            tables += ["", f"[{name}]", *_lines(value, f"{name}.", origin)]
        else:
            lines.append(f"{key} = {_text(value)}" + ("" if origin is None else f"  # {origin(name)}"))
    return lines + tables


def _text(value: object) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(_text(item) for item in value)}]"
    return repr(value)
