"""The papers' published numbers, the claims in words, and which exhibits there are."""

from __future__ import annotations

import re

import pytest

from tw_compile.benchmark.papers.claims import Bound, judge, times
from tw_compile.benchmark.papers.context import Context, quotient
from tw_compile.benchmark.papers.exhibit import HOW
from tw_compile.benchmark.papers.published import parse, read_published
from tw_compile.benchmark.papers.registry import PAPERS, exhibits
from tw_compile.benchmark.papers.timed import committed
from tw_compile.harness.requests import UsageError

ROW = """title = "t"
source = "arXiv 1"
hardware = "h"
[[rows]]
exhibit = "1"
series = "s, us"
place = "figure 1"
x = [1, 2]
values = [3, 4]
"""


@pytest.mark.parametrize("name", PAPERS)
def test_every_published_row_has_a_source_and_an_exhibit(name: str) -> None:
    published = read_published(name)
    known = {exhibit.id for exhibit in exhibits(name)}
    assert re.search(r"arXiv \d{4}\.\d{5}|HotInfra|github\.com/", published.source)
    assert published.rows and known >= {row.exhibit for row in published.rows} | set(published.absent)
    for row in published.rows:
        assert re.match(r"(figure|table|section|first table|second table)", row.place), row.series
        assert len(row.x) == len(set(row.x)) == len(row.values)


@pytest.mark.parametrize("name", PAPERS)
def test_every_exhibit_says_what_differs_and_its_ids_are_different(name: str) -> None:
    shown = exhibits(name)
    assert len({exhibit.id for exhibit in shown}) == len(shown)
    for exhibit in shown:
        assert exhibit.says.endswith(".") and exhibit.differs.endswith(".")
        assert (exhibit.requests is None) or exhibit.needs.gpus > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("values = [3, 4]", "values = [3]"), "row 1: values: expected one for each of 2 x, got 1"),
        (('place = "figure 1"', 'place = ""'), "row 1: place: expected a figure, table or section"),
        (('place = "figure 1"\n', ""), "row 1: expected exhibit, place"),
        (('source = "arXiv 1"', 'source = ""'), "source: expected a text"),
    ],
)
def test_a_row_without_source_or_values_is_refused(change: tuple[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse(ROW.replace(*change), "file")


def test_values_that_were_read_from_a_plot_say_so() -> None:
    drawn = parse(ROW + "read_from_plot = true\n", "file").series("1", "s, us", "s")
    assert {point.how for point in drawn.points} == {"read from the plot"}
    printed = parse(ROW, "file").series("1", "s, us", "s")
    assert {point.how for point in printed.points} == {"cited"} <= set(HOW)


@pytest.mark.parametrize(
    ("paper", "ours", "expected", "words"),
    [
        ({64: 0.31, 256: 0.25}, {64: 0.30}, (True, True), "ours: 30.0% at 64 tokens: it holds"),
        ({64: 0.31, 256: 0.25}, {64: 0.30, 256: 0.20}, (True, False), "it does not hold at 256 tokens"),
        (
            {64: 0.31, 256: 0.23},
            {64: 0.30},
            (False, True),
            "paper: 23.0% at 256 tokens to 31.0% at 64: it does not hold",
        ),
        ({64: 0.31}, {}, (True, None), "ours: no numbers, so it is not judged"),
    ],
)
def test_a_claim_is_judged_by_the_numbers(
    paper: dict[float, float], ours: dict[float, float], expected: tuple[bool, bool], words: str
) -> None:
    claim = judge("fused saves", Bound("at least", 0.24), paper, ours)
    assert (claim.holds_in_paper, claim.holds_here) == expected
    assert words in claim.text and claim.text.startswith("fused saves at least 24.0% everywhere.")


def test_a_claim_of_somewhere_needs_one_value() -> None:
    bound = Bound("at most", 1.0, somewhere=True)
    claim = judge("it takes", bound, {1: 1.2, 2: 0.9}, {1: 1.2}, times)
    assert (claim.holds_in_paper, claim.holds_here) == (True, False)
    assert "ours: 1.20x at 1 tokens: it does not hold." in claim.text


def test_a_number_that_is_planted_in_a_figure_flips_its_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    (figure,) = exhibits("tokenweave", "4")
    published = read_published("tokenweave")
    rows = committed()
    (claim,) = figure.draw(Context(published, rows, None, 2)).claims
    assert (claim.holds_in_paper, claim.holds_here) == (True, True)
    slow = [row if row.kind != "ours" else type(row)(**(vars(row) | {"value": 2 * row.value})) for row in rows]
    (claim,) = figure.draw(Context(published, slow, None, 2)).claims
    assert (claim.holds_in_paper, claim.holds_here) == (True, False)


def test_ratios_are_those_of_the_committed_files() -> None:
    """README: fused kernel of 2 GPUs 1.46x at 1024 and 4096 tokens, layers of 4 GPUs 1.27x, 1.30x, 1.28x."""
    context = Context(read_published("tokenweave"), committed(), None, 2)
    kernel = quotient(context.unfused(2, 8192), context.fastest_fused(2, 8192))
    assert {x: round(kernel[x][0], 2) for x in (1024, 4096)} == {1024: 1.46, 4096: 1.46}
    layer = quotient(context.layer(4, "llama-3.3-70b"), context.layer(4, "llama-3.3-70b", "fused+split"))
    assert {x: round(layer[x][0], 2) for x in (1024, 2048, 4096)} == {1024: 1.27, 2048: 1.3, 4096: 1.28}


def test_distfuse_hides_what_its_table_says() -> None:
    (table,) = exhibits("distfuse", "t1")
    line = table.draw(Context(read_published("distfuse"), [], None, 4)).series[0]
    assert line.values()[0.0] == pytest.approx(0.443, abs=0.002)


def test_unknown_papers_and_figures_are_refused() -> None:
    with pytest.raises(UsageError, match=r"NAME: expected one of tokenweave, .*, got 'flux'"):
        exhibits("flux")
    with pytest.raises(UsageError, match=r"--figures: expected some of 1, 4, .* for tokenweave, got '8'"):
        exhibits("tokenweave", "4,8")
    assert [exhibit.id for exhibit in exhibits("tokenweave", "10,4")] == ["4", "10"]
