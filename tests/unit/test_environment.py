"""Environment variables: one reading of each, and every command refuses what is wrong with any."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tw_compile import Config, environment
from tw_compile.cli.app import app
from tw_compile.gating import threshold_layers
from tw_compile.hosts.vllm.options import asked_options

COMMANDS = [
    ["run", "--device", "cpu"],
    ["inspect", "--model", "tiny-llama"],
    ["plan", "--tp", "4", "--tokens", "64"],
    ["explain"],
    ["doctor"],
    ["tune", "--dry-run"],
    ["bench", "passes"],
    ["bench", "kernel", "--device", "cpu"],
    ["bench", "layer", "--device", "cpu"],
    ["bench", "model", "--device", "cpu"],
    ["bench", "vllm", "--dry-run"],
]
BAD = {
    "TW_COMPILE": "yes",
    "TW_COMPILE_STRICT": "yes",
    "TW_COMPILE_SPIN_LIMIT": "abc",
    "TW_COMPILE_THRESHOLDS": "nowhere.toml",
    "TW_COMPILE_REQUIRE_GPUS": "all",
    "TW_COMPILE_PEER_ACCESS": "off",
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command[:2]))
def test_every_command_refuses_every_bad_value_in_one_line(
    command: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, BAD[name])
    result = CliRunner().invoke(app, command)
    (line,) = result.output.splitlines()
    assert result.exit_code == 2 and line.startswith(f"error: {name}: expected ") and repr(BAD[name]) in line


def test_a_bad_value_is_refused_before_anything_slow_is_imported() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from tw_compile.cli.app import app; "
        "result = CliRunner().invoke(app, ['run', '--device', 'cpu']); "
        "assert result.exit_code == 2, result.output; sys.exit('torch' in sys.modules)"
    )
    variables = os.environ | {"TW_COMPILE_SPIN_LIMIT": "abc"}
    assert subprocess.run([sys.executable, "-c", code], check=False, env=variables).returncode == 0


def test_empty_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = dict.fromkeys((*BAD, "TW_COMPILE_CACHE_DIR"), "")
    environment.check_environment(empty)
    assert environment.enabled(empty) is None and environment.cache_dir(empty) is None
    assert (environment.strict(empty), environment.spin_limit(empty), environment.required_gpus(empty)) == (False, 0, 0)
    assert environment.peer_access(empty)
    assert asked_options(None, empty) is None and asked_options({"tw_compile": {}}, empty) == {}
    assert threshold_layers("auto", "sm90", empty | {"XDG_CONFIG_HOME": "/dev/null"})[-2].table is None
    monkeypatch.setenv("TW_COMPILE_STRICT", "")
    assert Config().strict is False


@pytest.mark.parametrize("value", ["-1", "abc", "1e6", "²", "1_000", str(2**31), "9" * 5000])
@pytest.mark.parametrize("name", ["TW_COMPILE_SPIN_LIMIT", "TW_COMPILE_REQUIRE_GPUS"])
def test_a_number_is_a_number_in_the_range(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected an integer from 0 to 2147483647, got"):
        environment.check_environment({name: value})


def test_a_fifo_or_a_folder_is_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "fifo.toml")
    (tmp_path / "folder.toml").mkdir()
    for name in ("fifo.toml", "folder.toml"):
        monkeypatch.setenv("TW_COMPILE_THRESHOLDS", str(tmp_path / name))
        begin = time.monotonic()
        result = CliRunner().invoke(app, ["explain"])
        (line,) = result.output.splitlines()
        assert line.startswith("error: TW_COMPILE_THRESHOLDS: expected ") and str(tmp_path / name) in line
        assert result.exit_code == 2 and time.monotonic() - begin < 2


def test_what_is_wrong_in_the_file_names_the_variable_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.toml"
    for content in (b"schema_version = 3\n", b"\xff\xfe"):
        file.write_bytes(content)
        monkeypatch.setenv("TW_COMPILE_THRESHOLDS", str(file))
        result = CliRunner().invoke(app, ["explain"])
        (line,) = result.output.splitlines()
        assert result.exit_code == 2 and line.startswith("error: TW_COMPILE_THRESHOLDS: ") and str(file) in line


def test_every_variable_of_the_docs_has_a_reader() -> None:
    page = (Path(__file__).parents[2] / "docs" / "environment.md").read_text()
    named = {line.split("`")[1].partition("=")[0] for line in page.splitlines() if line.startswith("| `TW_COMPILE")}
    known = {value for name, value in vars(environment).items() if name.isupper() and not name.startswith("_")}
    assert named == known


def test_spin_limit_is_validated() -> None:
    assert environment.spin_limit({}) == 0
    assert environment.spin_limit({"TW_COMPILE_SPIN_LIMIT": "5000"}) == 5000
    for text in ("-1", "many", "1e6", str(2**31)):
        with pytest.raises(ValueError, match="TW_COMPILE_SPIN_LIMIT"):
            environment.spin_limit({"TW_COMPILE_SPIN_LIMIT": text})
