"""Tables of ``configs/thresholds``: for a world size and an all_reduce backend, the message sizes in bytes at which fusing
pays.

A table is a TOML file for one class of devices:

    schema_version = 1
    device_class = "sm90-multicast"
    [sources.h200]                       # a name that entries refer to
    kind = "measured"                    # machine, versions, date, command; or "public": table; or "default": why
    ...
    [[entries]]
    world_size = 8                       # or "any"
    backend = "multimem"                 # what the unfused all_reduce would use, or "any"
    from_bytes = 0                       # of one rank's message, [tokens, hidden]
    to_bytes = 262144                    # exclusive; the last range of a world size and backend has none
    decision = "fused"                   # with a transport, or "left"
    transport = "p2p"
    source = "h200"

    [[wires]]
    wire = "int8"
    world_size = 8                       # or "any"
    transport = "p2p"
    from_bytes = 4194304                 # of one rank's message; from there on the wire is faster than exact rows
    below = "at 1 MiB ..."               # what was measured below that; may be missing
    source = "h200"

The ranges of a world size and backend follow each other in the file, begin at 0 and leave nothing out. No table says whether
tokens are split: the planner decides that (:mod:`tw_compile.planning`).
"""

from __future__ import annotations

import datetime
import itertools
import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from tw_compile.gating.facts import BACKENDS
from tw_compile.kernels.collective.transports import AUTO, TRANSPORTS, names_for

SCHEMA_VERSION = 1
DEVICE_CLASSES = ("generic", "sm90", "sm90-multicast", "sm100", "sm103")
DECISIONS = ("fused", "left")
ANY = "any"
SOURCE_KEYS = {"measured": ("machine", "versions", "date", "command"), "public": ("table",), "default": ("why",)}
REMOVED_KEYS = {"splits": "splits are planned now, see tw-compile plan"}
"""Keys that tables once had, and what replaces them."""

Key = tuple[int | str, str]
"""World size (or "any") and backend (or "any")."""


@dataclass(frozen=True)
class Source:
    """Where an entry comes from; ``values`` are those of ``SOURCE_KEYS[kind]``, in that order."""

    name: str
    kind: str
    values: tuple[str, ...]

    def __str__(self) -> str:
        if self.kind == "measured":
            machine, versions, date, command = self.values
            return f"measured on {machine}, {versions}, {date}: {command}"
        return self.values[0]


@dataclass(frozen=True)
class Entry:
    """Messages of ``from_bytes`` to below ``to_bytes`` (None: of any size from there) are fused, or left as they are."""

    world_size: int | str
    backend: str
    from_bytes: int
    to_bytes: int | None
    decision: Literal["fused", "left"]
    transport: str | None
    source: Source

    @property
    def key(self) -> Key:
        return self.world_size, self.backend

    def __str__(self) -> str:
        span = f"from {size(self.from_bytes)}" + ("" if self.to_bytes is None else f" to below {size(self.to_bytes)}")
        return f"world_size {self.world_size}, {self.backend}, {span}"


@dataclass(frozen=True)
class WireEntry:
    """Messages of ``from_bytes`` and more arrive earlier in the codes of ``wire`` than as they are.

    ``below`` says in words what was measured below that size.
    """

    wire: str
    world_size: int | str
    transport: str
    from_bytes: int
    source: Source
    below: str | None = None

    def __str__(self) -> str:
        below = "" if self.below is None else f"; {self.below}"
        return f"{self.wire}, world_size {self.world_size}, {self.transport}, from {size(self.from_bytes)}{below}"


@dataclass(frozen=True)
class Table:
    """One file. The entries of a key (world size and backend) go up in bytes and cover all sizes."""

    file: str
    device_class: str
    entries: tuple[Entry, ...]
    wires: tuple[WireEntry, ...] = ()

    def ranges(self, key: Key) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.key == key)


def size(nbytes: int) -> str:
    """The exact size as text, in the largest unit of which it is a whole number: ``262144`` -> ``"256 KiB"``."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes and nbytes % factor == 0:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} bytes"


def read_table(text: str, file: str) -> Table:
    """The table that ``text`` holds; ValueError names ``file``, the key, what was expected and what came."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{file}: expected TOML, got {error}") from error
    _known(values, ("schema_version", "device_class"), ("sources", "entries", "wires"), f"{file}: ")
    version = _typed(values, "schema_version", int, f"{file}: ")
    if version != SCHEMA_VERSION:
        raise ValueError(f"{file}: schema_version: expected {SCHEMA_VERSION}, got {version}")
    device_class = _choice(values, "device_class", DEVICE_CLASSES, f"{file}: ")
    sources = {name: _source(name, source, file) for name, source in _tables(values, "sources", dict, file).items()}
    entries = tuple(
        _entry(entry, f"{file}: entries[{index}].", sources)
        for index, entry in enumerate(_tables(values, "entries", list, file))
    )
    _check_ranges(entries, file)
    wires = tuple(
        _wire_entry(entry, f"{file}: wires[{index}].", sources)
        for index, entry in enumerate(_tables(values, "wires", list, file))
    )
    _check_wires(wires, file)
    return Table(file, device_class, entries, wires)


def table_text(table: Table, comment: str = "") -> str:
    """The TOML of a table, as :func:`read_table` reads it."""
    sources = {entry.source.name: entry.source for entry in table.entries}
    sources |= {wire.source.name: wire.source for wire in table.wires}
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    lines += [f"schema_version = {SCHEMA_VERSION}", f"device_class = {_text(table.device_class)}"]
    for name, source in sources.items():
        lines += ["", f"[sources.{_text(name)}]", f"kind = {_text(source.kind)}"]
        lines += assignments(zip(SOURCE_KEYS[source.kind], source.values, strict=True))
    for entry in table.entries:
        values: dict[str, Any] = {"world_size": entry.world_size, "backend": entry.backend}
        values |= {"from_bytes": entry.from_bytes, "to_bytes": entry.to_bytes}
        values |= {"decision": entry.decision, "transport": entry.transport, "source": entry.source.name}
        lines += ["", "[[entries]]", *assignments(values.items())]
    for wire in table.wires:
        values = {"wire": wire.wire, "world_size": wire.world_size, "transport": wire.transport}
        values |= {"from_bytes": wire.from_bytes, "below": wire.below, "source": wire.source.name}
        lines += ["", "[[wires]]", *assignments(values.items())]
    return "\n".join(lines) + "\n"


def assignments(values: Iterable[tuple[str, Any]]) -> list[str]:
    """Lines of TOML: numbers as they are, all else as text. Values that are None are left out."""
    return [
        f"{key} = {value if isinstance(value, int | float) else _text(value)}"
        for key, value in values
        if value is not None
    ]


def _text(value: str) -> str:
    # JSON strings are TOML strings, except for DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _check_ranges(entries: tuple[Entry, ...], file: str) -> None:
    """Check that the ranges of each key follow each other, begin at 0 and end open."""
    seen: set[Key] = set()
    for key, group in itertools.groupby(enumerate(entries), key=lambda pair: pair[1].key):
        end: int | None = 0
        for index, entry in group:
            where = f"{file}: entries[{index}].from_bytes"
            if key in seen:
                raise ValueError(f"{where}: expected the ranges of {key} to follow each other, got {key} again")
            if end is None:
                raise ValueError(f"{where}: expected nothing after the range without to_bytes, got {entry.from_bytes}")
            if entry.from_bytes != end:
                problem = "an overlap" if entry.from_bytes < end else "a gap"
                raise ValueError(
                    f"{where}: expected {end}, where the range before ends, got {entry.from_bytes}: {problem}"
                )
            end = entry.to_bytes
        seen.add(key)
        if end is not None:
            raise ValueError(
                f"{file}: entries[{index}].to_bytes: expected none in the last range of {key}, got {end}: a gap"
            )


def _entry(values: Any, where: str, sources: dict[str, Source]) -> Entry:
    required = ("world_size", "backend", "from_bytes", "decision", "source")
    _known(values, required, ("to_bytes", "transport"), where)
    begin = _bytes(values, "from_bytes", where)
    end = _bytes(values, "to_bytes", where) if "to_bytes" in values else None
    if end is not None and end <= begin:
        raise ValueError(f"{where}to_bytes: expected more than from_bytes ({begin}), got {end}")
    decision = _choice(values, "decision", DECISIONS, where)
    if decision == "left" and "transport" in values:
        raise ValueError(f"{where}transport: expected none where decision is 'left', got {values['transport']!r}")
    transport = _choice(values, "transport", (AUTO, *sorted(names_for("cuda"))), where) if decision == "fused" else None
    world_size, backend = _key(values, where)
    return Entry(world_size, backend, begin, end, decision, transport, _named_source(values, where, sources))  # type: ignore[arg-type]


def _wire_entry(values: Any, where: str, sources: dict[str, Source]) -> WireEntry:
    _known(values, ("wire", "world_size", "transport", "from_bytes", "source"), ("below",), where)
    transport = _choice(values, "transport", tuple(sorted(names_for("cuda"))), where)
    wire = _choice(values, "wire", TRANSPORTS[transport].wires, where)
    world_size, begin = _world_size(values, where), _bytes(values, "from_bytes", where)
    below = _typed(values, "below", str, where) if "below" in values else None
    return WireEntry(wire, world_size, transport, begin, _named_source(values, where, sources), below)


def _check_wires(wires: tuple[WireEntry, ...], file: str) -> None:
    """Check that there is one entry for a wire, a world size and a transport."""
    seen: set[tuple[str, int | str, str]] = set()
    for index, entry in enumerate(wires):
        key = (entry.wire, entry.world_size, entry.transport)
        if key in seen:
            raise ValueError(
                f"{file}: wires[{index}]: expected one entry for {', '.join(map(str, key))}, got another one"
            )
        seen.add(key)


def _key(values: dict[str, Any], where: str) -> Key:
    return _world_size(values, where), _choice(values, "backend", (*BACKENDS, ANY), where)


def _world_size(values: dict[str, Any], where: str) -> int | str:
    world_size: int | str = values["world_size"]
    if world_size != ANY and (type(world_size) is not int or world_size < 2):
        raise ValueError(f"{where}world_size: expected a number of at least 2, or 'any', got {world_size!r}")
    return world_size


def _named_source(values: dict[str, Any], where: str, sources: dict[str, Source]) -> Source:
    return sources[_choice(values, "source", tuple(sources), where)]


def _source(name: str, values: Any, file: str) -> Source:
    where = f"{file}: sources.{name}."
    if not isinstance(values, dict):
        raise ValueError(f"{where.rstrip('.')}: expected a table, got {values!r}")
    kind = _choice(values, "kind", tuple(SOURCE_KEYS), where)
    _known(values, ("kind", *SOURCE_KEYS[kind]), (), where)
    texts = tuple(_typed(values, key, str, where) for key in SOURCE_KEYS[kind])
    for key, text in zip(SOURCE_KEYS[kind], texts, strict=True):
        if not text.strip():
            raise ValueError(f"{where}{key}: expected some words, got {text!r}")
    if kind == "measured":
        try:
            datetime.date.fromisoformat(values["date"])
        except ValueError:
            raise ValueError(f"{where}date: expected a date like '2026-11-21', got {values['date']!r}") from None
    return Source(name, kind, texts)


def _known(values: Any, required: tuple[str, ...], optional: tuple[str, ...], where: str) -> None:
    """Check that ``values`` has all ``required`` keys, and no keys but these and the ``optional`` ones.

    ``where`` is what goes before a key in a message: the file, and the tables that the key is in.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{where.rstrip('.: ')}: expected a table, got {values!r}")
    expected = ", ".join((*required, *optional))
    for key in values:
        if key not in required and key not in optional:
            instead = f" ({REMOVED_KEYS[key]})" if key in REMOVED_KEYS else ""
            raise ValueError(f"{where.rstrip('.: ')}: expected the keys {expected}, got {key!r}{instead}")
    for key in required:
        if key not in values:
            raise ValueError(f"{where.rstrip('.: ')}: expected the keys {', '.join(required)}, got no {key!r}")


def _tables(values: dict[str, Any], key: str, kind: type, file: str) -> Any:
    tables = values.get(key, kind())
    if not isinstance(tables, kind):
        raise ValueError(
            f"{file}: {key}: expected {f'[[{key}]]' if kind is list else f'[{key}]'} tables, got {tables!r}"
        )
    return tables


def _typed(values: dict[str, Any], key: str, kind: type, where: str) -> Any:
    value = values.get(key)
    if type(value) is not kind:
        raise ValueError(f"{where}{key}: expected {kind.__name__}, got {value!r}")
    return value


def _choice(values: dict[str, Any], key: str, choices: tuple[str, ...], where: str) -> str:
    value = values.get(key)
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{where}{key}: expected one of {', '.join(choices)}, got {value!r}")
    return value


def _bytes(values: dict[str, Any], key: str, where: str) -> int:
    value = values[key]
    if type(value) is not int or value < 0:
        raise ValueError(f"{where}{key}: expected a number of bytes, got {value!r}")
    return value
