"""``tw-compile plan``: bad input, the report, the table and the plot."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from tw_compile.cli.app import app
from tw_compile.cli.plan import FASTER_THAN_SILENT, sequences, token_counts
from tw_compile.planning.device import load_profile


def invoke(*args: str) -> Result:
    return CliRunner().invoke(app, ["plan", *args])


@pytest.mark.parametrize(
    ("args", "named", "came"),
    [
        (["--model", "no-such-model"], "--model", "no-such-model"),
        (["--model", "llama-3.3-70b", "--tp", "3"], "--tp", "3"),
        (["--tp", "0"], "--tp", "0"),
        (["--tokens", "64:32"], "--tokens", "64:32"),
        (["--tokens", "0:32"], "--tokens", "0:32"),
        (["--tokens", "many"], "--tokens", "many"),
        (["--tokens", "10000000000"], "--tokens", "10000000000"),
        (["--tokens", "1:10000000000"], "--tokens", "1:10000000000"),
        (["--tokens", "1:2:4"], "--tokens", "1:2:4"),
        (["--tokens", "٣"], "--tokens", "٣"),
        (["--tokens", "1,,2"], "--tokens", "1,,2"),
        (["--kernel", ""], "--kernel", "''"),
        (["--tokens", "1,1"], "--tokens", "1,1"),
        (["--device-profile", "A100"], "--device-profile", "A100"),
        (["--kernel", "multimem"], "--kernel", "multimem"),
        (["--batch", "100", "--tokens", "64,128"], "--batch", "100"),
        (["--attention", "both"], "--attention", "both"),
        (["--plot", "plan.pdf"], "--plot", "plan.pdf"),
        (["--json", "no/such/folder/plan.json"], "--json", "no/such/folder/plan.json"),
    ],
    ids=" ".join,
)
def test_bad_input_is_one_line_that_names_the_option_and_the_value(args: list[str], named: str, came: str) -> None:
    result = invoke(*args)
    assert result.exit_code == 2
    (line,) = result.output.splitlines()
    assert line.startswith("error: ") and named in line and came in line and "expected" in line


def test_a_range_doubles_and_a_list_is_taken_as_it_is() -> None:
    assert token_counts("512:4096") == (512, 1024, 2048, 4096)
    assert token_counts("1000:5000") == (1000, 2000, 4000)
    assert token_counts("1025,7") == (1025, 7)


def test_tokens_are_dealt_out_to_sequences() -> None:
    assert sequences(10, 4) == (3, 3, 2, 2)


def test_the_report_has_a_plan_for_every_token_count(tmp_path: Path) -> None:
    files = tmp_path / "plan.json", tmp_path / "plan.svg"
    result = invoke("--tp", "4", "--tokens", "64:4096", "--json", str(files[0]), "--plot", str(files[1]))
    assert result.exit_code == 0, result.output
    report = json.loads(files[0].read_text())
    assert (report["command"], report["model"], report["world_size"]) == ("plan", "llama-3.3-70b", 4)
    assert (report["device_profile"], report["kernel"], report["layers"]) == ("H200", load_profile("H200").kernel, 80)
    plans = {plan["tokens"]: plan for plan in report["plans"]}
    assert sorted(plans) == [64, 128, 256, 512, 1024, 2048, 4096]
    assert (plans[64]["mode"], plans[64]["off"], plans[64]["sizes"]) == ("off", "not_faster", [64])
    assert plans[4096]["mode"] == "split" and sum(plans[4096]["sizes"]) == 4096
    assert [window["computes"] for window in plans[4096]["windows"]] == ["attention", "attention", "mlp", "mlp"]
    assert plans[4096]["gain"] == pytest.approx(plans[4096]["predicted"]["unfused_us"] / plans[4096]["us"])
    assert any(plan["us"] < plan["predicted"]["no_communication_us"] for plan in plans.values())
    assert FASTER_THAN_SILENT in " ".join(result.output.split()), "why it is faster than without communication"
    svg = files[1].read_text()
    assert svg.startswith("<?xml") and svg.rstrip().endswith("</svg>")


def test_the_table_shows_halves_windows_and_why_not() -> None:
    result = invoke("--tp", "4", "--tokens", "64,4096", "--batch", "2")
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    assert ["4096", "split", "2048", "+", "2048"] in [line[:5] for line in lines]
    head = next(index for index, line in enumerate(lines) if line[:3] == ["tokens", "window", "GEMMs:"])
    windows = [line[line[0] == "4096" :] for line in lines[head + 1 :] if line]
    windows = [line for line in windows if line[0] in ("attention", "mlp")]  # others go on with a window's GEMMs
    assert [line[:2] for line in windows] == [["attention", "1"], ["attention", "2"], ["mlp", "1"], ["mlp", "2"]]
    assert all("32.0 MiB of half" in " ".join(line) for line in windows)
    assert " ".join(lines[-1]).startswith("64 tokens: off, not_faster: ")


def test_json_on_standard_output_is_alone_there() -> None:
    result = invoke("--tokens", "1024", "--json", "-", "--device-profile", "b200")
    assert json.loads(result.stdout)["device_profile"] == "B200"


def test_multicast_is_planned_where_the_profile_has_it() -> None:
    result = invoke("--tokens", "8192", "--device-profile", "H100", "--kernel", "multimem", "--json", "-")
    (plan,) = json.loads(result.stdout)["plans"]
    assert {window["ctas"] for window in plan["windows"]} <= {2, 4, 8, 16}
    assert plan["gain"] > 1.2


def test_the_command_itself_imports_no_torch() -> None:
    code = "import sys; import tw_compile.cli.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_it_fits_a_terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def narrow(json_file: str | None) -> Console:
        return Console(width=80, force_terminal=True, no_color=True, highlight=False)

    monkeypatch.setattr("tw_compile.cli.common.make_console", narrow)
    output = re.sub("\x1b\\[[0-9;]*m", "", invoke("--tp", "4", "--tokens", "4096,65536").output)
    lines = [line.rstrip() for line in output.splitlines()]
    assert max(map(len, lines)) <= 80 and "…" not in output
    assert any(line.split()[:5] == ["65536", "split*", "32768", "+", "32768"] for line in lines)
    assert "*: half 2 begins within a sequence" in lines
    windows = [line for line in lines if "MiB of half" in line]
    assert len(windows) == 8 and all(line.split()[-1].isdecimal() for line in windows)
    assert sum("qkv" in line or "gate_up" in line for line in lines) >= 8, "GEMMs of each window are told, too"
