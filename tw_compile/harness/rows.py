"""Rows of a report: the fields that all benchmarks share, what is derived from them, and CSV output. Imports no torch."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol, TypeVar

SCHEMA_VERSION = 1
Outcome = Literal["timed", "computed", "not served", "error", "numerics failed"]


class Measured(Protocol):
    """The fields of a row of any benchmark that starts its own ranks."""

    label: str
    kind: str
    tokens: int
    outcome: Outcome
    reason: str | None
    numerics: str
    p20_us: float | None
    p50_us: float | None
    p80_us: float | None
    speedup: float | None
    best_peer: str | None


AnyRow = TypeVar("AnyRow", bound=Measured)


def best_peer(rows: Iterable[AnyRow]) -> AnyRow | None:
    """The fastest peer whose numerics are good; None when there is none."""
    timed = [row for row in rows if row.kind == "peer" and row.numerics == "ok" and row.p50_us is not None]
    return min(timed, key=lambda row: row.p50_us or 0.0, default=None)


def failures(rows: Iterable[AnyRow]) -> list[AnyRow]:
    """The rows of ours that should have run and did not, or whose results were wrong."""
    return [row for row in rows if row.kind == "ours" and row.outcome in ("error", "numerics failed")]


def csv_of(report: dict[str, Any], names: Iterable[str], rows: Sequence[dict[str, Any]] | None = None) -> str:
    """CSV with a line for each row of ``report``, or of ``rows``; each has the report's ``names``, peer access and versions."""
    common = {name: report[name] for name in (*names, "peer_access")} | report["versions"]
    return csv_text(report["rows"] if rows is None else rows, common)


def csv_text(rows: Sequence[dict[str, Any]], common: dict[str, Any]) -> str:
    """CSV with a line for each row; each line also has the values in ``common``."""
    lines = [row | common for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, lines[0] if lines else common, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()
