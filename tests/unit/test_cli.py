"""The command line: errors, reports and text. What needs ranks is in ``tests/distributed/test_run.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import assert_keys_are_listed
from rich.console import Console
from typer.testing import CliRunner, Result

from tw_compile.cli import common, explain, render, run
from tw_compile.cli.app import app
from tw_compile.kernels.transports import selection
from tw_compile.kernels.transports.selection import Step
from tw_compile.runner import machine, worker
from tw_compile.runner.numerics import OutputErrors, digest, worst
from tw_compile.runner.spec import RunSpec

INSPECT = ["inspect", "--model", "tiny-llama", "--tp", "4", "--tokens", "24", "--layers", "3"]

PLAN_70B = ["plan", "--model", "llama-3.3-70b", "--tp", "4", "--tokens", "4096", "--device-profile", "H200"]


def invoke(*args: str) -> Result:
    return CliRunner().invoke(app, list(args))


@pytest.fixture(scope="module")
def inspected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, dict[str, Any]]:
    file = tmp_path_factory.mktemp("inspect") / "report.json"
    result = invoke(*INSPECT, "--json", str(file))
    assert result.exit_code == 0, result.output
    return result, json.loads(file.read_text())


@pytest.mark.parametrize(
    ("args", "named", "came"),
    [
        (["run", "--device", "cpu", "--tokens", "8,0"], "--tokens", "8,0"),
        (["run", "--device", "cpu", "--tokens", "many"], "--tokens", "many"),
        (["run", "--device", "cpu", "--tokens", "8,8"], "--tokens", "8,8"),
        (["run", "--device", "cpu", "--dtype", "int8"], "--dtype", "int8"),
        (["run", "--device", "cpu", "--tp", "0"], "--tp", "0"),
        (["run", "--device", "cpu", "--layers", "-1"], "--layers", "-1"),
        (["run", "--device", "cpu", "--transport", "p2p"], "--transport", "p2p"),
        (["run", "--device", "tpu"], "--device", "tpu"),
        (["run", "--device", "cpu", "--mode", "fast"], "--mode", "fast"),
        (["inspect", "--model", "no-such-model"], "--model", "no-such-model"),
        (["inspect", "--model", "tiny-llama", "--tp", "3"], "--tp", "3"),
        (["inspect", "--model", "tiny-llama", "--layers", "99"], "layers", "99"),
        (["inspect", "--tokens", "0"], "--tokens", "0"),
        (["inspect", "--split", "half"], "--split", "half"),
        (["inspect", "--split", "auto", "--device-profile", "H2"], "--device-profile", "H2"),
        (["run", "--device", "cpu", "--split", "0"], "--split", "0"),
        (["explain", "--device", "h200"], "--device", "h200"),
        (["explain", "--tp", "1"], "--tp", "1"),
        (["explain", "--hidden", "0"], "--hidden", "0"),
        (["explain", "--tokens", "a"], "--tokens", "a"),
        (["explain", "--dtype", "int8"], "--dtype", "int8"),
        (["explain", "--host", "tgi"], "--host", "tgi"),
        (["explain", "--backend", "mpi"], "--backend", "mpi"),
        (["explain", "--thresholds", "nowhere.toml"], "thresholds", "nowhere.toml"),
        (["bench", "passes", "--model", "tiny-llama", "--layers", "2,40"], "--layers", "40"),
        (["explain", "--thresholds", "~no-such-user/a.toml"], "thresholds", "~no-such-user/a.toml"),
        (["run", "--device", "cpu", "--timeout", "nan"], "--timeout", "nan"),
        (["bench", "kernel", "--device", "cpu", "--timeout", "inf"], "--timeout", "inf"),
        (["bench", "vllm", "--dry-run", "--kv-cache-gib", "nan"], "--kv-cache-gib", "nan"),
        (["bench", "vllm", "--dry-run", "--timeout", "-1"], "--timeout", "-1"),
        (["tune", "--dry-run", "--timeout", "nan"], "--timeout", "nan"),
        (["tune", "--dry-run", "--out", "~no-such-user/a"], "--out", "~no-such-user/a"),
        (["tune", "--dry-run", "--out", f"{__file__}/a/b"], "--out", "is a file"),
    ],
    ids=" ".join,
)
def test_bad_input_is_one_line_that_names_the_option_and_the_value(args: list[str], named: str, came: str) -> None:
    result = invoke(*args)
    assert result.exit_code == 2
    lines = [line for line in result.output.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and named in lines[0] and came in lines[0] and "expected" in lines[0]


@pytest.mark.full
@pytest.mark.parametrize(
    "command", [["plan", "--tp", "2"], ["inspect", "--tp", "2"], ["run", "--device", "cpu"]], ids=" ".join
)
@pytest.mark.parametrize(
    ("changed", "came"),
    [
        ({"hidden_size": "many"}, "'many'"),
        ({"rope_parameters": {"rope_type": "warp"}}, "rope_parameters.rope_type: expected one of default, "),
        ({"num_hidden_layers": -1}, "num_hidden_layers: expected a positive number, got -1"),
        ({"num_attention_heads": 0}, "num_attention_heads: expected a positive number, got 0"),
        (None, "got list"),
    ],
)
def test_a_config_that_makes_no_sense_is_one_line_that_names_the_file(
    tmp_path: Path, command: list[str], changed: dict[str, Any] | None, came: str
) -> None:
    file = tmp_path / "config.json"
    config = json.loads((files("tw_compile.configs") / "models" / "tiny-llama.json").read_text())
    file.write_text(json.dumps([config] if changed is None else config | changed))
    if command[0] == "run":
        command = [*command, "--tp", "1"]
    result = invoke(*command, "--model", str(file), "--tokens", "8")
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.output
    lines = [line for line in result.output.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "--model" in lines[0] and str(file) in lines[0] and came in lines[0]
    assert "Traceback" not in result.output


@pytest.mark.full
@pytest.mark.parametrize("command", [["inspect", "--tp", "2"], ["run", "--device", "cpu", "--tp", "1"]], ids=" ".join)
def test_an_unknown_activation_is_one_line(tmp_path: Path, command: list[str]) -> None:
    config = json.loads((files("tw_compile.configs") / "models" / "tiny-llama.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_act": "sillu"}))
    result = invoke(*command, "--model", str(tmp_path), "--tokens", "8")
    assert result.exit_code == 2 and "Traceback" not in result.output, result.output
    (line,) = (line for line in result.output.splitlines() if line.startswith("error: "))
    assert f"--model {tmp_path}" in line and "hidden_act: expected one of gelu, " in line and "got 'sillu'" in line


@pytest.mark.parametrize(
    "command", [["run", "--device", "cpu"], ["inspect"], ["plan"], ["explain"], ["bench", "passes"]]
)
@pytest.mark.parametrize(
    ("content", "came"),
    [(b'{"model_type": "llama"}\xff', "'utf-8' codec"), (b"[]", "got list"), (b"{", "expected JSON"), (None, "a FIFO")],
)
def test_a_file_that_is_no_configuration_is_named_before_transformers_is_imported(
    tmp_path: Path, command: list[str], content: bytes | None, came: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tw_compile.models.config.load_config", None)
    monkeypatch.setattr("tw_compile.runner.model.load_config", None)
    file = tmp_path / "config.json"
    os.mkfifo(file) if content is None else file.write_bytes(content)
    result = invoke(*command, "--model", str(tmp_path))
    (line,) = result.output.splitlines()
    assert result.exit_code == 2 and line.startswith("error: --model ") and str(file) in line and came in line


@pytest.mark.parametrize(
    "command",
    [
        ["run", "--device", "cpu", "--tp"],
        ["inspect", "--tp"],
        ["inspect", "--tokens"],
        ["inspect", "--layers"],
        ["plan", "--tp"],
        ["plan", "--batch"],
        ["explain", "--tp"],
        ["explain", "--hidden"],
        ["tune", "--device", "cpu", "--dry-run", "--tp"],
        ["bench", "passes", "--tp"],
        ["bench", "kernel", "--device", "cpu", "--tp"],
        ["bench", "kernel", "--device", "cpu", "--calls"],
        ["bench", "kernel", "--device", "cpu", "--repeats"],
        ["bench", "kernel", "--device", "cpu", "--rotate-from"],
        ["bench", "layer", "--device", "cpu", "--tp"],
        ["bench", "layer", "--device", "cpu", "--batch"],
        ["bench", "model", "--device", "cpu", "--seed"],
        ["bench", "vllm", "--dry-run", "--tp"],
        ["bench", "vllm", "--dry-run", "--decode-tokens"],
        ["bench", "vllm", "--dry-run", "--kv-cache-gib"],
        ["bench", "vllm", "--dry-run", "--timeout"],
        ["run", "--device", "cpu", "--timeout"],
    ],
    ids=" ".join,
)
def test_numbers_that_are_too_large_are_refused_in_one_line(command: list[str]) -> None:
    result = invoke(*command, "99999999999999")
    (line,) = result.output.splitlines()
    assert result.exit_code == 2 and line.startswith(f"error: {command[-1]}: expected ") and "99999999999999" in line


@pytest.mark.parametrize("command", [["inspect", "--model", "tiny-llama"], ["run", "--device", "cpu"]], ids=" ".join)
def test_a_thresholds_file_that_is_not_there_is_known_before_the_model_is_built(
    monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setenv("TW_COMPILE_THRESHOLDS", "nowhere.toml")
    result = invoke(*command)
    (line,) = result.output.splitlines()
    assert result.exit_code == 2 and line.startswith("error: TW_COMPILE_THRESHOLDS: expected auto, off or a file")
    assert "nowhere.toml" in line


@pytest.mark.parametrize("world_size", [None, "", "0", "many"])
def test_a_launcher_that_does_not_say_how_many_ranks_there_are(
    monkeypatch: pytest.MonkeyPatch, world_size: str | None
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world_size is not None:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    result = invoke("run", "--device", "cpu")
    assert result.exit_code == 2 and "error: WORLD_SIZE: expected a launcher's number of ranks" in result.output


def test_a_dry_run_makes_no_folder(tmp_path: Path) -> None:
    result = invoke("bench", "vllm", "--dry-run", "--logs", str(tmp_path / "logs"))
    assert result.exit_code == 0 and not (tmp_path / "logs").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_run_on_cuda_without_a_gpu_is_refused() -> None:
    result = invoke("run", "--device", "cuda")
    assert result.exit_code == 2
    assert "error: --device: expected cpu" in result.output


@pytest.mark.parametrize(
    ("gpus", "launched", "device", "world_size"),
    [
        (0, None, "cpu", 2),
        (1, None, "cpu", 2),
        (4, None, "cuda", 4),
        (3, None, "cuda", 2),
        (1, 1, "cuda", 2),
        (1, 2, "cpu", 4),
    ],
)
def test_ranks_go_to_the_gpus_that_are_there(
    gpus: int, launched: int | None, device: str, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``launched``: ranks of this machine when torchrun started two machines."""
    monkeypatch.setattr(common, "gpus", lambda: gpus)
    if launched is not None:
        environment = {"RANK": "0", "LOCAL_WORLD_SIZE": str(launched), "WORLD_SIZE": str(2 * launched)}
        for name, number in environment.items():
            monkeypatch.setenv(name, number)
    spec = run.resolve("tiny-llama", None, None, None, None, "auto", "bfloat16", "default", 60.0)
    assert (spec.device, spec.world_size) == (device, world_size)


def test_help_does_not_import_torch() -> None:
    code = "import sys; from tw_compile.cli.app import app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.full
def test_inspect_reports_every_all_reduce(inspected: tuple[Result, dict[str, Any]]) -> None:
    _, report = inspected
    assert report["schema_version"] == 1
    assert (report["model"], report["world_size"], report["device"], report["tokens"]) == (
        "tiny-llama",
        4,
        "cuda",
        [24],
    )
    assert report["counts"] == {"all_reduce": 7, "fused": 7, "refused": 0, "gated": 0}
    assert [site["index"] for site in report["sites"]] == list(range(7))
    assert {site["transport"] for site in report["sites"]} == {"p2p"}
    assert {site["bytes"] for site in report["sites"]} == {24 * 512 * 2}
    assert [site["producer"] for site in report["sites"]] == ["other"] + ["mm"] * 6  # the first sum is of embeddings


def test_inspect_says_how_many_gemms_are_absorbed(inspected: tuple[Result, dict[str, Any]]) -> None:
    result, _ = inspected
    assert "7 all_reduces: 7 fused (6 with their GEMM), 0 refused, 0 gated" in result.output
    assert [line.split()[0] for line in result.output.splitlines() if line.rstrip().endswith("fused+mm")] == ["6"]


def test_inspect_says_in_one_line_what_is_fed(inspected: tuple[Result, dict[str, Any]]) -> None:
    result, report = inspected
    assert [line for line in result.output.splitlines() if "group_too_large" in line] == ["feed_mm: group_too_large 7"]
    assert {site["feed_detail"] for site in report["sites"]} == {"4 > 2 ranks"}
    assert "4 > 2 ranks" not in result.output


def test_what_is_fed_is_counted_for_all_layers_that_a_site_stands_for() -> None:
    site = {"consumer": "fed", "feed_refusal": "", "layer": 0, "stands_for": [0, 1, 2]}
    last = {"consumer": "other", "feed_refusal": "residual_on_all_ranks", "layer": None, "stands_for": None}
    unasked = last | {"feed_refusal": ""}
    assert render.fed_line([last, site, unasked]) == "feed_mm: fed 3, residual_on_all_ranks 1"
    assert render.fed_line([unasked]) is None


def test_inspect_shows_the_change_of_one_layer(inspected: tuple[Result, dict[str, Any]]) -> None:
    result, _ = inspected
    lines = result.output.splitlines()
    assert any(line.startswith("- all_reduce") for line in lines)
    assert any(line.startswith("- rsqrt") for line in lines)
    assert any(line.startswith("+ fused_mm_start") and "residual_out=sharded" in line for line in lines)
    assert any(line.startswith("+ fused_wait") for line in lines)
    assert sum(line.startswith("+ fused_mm_start") for line in lines) == 2
    assert sum(line.startswith("- mm") for line in lines) == 2


def test_inspect_tells_the_split_and_its_plan(tmp_path: Path) -> None:
    files = tmp_path / "report.json", tmp_path / "page.html"
    args = ["inspect", "--model", "llama-3.3-70b", "--tp", "4", "--tokens", "4096", "--layers", "1", "--split", "auto"]
    result = invoke(*args, "--device-profile", "h200", "--json", str(files[0]), "--html", str(files[1]))
    assert result.exit_code == 0, result.output
    report = json.loads(files[0].read_text())
    assert all("sm90.toml: world_size 4" in site["entry"] for site in report["sites"]), "thresholds of the named device"
    (split,) = report["splits"]
    planned = json.loads(invoke(*PLAN_70B, "--json", "-").stdout)["plans"][0]
    assert split["plan"] == planned
    assert (split["mode"], split["unit"], split["sizes"]) == ("split", "token", planned["sizes"])
    assert split["joins"] == {} and split["duplicated"] > 30
    decision = f"token split {split['sizes'][0]} + {split['sizes'][1]} tokens, attention of each half"
    for text in (result.output, files[1].read_text()):
        assert decision in text and "joins: none" in text
        assert "predicted for H200, 4096 tokens" in text and text.count("mlp 1") == 1
        assert "left by" in text and "gate_up" in text
        assert f"{split['overlap']['in_slot']} leave their results in the slot" in " ".join(text.split())
    assert split["overlap"]["in_slot"] > 0
    of_halves = [line.split()[1] for line in result.output.splitlines() if line.startswith("+ ") and "mm" in line]
    assert len([name for name in of_halves if name.startswith("fused_mm_start")]) == 4, "both sites of both halves"
    assert len([name for name in of_halves if "mm_leaving_sms" in name]) >= 3, "GEMMs that leave SMs are of the layer"
    assert files[1].read_text().count('class="box matmul added"') >= 3


@pytest.mark.full
def test_inspect_splits_all_layers_as_planned() -> None:
    args = ["--model", "llama-3.1-8b", "--tp", "4", "--tokens", "4096", "--device-profile", "H200", "--json", "-"]
    (split,) = json.loads(invoke("inspect", *args, "--all-layers").stdout)["splits"]
    planned = json.loads(invoke("plan", *args).stdout)["plans"][0]
    assert split["plan"] == planned and split["sizes"] == planned["sizes"]
    assert (split["mode"], split["joins"]) == ("split", {})


def test_inspect_says_why_nothing_is_split() -> None:
    (split,) = json.loads(invoke(*INSPECT, "--split", "auto", "--json", "-").stdout)["splits"]
    assert (split["mode"], split["reason"]) == ("off", "no_device_profile")
    result = invoke(*INSPECT, "--split", "auto", "--device-profile", "H200")
    assert "token split off, " in result.output and "predicted for H200, 24 tokens" in result.output


def test_inspect_names_a_refused_site_and_why() -> None:
    result = invoke(*INSPECT, "--layers", "1", "--tp", "1", "--json", "-")
    report = json.loads(result.stdout)
    assert report["counts"]["fused"] == 0
    result = invoke(*INSPECT, "--transport", "gloo")
    assert result.exit_code == 0
    refused = [line for line in result.output.splitlines() if line.startswith("site ")]
    assert len(refused) == 7
    assert all("refused" in line and "needs CPU tensors" in line for line in refused)


def test_json_on_standard_output_is_nothing_but_json() -> None:
    result = invoke("doctor", "--json", "-")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["command"] == "doctor"
    assert "what would run" in result.stderr


def test_doctor_says_what_would_run_for_each_group_size() -> None:
    report = json.loads(invoke("doctor", "--json", "-").stdout)
    assert report["versions"]["torch"] == torch.__version__
    assert [plan["world_size"] for plan in report["plans"]] == [2, 4, 8]
    assert all(plan["transport"] and plan["transport_why"] for plan in report["plans"])
    if not report["gpus"]:
        assert {plan["transport"] for plan in report["plans"]} == {"gloo"}
        assert report["symmetric_memory"]["multicast_supported"] is None


def test_doctor_says_which_kernel_serves_which_message(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = (Step(4, 2**20, "push_two_shot", 64), Step(4, 2**24, "stream", 16))
    monkeypatch.setattr(selection, "shipped_tables", lambda: {"GPU": steps})
    assert (
        machine.kernels_by_size("GPU", 4, "p2p")
        == "push_two_shot (64 CTAs) to 1 MiB, stream (16 CTAs) to 16 MiB and beyond"
    )
    unmeasured = machine.kernels_by_size("GPU", 2, "p2p")
    assert unmeasured.startswith("push_one_shot (128 CTAs) to 2.2")
    assert unmeasured.endswith("push_two_shot (128 CTAs) beyond (none measured for GPU, 2 ranks)")


EXPLAIN = ["explain", "--device", "sm90", "--multicast", "--tp", "8", "--hidden", "2048"]


def explained(*args: str) -> list[dict[str, Any]]:
    result = invoke(*EXPLAIN, *args, "--json", "-")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["messages"]


def test_explain_says_for_each_message_what_happens_and_which_entry_says_so() -> None:
    args = ["--tokens", "48,64,96,128", "--host", "vllm-0.24"]
    messages = explained(*args)
    assert [(one["tokens"], one["bytes"]) for one in messages] == [(n, n * 4096) for n in (48, 64, 96, 128)]
    assert [one["decision"] for one in messages] == ["fused", "gated", "gated", "gated"]
    assert [one["transport"] for one in messages] == ["p2p", None, None, None]
    assert [one["backend"] for one in messages] == ["custom"] + ["multimem"] * 3
    assert all("sm90-multicast.toml: " in one["entry"] and "44079" in one["source"] for one in messages)
    output = invoke(*EXPLAIN, *args).output
    head, *lines = output.splitlines()
    assert head.split() == ["tokens", "message", "decision", "unfused", "by", "why"]
    for line, message in zip(lines[:4], messages, strict=True):
        tokens, _, unit, decision, *rest = line.split()
        assert (tokens, decision) == (str(message["tokens"]), message["decision"]) and message["backend"] in rest
        assert unit == "KiB" and "left" not in line
    assert max(map(len, output.splitlines())) <= 80, "fits a terminal"
    text = " ".join(output.split())
    assert text.endswith(explain.WITHOUT_MODEL)
    assert all(text.count(f"{one['entry']}; {one['source']}") == 1 for one in messages), "each reason once"


def test_explain_follows_the_environment_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLREDUCE_USE_SYMM_MEM", "0")
    messages = explained("--tokens", "64,96", "--host", "vllm-0.24")
    assert [(one["backend"], one["decision"]) for one in messages] == [("custom", "fused")] * 2
    messages = explained("--tokens", "64,96", "--backend", "multimem")
    assert [(one["backend"], one["decision"]) for one in messages] == [("multimem", "gated")] * 2


def test_explain_names_the_transport_that_can_serve_the_message() -> None:
    args = ["explain", "--device", "sm90", "--tp", "2", "--tokens", "64", "--json", "-"]
    transports = [json.loads(invoke(*args, "--hidden", hidden).stdout)["messages"][0] for hidden in ("4096", "4097")]
    assert [one["transport"] for one in transports] == ["p2p", "nccl"]
    assert "measured on 2x NVIDIA H200" in transports[0]["source"]


def test_doctor_prints_the_layers_of_thresholds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "tw_compile").mkdir()
    user = tmp_path / "tw_compile" / "thresholds.toml"
    user.write_text('schema_version = 1\ndevice_class = "sm103"\n')
    result = invoke("doctor", "--json", "-")
    report = json.loads(result.stdout)["thresholds"]
    names = [layer["layer"] for layer in report["layers"] if layer["layer"] != "shipped"]
    assert names == ["user file", "TW_COMPILE_THRESHOLDS", "option"]
    (own,) = (layer for layer in report["layers"] if layer["layer"] == "user file")
    assert own["from"] == str(user) and own["state"].startswith("not used: it is about sm103")
    assert str(user) in result.stderr
    user.write_text("schema_version = 3\n")
    result = invoke("doctor")
    assert result.exit_code == 2 and f"error: {user}: " in result.output


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["doctor"], "--json"),
        (["explain"], "--json"),
        (["inspect"], "--json"),
        (["inspect"], "--html"),
        (["run", "--device", "cpu"], "--json"),
        (["plan", "--model", "tiny-llama", "--tp", "2"], "--json"),
        (["bench", "passes"], "--csv"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("file", ["nowhere/report", "."])
def test_a_file_that_cannot_be_written_is_known_before_anything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], option: str, file: str
) -> None:
    monkeypatch.setattr("tw_compile.models.config.load_config", None)
    monkeypatch.setattr("tw_compile.runner.model.load_config", None)
    result = invoke(*command, option, str(tmp_path / file))
    assert result.exit_code == 2 and f"error: {option}: expected a file in a folder that exists" in result.output
    assert result.stdout == ""


@pytest.mark.full
def test_bench_passes_writes_one_row_per_depth(tmp_path: Path) -> None:
    file, report = tmp_path / "passes.csv", tmp_path / "passes.json"
    args = ["--model", "tiny-llama", "--tp", "2", "--layers", "2,1", "--csv", str(file), "--json", str(report)]
    result = invoke("bench", "passes", *args)
    assert result.exit_code == 0, result.output
    assert_keys_are_listed("bench passes", json.loads(report.read_text()))
    header, *rows = file.read_text().splitlines()
    assert header.startswith("model,world_size,layers,")
    assert [row.split(",")[:5] for row in rows] == [
        ["tiny-llama", "2", "1", "3", "3"],
        ["tiny-llama", "2", "2", "5", "5"],
    ]
    assert "2 against 1 layers" in result.output


def test_layers_are_shown_as_ranges() -> None:
    assert render.ranges([5, 0, 1, 2, 2]) == "0-2, 5"


def test_sites_that_differ_in_their_layer_only_are_one_group() -> None:
    site = {"form": "f", "bytes": 8, "transport": "p2p", "decision": "fused", "reason": "", "detail": "d"}
    site |= {"producer": "other", "consumer": "other", "wire": "exact"}
    other = site | {"bytes": 16}
    groups = render.group_sites(
        [site | {"layer": 0}, other | {"layer": 0}, site | {"layer": 1}, site | {"layer": None}]
    )
    assert [(group["count"], group["layers"], group["bytes"]) for group in groups] == [(3, "0-1", 8), (1, "0", 16)]


@pytest.mark.parametrize(
    ("count", "text"), [(None, "dynamic"), (1023, "1023 B"), (33554432, "32.0 MiB"), (2**31, "2.0 GiB")]
)
def test_sizes_have_a_unit(count: int | None, text: str) -> None:
    assert render.size(count) == text


def test_error_over_budget_or_not_finite_fails() -> None:
    assert OutputErrors(1.1e-3, 1e-3).passed
    assert not OutputErrors(1.2e-3, 1e-3).passed
    assert not OutputErrors(float("inf"), 1e-3).passed
    assert not OutputErrors(float("inf"), float("inf")).passed
    assert OutputErrors(float("inf"), 1e-3).as_dict()["error"] is None


def test_worst_comparison_uses_most_of_its_budget() -> None:
    close = OutputErrors(1e-6, 1e-6)
    assert worst([OutputErrors(1e-3, 2e-3), close]) is close
    broken = OutputErrors(float("inf"), 1.0)
    assert worst([close, broken]) is broken


def test_digest_tells_bits_apart() -> None:
    zero = torch.zeros(3, dtype=torch.bfloat16)
    assert digest([zero]) == digest([zero.clone()])
    assert digest([zero]) != digest([-zero])


@pytest.mark.parametrize("promised", [True, False])
def test_ranks_that_differ_fail_where_equal_bits_are_promised(monkeypatch: pytest.MonkeyPatch, promised: bool) -> None:
    monkeypatch.setattr(worker, "gather", lambda value: [value, value[::-1] if isinstance(value, str) else value])
    exact = [(torch.linspace(0.1, 1, 7, dtype=torch.float64),) * 2]
    rounded = [tuple(output.to(torch.bfloat16) for output in exact[0])]
    spec = RunSpec("m", 2, "cpu", tokens=(7,), dtype="bfloat16")
    found = worker.numerics_report(spec, exact, rounded, rounded, rounded, promised)  # type: ignore[arg-type]
    assert not found["bitwise_equal_across_ranks"] and found["bitwise_equal_promised"] is promised
    assert found["passed"] is not promised
    over = [tuple(2 * output for output in rounded[0])]
    assert not worker.numerics_report(spec, exact, rounded, rounded, over, promised)["passed"]  # type: ignore[arg-type]


def _run_report(passed: bool, identical: bool, fused: int = 1) -> dict[str, Any]:
    one = {"error": 1.0 if not passed else 1e-3, "unfused_error": 1e-3, "budget": 1.1e-3, "passed": passed}
    row = {name: one | {"inductor_error": 1e-3} for name in ("hidden", "residual")}
    row |= {"bitwise_equal_across_ranks": identical}
    return {
        "model": "m",
        "layers": 1,
        "dtype": "bfloat16",
        "world_size": 2,
        "device": "cpu",
        "tokens": [8],
        "versions": {"torch": "2", "transformers": "5"},
        "graphs": 2,
        "from_cache": 0,
        "sites": [],
        "counts": {"all_reduce": 1, "fused": fused, "refused": 0, "gated": 1 - fused},
        "splits": [],
        "numerics": row
        | {
            "bitwise_equal_promised": fused == 1,
            "passed": passed and (identical or not fused),
            "by_tokens": [row | {"tokens": 8}],
        },
        "compile_seconds": {"baseline": 1.0, "tw_compile": 1.1, "passes": 0.01},
        "prefill_seconds": {"baseline": [0.002], "tw_compile": [0.001]},
        "memory": {"peak_bytes": {"baseline": [2 * 2**20], "tw_compile": [3 * 2**20]}, "slot_bytes": 64 * 2**20},
        "trace": {
            "files": ["t.rank0.json", "t.rank1.json"],
            "slowest_rank": 1,
            "hidden_share": 0.75,
            "by_rank": [
                {"communication_us": 10.0, "hidden_us": 1.0, "span_us": 90.0, "share": 0.1},
                {"communication_us": 400.0, "hidden_us": 300.0, "span_us": 2000.0, "share": 0.75},
            ],
        },
    }


@pytest.mark.parametrize(
    ("passed", "identical", "fused", "expected"),
    [
        (True, True, 1, ["PASSED", "ranks identical", "2.00x"]),
        (False, True, 1, ["FAILED", "hidden error over budget", "NO"]),
        (True, False, 1, ["FAILED", "ranks differ", "DIFFER"]),
        (True, False, 0, ["PASSED", "ranks round differently where sums are not fused", "differ"]),
    ],
)
def test_run_ends_with_the_verdict(passed: bool, identical: bool, fused: int, expected: list[str]) -> None:
    console = Console(width=120, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    render.print_run(console, _run_report(passed, identical, fused))
    text = console.export_text()
    assert all(word in text for word in expected)
    assert text.rstrip().splitlines()[-1].startswith(expected[0])


def test_run_tells_memory_and_what_the_slowest_rank_hides() -> None:
    console = Console(width=120, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    report = _run_report(True, True)
    render.print_run(console, report)
    text = console.export_text()
    assert "peak memory at 8 tokens: inductor 2.0 MiB, tw_compile 3.0 MiB" in text and "beside it: 64.0 MiB" in text
    assert "75% of 400 us of communication hidden; rank 1, the slowest, took 2.00 ms; t.rank0.json" in text
    assert "from cache" not in text
    render.print_run(console, report | {"memory": None, "trace": None, "from_cache": 2})
    text = console.export_text()
    assert "peak memory" not in text and "traced" not in text and "from cache: 2 of 2 graphs" in text
