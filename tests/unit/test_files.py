"""The user's own files: what is there and no regular file is refused by its name, not taken for nothing and not waited for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tw_compile import Config
from tw_compile.cli.app import app
from tw_compile.gating import Node, threshold_layers
from tw_compile.harness.requests import UsageError
from tw_compile.kernels.transports.selection import user_table
from tw_compile.own_gate import own_gate
from tw_compile.planning.device import user_profile
from tw_compile.tuning.run import PARTIAL, earlier_stages
from tw_compile.tuning.tables import check_folder

READERS: dict[str, Callable[[], object]] = {
    "thresholds.toml": lambda: threshold_layers("auto", "sm90"),
    "kernels.toml": user_table,
    "device.toml": user_profile,
}
WRONG: dict[str, Callable[[Path], None]] = {
    "a folder": lambda path: path.mkdir(),
    "a FIFO": os.mkfifo,
    "No such file": lambda path: path.symlink_to("nowhere"),
    "'utf-8' codec": lambda path: path.write_bytes(b"\xff") and None,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    found = tmp_path / "tw_compile"
    found.mkdir()
    return found


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_text_is_refused_by_its_name(name: str, kind: str, folder: Path) -> None:
    assert READERS[name]() is not NotImplemented, "nothing there is no error"
    WRONG[kind](folder / name)
    with pytest.raises(ValueError, match=f"expected a .*file.*, got '.*{name}'.*{kind}"):
        READERS[name]()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("name", ["thresholds.toml", "kernels.toml"])
def test_tuning_does_not_write_beside_what_it_cannot_read(name: str, kind: str, folder: Path) -> None:
    WRONG[kind](folder / name)
    with pytest.raises(UsageError, match=f"--out: expected a table that can be read, got .*{name}.*{kind}"):
        check_folder(folder, "sm90", "NVIDIA H200")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", WRONG)
def test_partial_results_that_cannot_be_read_are_refused(kind: str, folder: Path) -> None:
    assert earlier_stages(folder, {}) == {}
    WRONG[kind](folder / PARTIAL)
    with pytest.raises(UsageError, match=f"--resume: expected partial results in .*{kind}"):
        earlier_stages(folder, {})


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", WRONG)
def test_a_device_profile_is_a_regular_file(kind: str, tmp_path: Path) -> None:
    WRONG[kind](tmp_path / "mine.toml")
    result = CliRunner().invoke(app, ["plan", "--device-profile", str(tmp_path / "mine.toml")])
    (line,) = result.output.splitlines()
    assert result.exit_code == 2 and "--device-profile" in line and "mine.toml" in line and kind in line


def test_no_folder_for_files_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/dev/null")
    assert user_table() == {} and user_profile() is None


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
@pytest.mark.parametrize("option", ["thresholds", "wire_accuracy"])
def test_a_name_that_no_file_can_have_is_refused_by_the_options_name(option: str, name: str) -> None:
    with pytest.raises(ValueError, match=option):
        own_gate(Config(**{option: name}), Node(None, False))  # type: ignore[arg-type]
