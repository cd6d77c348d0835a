"""What the command line does with signals. Whole commands with ranks are in ``tests/distributed/test_child.py``."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import typer

from tw_compile.cli import common


def test_a_second_sigterm_does_not_interrupt_what_cleans_up_after_the_first() -> None:
    done: list[str] = []

    @common.one_line_errors
    def command() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("clean")

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(typer.Exit) as caught:
        command()
    assert (caught.value.exit_code, done) == (143, ["clean"]) and signal.getsignal(signal.SIGTERM) is before


def test_signals_are_left_alone_in_ranks_of_a_launcher_and_where_they_are_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @common.one_line_errors
    def handlers() -> list[Any]:
        return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    assert not {signal.default_int_handler, signal.SIG_DFL} & set(handlers())
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert handlers()[0] is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    monkeypatch.setenv("RANK", "0")
    assert handlers() == [signal.default_int_handler, signal.SIG_DFL]
