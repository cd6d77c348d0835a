"""The pages that ``docs/make_reference.py`` writes are what it would write now."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import make_pictures
import make_reference
import pytest
from reference import DOCS, PAGE, assert_keys_are_listed
from typer.testing import CliRunner

from tw_compile.cli.app import app

TESTS = Path(__file__).parents[1]
COMMANDS = make_reference.QUICK | make_reference.SLOW


@pytest.mark.parametrize("name", ["commands", "options"])
def test_page_is_what_the_code_says(name: str) -> None:
    made = getattr(make_reference, f"{name}_page")()
    assert (PAGE.parent / f"{name}.md").read_text() == made, "run python docs/make_reference.py"


@pytest.mark.parametrize("command", [*make_reference.QUICK, pytest.param("inspect", marks=pytest.mark.full)])
def test_keys_of_a_report_are_listed(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    CliRunner().invoke(app, [*COMMANDS[command], "--json", "report.json"])  # it may fail: there is a report
    assert_keys_are_listed(command, json.loads(Path("report.json").read_text()))


def test_keys_of_slow_reports_are_compared_by_the_tests_that_make_them() -> None:
    calls = {
        ast.unparse(node.args[0])
        for file in TESTS.rglob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == assert_keys_are_listed.__name__
    }
    assert calls == {"command", *map(repr, make_reference.SLOW.keys() - {"inspect"})}


def test_every_command_has_a_section() -> None:
    assert re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE) == sorted([*COMMANDS, *make_reference.ELSEWHERE])


def test_pictures_are_what_the_script_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_pictures, "IMAGES", tmp_path)
    for draw in (
        make_pictures.draw_layer,
        make_pictures.draw_graph,
        make_pictures.draw_data,
        make_pictures.draw_host,
        make_pictures.draw_gains,
    ):
        draw()
    there = {file.name: file.read_text() for file in (DOCS / "images").iterdir()}
    del there["imports.svg"]  # drawn by another script, see test_imports.py
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == there
