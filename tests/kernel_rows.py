"""The files that ``bench kernel`` has written, as runs: what is shipped must follow from those that are committed."""

from __future__ import annotations

import csv
import json
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

from tw_compile.benchmark.results import Row
from tw_compile.tuning.measured import KernelRun, run_made_with, run_of_report

OLDER_NAMES = {"max_ctas": "max_sms"}
"""Columns of CSV files that were written under another name."""


def runs_of_file(path: str) -> list[KernelRun]:
    """The runs in a CSV or JSON file that ``bench kernel`` has written; ValueError names the file and what is wrong."""
    try:
        text = Path(path).read_text()
        if path.endswith(".json"):
            return [run_of_report(json.loads(text))]
        return _runs_of_csv(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected a file that can be read, got {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        problem = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path}: expected what bench kernel writes with --csv or --json, got {problem}") from error


def _runs_of_csv(text: str) -> list[KernelRun]:
    by_run: dict[tuple[tuple[str, str], ...], list[Row]] = {}
    names = ("world_size", "device_name", "torch", "nccl", "flashinfer", "commit", "date")
    for line in csv.DictReader(text.splitlines()):
        by_run.setdefault(tuple((name, line[name]) for name in names), []).append(_row(line))
    if not by_run:
        raise ValueError("no rows")
    return [run_made_with(dict(made_with), rows) for made_with, rows in by_run.items()]


def _row(line: dict[str, str]) -> Row:
    """A line of CSV; columns that it lacks have their defaults."""
    named = {OLDER_NAMES.get(name, name): value for name, value in line.items()}
    hints = get_type_hints(Row)
    values = {field.name: _value(hints[field.name], named[field.name]) for field in fields(Row) if field.name in named}
    return Row(**values)


def _value(hint: Any, text: str) -> Any:
    if hint is bool:
        return text == "True"
    if hint in (int, float):
        return hint(text)
    if hint in (int | None, float | None):
        return None if text == "" else (int if hint == int | None else float)(text)
    return text or None if hint == str | None else text
