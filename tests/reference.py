"""What ``docs/reference/json.md`` lists of a command's report, for the tests that make such a report."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import make_reference
import torch

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "reference" / "json.md"


def listed(command: str) -> set[str]:
    section = PAGE.read_text().split(f"\n## {command}\n", 1)[1].split("\n## ", 1)[0]
    return set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE))


def assert_keys_are_listed(command: str, report: dict[str, Any]) -> None:
    """The page has the reports of a machine without GPUs: on another nothing is compared."""
    if not torch.cuda.is_available():
        differ = sorted(set(make_reference.keys_of(report)) ^ listed(command))
        assert not differ, f"run python docs/make_reference.py json: {differ}"
