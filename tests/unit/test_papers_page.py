"""``tw-compile bench paper``: its page, its report, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from html_pages import assert_tags_are_balanced
from paper_pages import BROWSER, measure_in_browser, read_exhibits
from typer.testing import CliRunner

from tw_compile.benchmark.papers.exhibit import HOW
from tw_compile.benchmark.papers.registry import PAPERS
from tw_compile.cli.app import app
from tw_compile.cli.paper_chart import HEIGHT, WIDTH, chart

BOTH_SIDES = ("4", "7", "9", "10", "11", "14")
PAPER_IS_SILENT = {"9"}


def drawn(folder: Path, name: str, *options: str) -> tuple[dict[str, Any], Path]:
    page, report = folder / f"{name}.html", folder / f"{name}.json"
    args = ["bench", "paper", name, "--dry-run", "--html", str(page), "--json", str(report), *options]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    return json.loads(report.read_text()), page


@pytest.fixture(scope="module")
def issue(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    return drawn(tmp_path_factory.mktemp("papers"), "vllm-44079")


def check(report: dict[str, Any], page: Path) -> None:
    text = page.read_text()
    assert_tags_are_balanced(text)
    assert not re.search(r"(src|href)\s*=|@import|url\(|<script", text)
    assert "prefers-color-scheme: dark" in text
    for exhibit in report["exhibits"]:
        assert f'id="exhibit-{exhibit["id"]}"' in text
        assert exhibit["comparison"], exhibit["id"]
        for series in exhibit["series"]:
            assert series["points"], series["name"]
            for point in series["points"]:
                assert point["how"] in HOW and point["detail"]
                assert (point["value"] is None) == (point["how"] == "cannot")
                assert (series["side"] == "paper") == (point["how"] in ("cited", "read from the plot"))


def test_page_is_well_formed_and_every_value_says_how(issue: tuple[dict[str, Any], Path]) -> None:
    check(*issue)


def test_text_on_a_terminal_cuts_nothing() -> None:
    result = CliRunner().invoke(app, ["bench", "paper", "flash-communication", "--figures", "13", "--dry-run"])
    assert (
        result.exit_code == 0 and "measured earlier" in result.output and "\N{HORIZONTAL ELLIPSIS}" not in result.output
    )


def test_the_gate_is_right_where_the_cap_is_wrong(issue: tuple[dict[str, Any], Path]) -> None:
    (claim,) = issue[0]["exhibits"][0]["claims"]
    assert (claim["holds_in_paper"], claim["holds_here"]) == (False, True)
    assert "predicted (the gate" in issue[1].read_text()


@pytest.mark.full
@pytest.mark.parametrize("name", PAPERS)
def test_every_paper_is_drawn_without_a_gpu(name: str, tmp_path: Path) -> None:
    begin = time.monotonic()
    report, page = drawn(tmp_path, name)
    assert time.monotonic() - begin < 60.0
    check(report, page)


def assert_both_sides(page: Path, figures: tuple[str, ...]) -> None:
    """Each figure has lines of both sides within the drawing, and every value that is shown says how it was obtained."""
    shown = read_exhibits(page.read_text())
    for figure in figures:
        exhibit = shown[figure]
        assert exhibit.sides == ({"ours"} if figure in PAPER_IS_SILENT else {"ours", "paper"}), figure
        for line in (line for lines in exhibit.lines.values() for line in lines):
            assert line and all(0.0 <= x <= WIDTH and 0.0 <= y <= HEIGHT for x, y in line), figure
        rows = [row for row in exhibit.rows if row]
        assert rows and all(row[-1].startswith(HOW) for row in rows), figure
        assert exhibit.dots and all(any(f", {how} (" in dot for how in HOW) for dot in exhibit.dots), figure


def test_figures_of_kernels_have_lines_of_both_sides(tmp_path: Path) -> None:
    _, page = drawn(tmp_path, "tokenweave", "--figures", "4,7,10")
    assert_both_sides(page, ("4", "7", "10"))


@pytest.fixture(scope="module")
def tokenweave(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    return drawn(tmp_path_factory.mktemp("papers"), "tokenweave")


@pytest.mark.full
def test_figures_of_tokenweave_have_lines_of_both_sides(tokenweave: tuple[dict[str, Any], Path]) -> None:
    report, page = tokenweave
    assert_both_sides(page, BOTH_SIDES)
    absent = {exhibit["id"] for exhibit in report["exhibits"] if exhibit["absent"] is not None}
    assert absent & set(BOTH_SIDES) == PAPER_IS_SILENT


@pytest.mark.full
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH")
@pytest.mark.parametrize("width", [600, 1400])
def test_a_browser_draws_every_line_and_cuts_nothing(
    width: int, tokenweave: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    report, page = tokenweave
    found = measure_in_browser(page, width, tmp_path)
    assert found["wide"] <= found["window"] == width
    drawn_lines = {exhibit["id"].removeprefix("exhibit-"): exhibit for exhibit in found["exhibits"]}
    for exhibit in report["exhibits"]:
        values = [[point for point in line["points"] if point["value"] is not None] for line in exhibit["series"]]
        shown = drawn_lines[exhibit["id"]]
        assert shown["dots"] == sum(map(len, values)), exhibit["id"]
        assert shown["lines"] == sum(len(points) > 1 for points in values) and shown["cut"] == [], exhibit["id"]


def test_without_gpus_an_exhibit_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tw_compile.cli.common.gpus", lambda: 0)
    monkeypatch.setattr("tw_compile.cli.bench_paper.made_with", lambda: "no GPU")
    report = tmp_path / "report.json"
    args = ["bench", "paper", "vllm-44079", "--figures", "t1", "--out", str(tmp_path / "kept"), "--json", str(report)]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    read = json.loads(report.read_text())
    here = next(line for line in read["exhibits"][0]["comparison"] if line["series"] == "measured here")
    assert (here["how"], here["detail"]) == ("cannot", "it needs 2 GPUs, and torch finds 0 here")
    assert read["missing"] == ["it needs 2 GPUs, and torch finds 0 here"] and not (tmp_path / "kept").exists()


def test_a_line_of_a_file_that_is_given_comes_before_committed_ones(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    header = "label,kind,tokens,p50_us,world_size,hidden,numerics"
    file.write_text(f"{header}\ntw-p2p,ours,64,5.0,2,2048,ok\nnccl+norm,peer,64,10.0,2,2048,ok\n")
    report, _ = drawn(tmp_path, "vllm-44079", "--figures", "t1", "--from", str(file))
    line = next(line for line in report["exhibits"][0]["comparison"] if line["detail"] == "mine.csv")
    assert (line["x"], line["ours"], line["how"]) == (64, 0.5, "measured earlier")


REFUSED = {
    "NAME: expected one of tokenweave": ["flux"],
    "--figures: expected some of 1, 4": ["tokenweave", "--figures", "8"],
    "--minutes: expected more than 0": ["tokenweave", "--minutes", "0"],
    "--minutes: expected more than 0 and at most 1440": ["tokenweave", "--minutes", "nan"],
    "--tp: expected 2 to 1024 ranks, got 1": ["tokenweave", "--tp", "1"],
    "--from: expected a file that can be read": ["tokenweave", "--from", "nowhere.csv"],
    "--from: expected a CSV file of a benchmark": ["tokenweave", "--from", __file__],
    "--html: expected a file in a folder that exists": ["tokenweave", "--html", "nowhere/page.html"],
    "--json: expected a file in a folder that exists": ["tokenweave", "--json", "nowhere/report.json"],
    "--out: expected a folder that is there or can be made": ["tokenweave", "--out", __file__],
}
REFUSE = """
import json, sys, time
from typer.testing import CliRunner
from tw_compile.cli.app import app
for args in json.loads(sys.argv[1]):
    result = CliRunner().invoke(app, ["bench", "paper", *args])
    print(json.dumps([result.exit_code, result.output, "torch" in sys.modules]))
"""


def test_bad_input_is_refused_in_one_line_without_torch() -> None:
    code = [sys.executable, "-c", REFUSE, json.dumps(list(REFUSED.values()))]
    done = subprocess.run(code, check=True, capture_output=True, text=True, timeout=120)
    for words, line in zip(REFUSED, done.stdout.splitlines(), strict=True):
        exit_code, output, torch_is_there = json.loads(line)
        assert (exit_code, torch_is_there) == (2, False), output
        assert output.startswith(f"error: {words}") and output.count("\n") == 1, output


def test_a_chart_without_values_is_empty_and_one_value_is_drawn() -> None:
    exhibit = {"title": "t", "x": "x", "y": "y", "x_log": True, "y_log": False, "ticks": [], "series": []}
    assert chart(exhibit) == ""
    point = {"x": 4.0, "value": 2.0, "how": "cited", "detail": "figure 1"}
    exhibit["series"] = [{"name": "line", "side": "paper", "points": [point]}]
    assert chart(exhibit).count("<circle") == 2  # the point and the name's
