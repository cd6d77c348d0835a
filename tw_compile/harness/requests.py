"""What any work on several ranks is asked for, and how it says that it was asked for something impossible. Imports no torch."""

from __future__ import annotations

from typing import Any, Protocol


class UsageError(ValueError):
    """The request itself is wrong: one line that names the argument, what was expected and what came."""


class RankError(RuntimeError):
    """A rank failed or went silent; the message names it and carries its traceback.

    Attributes:
        so_far: A result that lacks what rank 0 had not done by then; None where it had sent none.
    """

    def __init__(self, message: str, so_far: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.so_far = so_far


class RanksSpec(Protocol):
    """What starting ranks needs to know: how many, on ``cuda`` or ``cpu``, and after how many seconds they have failed."""

    @property
    def world_size(self) -> int: ...

    @property
    def device(self) -> str: ...

    @property
    def timeout(self) -> float: ...
