"""What a row's share of the bound is a share of."""

from __future__ import annotations

from dataclasses import replace

from test_bench_kernel import SPEC, printed, report_of, row

from tw_compile.benchmark.results import complete
from tw_compile.benchmark.spec import MessageSize


def test_through_host_memory_the_bound_is_what_bare_copies_took() -> None:
    ours, copies = row("tw-host", "ours", 20.0), row("host-copies", "bound", 15.0)
    of_links = {one.label for one in complete([replace(ours)], MessageSize(16, 8192, "bfloat16"), SPEC)}
    assert {"two-shot-bound", "one-shot-bound"} < of_links
    size = MessageSize(16, 8192, "bfloat16")
    found = complete([replace(ours), copies], size, SPEC, through_host=True)
    assert [one.label for one in found] == ["tw-host", "host-copies"]
    assert found[0].share_of_bound == 0.75 and found[1].share_of_bound is None
    (alone,) = complete([replace(ours)], size, SPEC, through_host=True)
    assert alone.share_of_bound is None and alone.bus_gb_per_s is not None
    report = report_of(found) | {"through_host": True}
    assert "bare copies" in printed(report) and "370 GB/s" not in printed(report)
    assert "two-shot traffic at 370 GB/s" in printed(report | {"through_host": False})
