"""What the benchmark's extension of vLLM's workers knows of the graphs of its process."""

from __future__ import annotations

import gc

import pytest

from tw_compile.report import GraphReport, publish

pytestmark = pytest.mark.usefixtures("folder")  # vLLM is imported on the fake node


def test_reports_are_collected_as_long_as_the_process_runs() -> None:
    from tw_compile.benchmark.vllm import worker

    gc.collect()
    report = GraphReport()
    publish(report)
    assert any(each is report for each in worker._reports)
