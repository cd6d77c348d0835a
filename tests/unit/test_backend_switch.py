"""``TW_COMPILE=0``, graphs out of Inductor's cache, and what is logged of both."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

from tw_compile import Config, backend, make_backend
from tw_compile.report import GraphReport, publish


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """The options of every compile; nothing is compiled, and no pass runs: as if all came out of the cache."""
    seen: list[dict[str, object]] = []

    def compile_with_inductor(gm: object, inputs: object, options: dict[str, object]) -> object:
        seen.append(options)
        return lambda: None

    monkeypatch.setattr(backend.compat, "compile_with_inductor", compile_with_inductor)
    monkeypatch.setattr(backend, "_said_off", False)
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


def test_a_graph_out_of_the_cache_is_said_to_be(
    compiled: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tw_compile"):
        backend.tw_compile_backend(None, [])  # type: ignore[arg-type]
    (record,) = caplog.records
    assert "out of Inductor's cache" in record.getMessage() and "has no report" in record.getMessage()
    caplog.clear()
    monkeypatch.setattr(backend.compat, "compile_with_inductor", lambda *_: publish(GraphReport()))
    with caplog.at_level(logging.INFO, "tw_compile"):
        backend.tw_compile_backend(None, [])  # type: ignore[arg-type]
    assert not caplog.records


def test_torch_logs_takes_the_name() -> None:
    code = "import logging, torch; one = logging.getLogger('tw_compile'); print(one.level, len(one.handlers))"
    variables = os.environ | {"TORCH_LOGS": "+tw_compile"}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=variables)
    assert done.stdout.split() == [str(logging.DEBUG), "1"]
