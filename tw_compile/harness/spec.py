"""What the requests of benchmarks share. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from tw_compile.harness.requests import UsageError

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
ONE_SHOT_BOUND, TWO_SHOT_BOUND = "one-shot-bound", "two-shot-bound"
"""Labels of computed rows: the time of the links alone if every rank adds up all rows, or if each row is added up once."""


class Labelled(Protocol):
    """Anything with a label that can take part in a benchmark."""

    @property
    def label(self) -> str: ...


AnyLabelled = TypeVar("AnyLabelled", bound=Labelled)


def check_labels(known: Sequence[str], only: Sequence[str]) -> None:
    """Raise UsageError if ``only``, the option ``--only``, has a label that is not in ``known``."""
    for label in only:
        if label not in known:
            raise UsageError(f"--only: expected some of {', '.join(known)}, got {label!r}")


def with_labels(known: Iterable[AnyLabelled], only: Sequence[str]) -> list[AnyLabelled]:
    """The members of ``known`` that ``only``, the option ``--only``, names; if it is empty, all."""
    return [variant for variant in known if not only or variant.label in only]
