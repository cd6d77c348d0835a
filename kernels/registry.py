"""Registries: what there is of a kind, by name, as plain data that imports neither torch nor what it names."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, Literal, Protocol, TypeVar


class Entry(Protocol):
    """What a registry holds."""

    @property
    def name(self) -> str: ...


E = TypeVar("E", bound=Entry)


class Registry(Generic[E]):
    """Entries in the order in which they were registered; ``kind`` is the word for one of them in errors.

    Users may register entries of their own, in every process of a group and before the first call that names one.
    """

    def __init__(self, kind: str, entries: Iterable[E] = ()) -> None:
        self.kind = kind
        self._entries: dict[str, E] = {}
        for entry in entries:
            self.register(entry)

    def register(self, entry: E) -> None:
        """Add an entry for as long as the process lives; ValueError if its name is taken."""
        if entry.name in self._entries:
            raise ValueError(f"{self.kind}: expected a name that is not taken, got {entry.name!r}")
        self._entries[entry.name] = entry

    @contextmanager
    def registered(self, entry: E) -> Iterator[None]:
        """Have an entry inside of a ``with`` block only, as tests do."""
        self.register(entry)
        try:
            yield
        finally:
            del self._entries[entry.name]

    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def __iter__(self) -> Iterator[E]:
        return iter(tuple(self._entries.values()))

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __getitem__(self, name: str) -> E:
        """ValueError for a name that is not registered."""
        if name not in self._entries:
            raise ValueError(f"{self.kind}: expected one of {', '.join(sorted(self._entries))}, got {name!r}")
        return self._entries[name]


@cache
def load(path: str) -> Any:
    """What ``path`` names, as ``package.module:attribute``; its module is imported by the first call."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


@dataclass(frozen=True)
class Benchmarked:
    """A line of ``tw-compile bench kernel``.

    Attributes:
        sharded: The residual that is natural to it is sharded; if not, it is replicated.
        narrow: That residual has the message's dtype, see :attr:`Contender.residual_narrow`.
        in_slot: Messages lie in the slot's memory, as if their producer had written them there, and results stay there.
        quantises: Its results are float8.
        scales: Scales that are made of them: for each ``token`` or ``group`` of 128 columns; empty: one is given.
    """

    label: str
    sharded: bool
    narrow: bool = False
    in_slot: bool = False
    quantises: bool = False
    scales: Literal["", "token", "group"] = ""

    @property
    def plain(self) -> bool:
        """Whether it does what a call in a table of kernels does."""
        return not (self.in_slot or self.quantises)
