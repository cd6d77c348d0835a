"""The HTML page of ``tw-compile inspect``."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from html_pages import assert_tags_are_balanced
from typer.testing import CliRunner

from tw_compile.cli.app import app
from tw_compile.cli.drawing import boxes, draw
from tw_compile.graph.text import Line, aligned, diff

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("html") / "page.html"
    args = ["inspect", "--model", "tiny-llama", "--tp", "4", "--tokens", "24", "--layers", "3", "--html", str(file)]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    return file


def test_page_is_well_formed_and_loads_nothing(page: Path) -> None:
    text = page.read_text()
    assert_tags_are_balanced(text)
    assert not re.search(r"(src|href)\s*=|@import|url\((?!#tip)|<script", text)
    assert "prefers-color-scheme: dark" in text


def test_page_draws_both_sides_of_the_layer(page: Path) -> None:
    text = page.read_text()
    assert text.count('class="lane"') == 2
    assert len(re.findall(r'class="box fused added"', text)) == 4
    assert len(re.findall(r'class="box collective removed"', text)) == 4
    assert len(re.findall(r'class="box norm removed"', text)) == 2
    assert len(re.findall(r'class="box matmul removed"', text)) == 2
    assert "mm o_proj" in text and ">mm + all_reduce + residual + RMSNorm: start<" in text
    assert "6 with their GEMM" in text


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH")
def test_page_renders_in_a_browser(page: Path, tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--window-size=1200,2000", f"--screenshot={picture}", page.as_uri()]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 50_000  # an empty page of this size has about 10 kB


def _line(name: str, op: str = "mul", inputs: tuple[str, ...] = (), result: str = "bf16[8, 64]") -> Line:
    return Line(name, op, inputs, result)


def test_diff_folds_what_did_not_change() -> None:
    before = [_line(f"mul_{index}") for index in range(10)]
    after = [*before[:5], _line("new", "fused_start"), *before[6:]]
    rows = aligned(diff(before, after, context=1))
    assert [change for change, _ in rows] == ["folded", "same", "removed", "added", "same", "folded"]
    assert rows[0][1].strip() == "... 4 unchanged: 4 mul"
    assert rows[2][1].startswith("- mul_5") and rows[3][1].startswith("+ new")


def test_equal_graphs_have_no_changed_line() -> None:
    lines = [_line("a"), _line("b")]
    assert all(one.change in ("same", "folded") for one in diff(lines, lines))


def test_boxes_join_pointwise_runs_and_leave_views_out() -> None:
    lines = [
        _line("mm", "mm"),
        _line("view", "view", ("mm",)),
        _line("all_reduce", "all_reduce", ("view",)),
        _line("add", "add", ("residual", "all_reduce")),
        _line("pow", "pow", ("add",)),
        _line("rsqrt", "rsqrt", ("pow",)),
        _line("mul", "mul", ("add", "rsqrt")),
    ]
    drawn = boxes(lines, {"mm", "view"})
    assert [(box.kind, box.changed) for box in drawn] == [
        ("matmul", False),
        ("collective", True),
        ("residual", True),
        ("norm", True),
    ]
    assert drawn[-1].key == ("pow", "rsqrt", "mul")


def test_halves_and_what_a_gemm_of_several_does_are_told() -> None:
    lines = [
        Line("joint", "joint_mm_leaving_sms", (), "bf16[8, 64]", module="q_proj", half=1),
        Line("gated", "gated_mm_leaving_sms", (), "bf16[8, 64]", module="down_proj", half=2),
        Line("down", "mm_leaving_sms", (), "bf16[8, 64]", module="down_proj", half=2),
        Line("one", "mul", (), "bf16[8, 64]", half=1),
        Line("two", "mul", (), "bf16[8, 64]", half=2),
    ]
    assert [(box.title, box.half) for box in boxes(lines, set())] == [
        ("joint mm q, k, v", 1),
        ("gated mm gate, up, activation", 2),
        ("mm down_proj", 2),
        ("pointwise", 1),
        ("pointwise", 2),
    ]
    svg = draw([], lines)
    assert svg.count('class="box matmul added"') == 3
    assert (svg.count('class="stripe half1"'), svg.count('class="stripe half2"')) == (2, 3)
    assert svg.count("half 1 · ") == 2


def test_what_is_written_ends_before_the_dot_of_the_residual() -> None:
    start = Line(
        "s",
        "fused_mm_start",
        (),
        "(bf16[8, 64], f32[4, 64])",
        "residual_sharded=True, residual_out=sharded, transport=p2p",
    )
    svg = draw([], [start])
    dot = float(re.findall(r'class="tap" cx="(\d+)"', svg)[0])
    begin, words = re.findall(r'class="name" x="(\d+)" y="\d+">([^<]*)<', svg)[0]
    assert words == "mm + all_reduce + residual + RMSNorm: start"
    assert float(begin) + 7.9 * len(words) < dot - 6, "7.9: of a bold letter of 13 px, on average"
