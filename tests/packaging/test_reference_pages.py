"""The pages that ``docs/make_reference.py`` writes are what it would write now."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_reference = load("make_reference")
COMMANDS = make_reference.QUICK | make_reference.SLOW


@pytest.mark.parametrize("name", ["commands", "options"])
def test_page_is_what_the_code_says(name: str) -> None:
    made = getattr(make_reference, f"{name}_page")()
    assert (REFERENCE / f"{name}.md").read_text() == made, "run python docs/make_reference.py"


def listed(command: str) -> set[str]:
    section = (REFERENCE / "json.md").read_text().split(f"\n## {command}\n", 1)[1].split("\n## ", 1)[0]
    return set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the page has the reports of a machine without GPUs")
@pytest.mark.parametrize(
    "command", [*make_reference.QUICK, *(pytest.param(name, marks=pytest.mark.full) for name in make_reference.SLOW)]
)
def test_keys_of_a_report_are_listed(command: str, tmp_path: Path) -> None:
    found = make_reference.keys_of(make_reference.report_of(COMMANDS[command], tmp_path))
    assert listed(command) == set(found), "run python docs/make_reference.py json"


def test_every_command_has_a_section() -> None:
    text = (REFERENCE / "json.md").read_text()
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == sorted([*COMMANDS, *make_reference.ELSEWHERE])


def test_pictures_are_what_the_script_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_pictures = load("make_pictures")
    monkeypatch.setattr(make_pictures, "IMAGES", tmp_path)
    for draw in (
        make_pictures.draw_layer,
        make_pictures.draw_graph,
        make_pictures.draw_data,
        make_pictures.draw_host,
    ):
        draw()
    there = {file.name: file.read_text() for file in (ROOT / "docs" / "images").iterdir()}
    del there["imports.svg"]  # drawn by another script, see test_imports.py
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == there
