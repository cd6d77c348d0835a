"""Requests for work on several ranks, and the errors that such work raises. Imports no torch."""

from __future__ import annotations

from typing import Any, Protocol

INTERRUPTED = "interrupted"
"""The message of a :class:`RankError` for work that Ctrl-C or SIGTERM has ended, and what a report says of it."""


class UsageError(ValueError):
    """The request itself is wrong: one line that names the argument, what was expected and what came."""


class RankError(RuntimeError):
    """A rank failed or went silent; the message names it and carries its traceback.

    Attributes:
        so_far: The unfinished result that rank 0 sent last; None where rank 0 had sent none.
    """

    def __init__(self, message: str, so_far: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.so_far = so_far


class RanksSpec(Protocol):
    """What is needed to start ranks: how many, on ``cuda`` or ``cpu``, and after how many seconds they count as failed."""

    @property
    def world_size(self) -> int: ...

    @property
    def device(self) -> str: ...

    @property
    def timeout(self) -> float: ...
