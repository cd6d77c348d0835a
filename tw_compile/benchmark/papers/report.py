"""The report of a paper: its exhibits as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tw_compile.benchmark.papers.accuracy import Accuracy, committed_accuracy
from tw_compile.benchmark.papers.context import Context, Host, cannot
from tw_compile.benchmark.papers.exhibit import Claim, Exhibit, Series
from tw_compile.benchmark.papers.measure import Measured
from tw_compile.benchmark.papers.published import Published
from tw_compile.benchmark.papers.timed import Timed, committed
from tw_compile.harness.rows import SCHEMA_VERSION


def requests_of(exhibits: Sequence[Exhibit], tp: int) -> dict[str, tuple[Any, ...]]:
    """What to ask the benchmarks for, by the exhibit's id."""
    return {exhibit.id: exhibit.requests(tp) if exhibit.requests else () for exhibit in exhibits}


def report_of(
    name: str,
    published: Published,
    exhibits: Sequence[Exhibit],
    given: Sequence[Timed],
    measured: Measured | None,
    tp: int,
    seconds: float,
    costs: Accuracy | None = None,
) -> dict[str, Any]:
    """The report of the paper ``name``, as plain values.

    ``given`` are rows of files that the user named, and ``costs`` is what such files say of wires. Rows of ``measured`` come
    before the given rows, committed rows after them. ``measured`` is None for a dry run.
    """
    from tw_compile.harness.versions import versions

    asked = requests_of(exhibits, tp)
    leading = [*([] if measured is None else measured.rows), *given]
    rows = [*leading, *committed()]
    accuracy = (costs or Accuracy()) + committed_accuracy()
    host: Host = "too" if any(row.through_host for row in leading) else "no"
    shown = []
    for exhibit in exhibits:
        missing = _missing(asked[exhibit.id], measured)
        drawn = exhibit.draw(Context(published, rows, missing, tp, accuracy, host))
        series = drawn.series
        if measured is not None and missing is not None and asked[exhibit.id]:
            series = (*series, _not_here(series, missing))
        shown.append(_exhibit(exhibit, published, series, drawn.claims))
    return {
        "schema_version": SCHEMA_VERSION,
        "command": "bench paper",
        "paper": name,
        "title": published.title,
        "source": published.source,
        "hardware": published.hardware,
        "world_size": tp,
        "dry_run": measured is None,
        "exhibits": shown,
        "missing": sorted(set(measured.missing.values())) if measured is not None else [],
        "seconds": seconds,
        "versions": versions(),
    }


def _missing(asked: Sequence[Any], measured: Measured | None) -> str | None:
    if not asked:
        return "no benchmark measures it"
    if measured is None:
        return "a dry run measures nothing, and no result that was given or committed has it"
    return next((measured.missing[request] for request in asked if request in measured.missing), None)


def _not_here(series: Sequence[Series], why: str) -> Series:
    """A line that says why the exhibit was not measured here, or not all of it, though that was asked for."""
    first = next((point.x for line in series for point in line.points), 0.0)
    return cannot("measured here", (first,), why)


def _exhibit(
    exhibit: Exhibit, published: Published, series: Sequence[Series], claims: Sequence[Claim]
) -> dict[str, Any]:
    return {
        "id": exhibit.id,
        "title": exhibit.title,
        "says": exhibit.says,
        "differs": exhibit.differs,
        "absent": published.absent.get(exhibit.id),
        "needs": asdict(exhibit.needs),
        "x": exhibit.x,
        "y": exhibit.y,
        "x_log": exhibit.x_log,
        "y_log": exhibit.y_log,
        "ticks": [] if exhibit.ticks is None else [{"x": x, "name": name} for x, name in exhibit.ticks.items()],
        "series": [_series(line, published.source) for line in series],
        "comparison": comparison(series),
        "claims": [asdict(claim) for claim in claims],
    }


def _series(line: Series, source: str) -> dict[str, Any]:
    points = [asdict(point) for point in line.points]
    if not line.ours:
        points = [point | {"detail": f"{source}, {point['detail']}"} for point in points]
    return {"name": line.name, "side": "ours" if line.ours else "paper", "beside": line.beside, "points": points}


def comparison(series: Sequence[Series]) -> list[dict[str, Any]]:
    """One line for each value of ours: the paper's value at the same x, if any, our value, and ours divided by the paper's."""
    papers: Mapping[str, Series] = {line.name: line for line in series if not line.ours}
    lines = []
    for line in series:
        if not line.ours:
            continue
        published = papers[line.beside].values() if line.beside is not None else {}
        for point in line.points:
            paper = published.get(point.x)
            ratio = point.value / paper if paper and point.value is not None else None
            lines.append(
                {
                    "x": point.x,
                    "series": line.name,
                    "beside": line.beside,
                    "paper": paper,
                    "ours": point.value,
                    "ratio": ratio,
                    "how": point.how,
                    "detail": point.detail,
                }
            )
    return lines
