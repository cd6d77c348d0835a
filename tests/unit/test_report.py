"""Who gets which reports, and what they count."""

from __future__ import annotations

import pytest

from tw_compile import report
from tw_compile.report import Decision, GraphReport, Site, collect_reports


def site(decision: Decision, reason: str = "") -> Site:
    return Site(0, None, "all_reduce", decision, reason, None, None)


def test_reports_go_to_everybody_who_collects() -> None:
    one, two = GraphReport(), GraphReport()
    with collect_reports() as outer:
        with collect_reports() as inner:
            report.publish(one)
        report.publish(two)
    report.publish(GraphReport())
    assert [id(each) for each in inner] == [id(one)]
    assert [id(each) for each in outer] == [id(one), id(two)]


def test_collecting_ends_with_an_error() -> None:
    with pytest.raises(RuntimeError, match="on purpose"), collect_reports() as reports:
        raise RuntimeError("on purpose")
    report.publish(GraphReport())
    assert reports == []


def test_decisions_and_reasons_are_counted_the_most_frequent_first() -> None:
    sites = [site("fused"), site("refused", "rare"), site("refused", "common"), site("gated", "common")]
    found = GraphReport(sites, tokens=(1, None), fused_by_host=5)
    assert found.counts == {"all_reduce": 4, "fused": 1, "refused": 2, "gated": 1}
    assert list(found.refusals.items()) == [("common", 2), ("rare", 1)]
    written = found.as_dict()
    assert (written["counts"], written["tokens"], written["fused_by_host"]) == (found.counts, (1, None), 5)
