"""Registries of transports, algorithms and epilogues, by name.

Entries are plain data: they import neither torch nor the code that they name.
"""

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
    """Entries in the order in which they were registered; ``kind`` is the word for an entry in error messages.

    Users may register entries of their own. They must do this in every process of a group, and before the first call that names
    the entry.
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
        """Register an entry for the duration of a ``with`` block, as tests do."""
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
        """The entry called ``name``; ValueError if no such name is registered."""
        if name not in self._entries:
            raise ValueError(f"{self.kind}: expected one of {', '.join(sorted(self._entries))}, got {name!r}")
        return self._entries[name]


@cache
def load(path: str) -> Any:
    """The object that ``path`` names as ``package.module:attribute``. The first call imports the module."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


@dataclass(frozen=True)
class Benchmarked:
    """A line of ``tw-compile bench kernel``.

    Attributes:
        sharded: Whether the residual is sharded, as suits the implementation; if not, the residual is replicated.
        narrow: Whether the residual has the message's dtype, see :attr:`Contender.residual_narrow`.
        in_slot: Whether messages lie in the slot's memory, as if their producer had written them there, and results stay there.
        quantises: Whether the results are float8.
        scales: What gets a scale of its own, made from the results: each ``token``, or each ``group`` of 128 columns. Empty:
            the call is given one scale.
        on_request: Whether it takes part only where ``--only`` names it.
    """

    label: str
    sharded: bool
    narrow: bool = False
    in_slot: bool = False
    quantises: bool = False
    scales: Literal["", "token", "group"] = ""
    on_request: bool = False

    @property
    def plain(self) -> bool:
        """Whether tables of kernels are made from it: results are ordinary tensors, not quantised, and nothing is forced."""
        return not (self.in_slot or self.quantises or self.on_request)
