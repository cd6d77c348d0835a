"""``TW_COMPILE=0``, graphs out of Inductor's cache, and what is logged of both."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.fx as fx
from torch._inductor import config as inductor_config

from tw_compile import Config, TWCompilePass, backend, collect_reports, make_backend
from tw_compile.report import GraphReport, Site, publish


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """The options of every compile; nothing is compiled, and no pass runs: as if all came out of the cache."""
    seen: list[dict[str, object]] = []

    def compile_with_inductor(gm: object, inputs: object, options: dict[str, object]) -> object:
        seen.append(options)
        return lambda: None

    monkeypatch.setattr(backend.compat, "compile_with_inductor", compile_with_inductor)
    backend.say_off.cache_clear()
    return seen


def test_switched_off_it_is_inductor_with_the_same_options(
    compiled: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TW_COMPILE", "0")
    with caplog.at_level(logging.INFO, "tw_compile"):
        for _ in range(2):
            backend.tw_compile_backend(None, [], options={"shape_padding": False, "tw_compile.fuse": True})  # type: ignore[arg-type]
        make_backend(Config())(None, [], mode="max-autotune")  # type: ignore[arg-type]
    assert compiled[:2] == [{"shape_padding": False}] * 2
    assert compiled[2]["max_autotune"] is True and backend.compat.POST_GRAD_HOOK not in compiled[2]
    (record,) = caplog.records
    assert record.getMessage() == "tw_compile: off, as TW_COMPILE=0 in the environment: compiling with Inductor alone"


def test_switched_off_the_pass_leaves_graphs_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The user's own pass still runs. Inductor's caches tell both apart."""
    before: list[fx.Graph] = []
    passes = TWCompilePass(before=before.append)
    graph = fx.symbolic_trace(torch.nn.Identity()).graph
    assert TWCompilePass().uuid() != switched_off_uuid(monkeypatch)
    backend.say_off.cache_clear()
    with caplog.at_level(logging.INFO, "tw_compile"), collect_reports() as reports:
        passes(graph)
    assert before == [graph] and not reports
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["tw_compile"]


def switched_off_uuid(monkeypatch: pytest.MonkeyPatch) -> bytes | None:
    monkeypatch.setenv("TW_COMPILE", "0")
    return TWCompilePass().uuid()


@pytest.mark.parametrize("value", [None, "1"])
def test_otherwise_the_passes_are_in(
    compiled: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("TW_COMPILE", raising=False)
    if value is not None:
        monkeypatch.setenv("TW_COMPILE", value)
    backend.tw_compile_backend(None, [])  # type: ignore[arg-type]
    assert backend.compat.POST_GRAD_HOOK in compiled[0]


def test_wrong_options_are_refused_where_it_is_off_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TW_COMPILE", "0")
    with pytest.raises(ValueError, match=r"did you mean tw_compile\.fuse"):
        backend.tw_compile_backend(None, [], options={"tw_compile.fuze": True})  # type: ignore[arg-type]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of Inductor's cache, which is on."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with inductor_config.patch(fx_graph_cache=True):
        yield tmp_path


def messages_of_a_compile(log: pytest.LogCaptureFixture) -> list[str]:
    log.clear()
    backend.tw_compile_backend(fx.symbolic_trace(torch.nn.Identity()), [torch.ones(2)])
    return [record.getMessage() for record in log.records]


def test_a_graph_out_of_the_cache_has_the_report_that_was_kept(
    compiled: list[dict[str, object]], cache: Path, monkeypatch: pytest.MonkeyPatch, tw_log: pytest.LogCaptureFixture
) -> None:
    (nothing_kept,) = messages_of_a_compile(tw_log)
    assert "out of Inductor's cache" in nothing_kept and "no report of it was kept" in nothing_kept
    written = GraphReport([Site(0, 1, "all_reduce", "fused", "", None, "gloo")], seconds=0.5)
    with monkeypatch.context() as rewritten:
        rewritten.setattr(backend.compat, "compile_with_inductor", lambda *_: publish(written))
        assert messages_of_a_compile(tw_log) == []
    with collect_reports() as reports:
        assert messages_of_a_compile(tw_log) == ["tw_compile: from cache: 1 of 1 all_reduces fused"]
    assert reports == [replace(written, from_cache=True)]
    (file,) = (cache / "tw_compile" / "reports").iterdir()
    file.write_text("[")
    (broken,) = messages_of_a_compile(tw_log)
    assert "no report of it was kept" in broken and str(file) in broken


def test_a_report_that_cannot_be_kept_stops_nothing(
    compiled: list[dict[str, object]], cache: Path, monkeypatch: pytest.MonkeyPatch, tw_log: pytest.LogCaptureFixture
) -> None:
    (cache / "tw_compile").write_text("in the way")
    monkeypatch.setattr(backend.compat, "compile_with_inductor", lambda *_: publish(GraphReport()))
    (message,) = messages_of_a_compile(tw_log)
    assert message.startswith("tw_compile: a graph's report is not kept: report: expected to be kept in ")


def test_without_a_cache_nothing_is_kept_or_said(
    compiled: list[dict[str, object]], cache: Path, tw_log: pytest.LogCaptureFixture
) -> None:
    with inductor_config.patch(force_disable_caches=True):
        assert messages_of_a_compile(tw_log) == []
    assert not list(cache.iterdir())


@pytest.mark.full
def test_torch_logs_takes_the_name() -> None:
    code = "import logging, torch; one = logging.getLogger('tw_compile'); print(one.level, len(one.handlers))"
    variables = os.environ | {"TORCH_LOGS": "+tw_compile"}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=variables)
    assert done.stdout.split() == [str(logging.DEBUG), "1"]
