"""What a command can know to be wrong without torch is refused without it, and so before any process starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tw_compile import __version__, model_file
from tw_compile.cli import bench_common, common, run
from tw_compile.cli.app import app
from tw_compile.cli.common import UsageError
from tw_compile.model_file import WHOLE_HEADS, check_model_type, check_shape
from tw_compile.models.config import CONFIG_MAPPING, tensor_parallel_plan

HEADS = "--model tiny-llama: --tp: expected a divisor of 8, its num_attention_heads, got 3"
KEY_HEADS = "--model tiny-llama: --tp: expected a divisor of 4, its num_key_value_heads, got 8"
DEPTH = "--model tiny-llama: --layers: expected at most 4, its num_hidden_layers, got 5"
HUB = "meta-llama/Llama-3.1-8B"
TINY = ["--model", "tiny-llama"]

LAYER = ["bench", "layer", "--device", "cpu"]
NOT_OF_LAYERS = ("inductor+nccl", "fused-int8", "fused-prefetch-64", "fused+split@8", "fused+split@4x", "fused+split@0")
"""Labels that others have: GPUs, options that are not given, or more tokens than the 8 here."""

REFUSED = [
    (["run", "--model", "llama-4-70b"], "expected a preset (gemma-2-9b"),
    (["run", "--model", HUB], f"run 'hf download {HUB} config.json --local-dir Llama-3.1-8B' and give 'Llama-3.1-8B'"),
    (["run", "--tp", "3"], HEADS),
    (["run", "--tp", "8"], KEY_HEADS),
    (["run", "--layers", "5"], DEPTH),
    (["run", "--device", "cpu", "--tp", "64"], "--tp: expected a divisor of 8"),
    (
        ["run", "--device", "cpu", "--transport", "p2p"],
        "--transport: expected auto or gloo with --device cpu, got 'p2p'",
    ),
    (
        ["run", "--transport", "host"],
        "--transport: expected auto or gloo with the CPU, which is taken as there are 0 GPUs",
    ),
    (["run", "--device", "cpu", "--json", "nowhere/report.json"], "--json: expected a file in a folder that exists"),
    (["inspect", *TINY, "--tp", "3"], HEADS),
    (["inspect", *TINY, "--layers", "5"], DEPTH),
    (["plan", *TINY, "--tp", "3"], HEADS),
    (["bench", "passes", *TINY, "--layers", "1", "--tp", "3"], HEADS),
    (["bench", "passes", *TINY, "--layers", "1,5"], DEPTH),
    (["bench", "layer", "--device", "cpu", "--tp", "3"], HEADS),
    (["bench", "model", "--device", "cpu", "--layers", "5"], DEPTH),
    (["bench", "kernel", "--device", "cpu", "--tp", "17"], "--tp: expected at most 16 ranks on a CPU, got 17"),
    (["bench", "kernel", "--wire", "int5"], "--wire: expected different ones of exact, int8, int6, int4, got 'int5'"),
    (["bench", "layer", "--wire", "int5"], "--wire: expected different ones of exact, int8, int6, got 'int5'"),
    *(([*LAYER, "--only", label], f"got {label!r}") for label in ("nonsense", "", *NOT_OF_LAYERS)),
    (
        [*LAYER, "--wire", "int8", "--model", "llama-3.1-8b", "--only", "fused-int6"],
        "fused+split-int8, inductor+gloo, ",
    ),
    ([*LAYER, "--prefetch", "off,64", "--only", "fused-prefetch-32"], "fused-prefetch-64, fused+split-prefetch-64, "),
    ([*LAYER, "--tokens", ""], "--tokens: expected different positive numbers, separated by commas, got ''"),
    ([*LAYER, "--tokens", "8,9", "--batch", "2"], "--tokens: expected multiples of --batch, 2, got 9"),
    ([*LAYER, "--model", ""], "--model : source: expected a preset"),
    ([*LAYER, "--dtype", "float64"], "--dtype: expected one of bfloat16, float16, float32, got 'float64'"),
    ([*LAYER, "--prefetch", "auto"], "--prefetch: expected off and numbers of bytes, all different, got 'auto'"),
    ([*LAYER, "--repeats", "1"], "--repeats: expected 20 to "),
    ([*LAYER, "--csv", "x", "--json", "x"], "--json: expected another file than that of --csv, got 'x'"),
    ([*LAYER, "--csv", "x" * 300], "--csv: expected a file that can be written, got 'xxx"),
    ([*LAYER, "--plot", "x.gif"], "--plot: expected a file that ends in .png or .svg, got 'x.gif'"),
    (["bench", "layer", "--only", "inductor+gloo"], "inductor+symm-two-shot, no-communication, got 'inductor+gloo'"),
    (
        ["bench", "model", "--device", "cpu", "--only", "fused-gemms-apart"],
        "fused, split, fused+split, inductor+gloo, ",
    ),
    (["bench", "gemm-site", "--device", "cpu", "--only", "inductor+async-tp"], "inductor+gloo-scattered, no-"),
    (["bench", "gemm-site", "--device", "cpu", "--model", "gemma-2-9b"], "--model: expected layers with gate_proj, "),
    (["bench", "kernel", "--only", "nonsense"], "nccl+norm, symm-one-shot+norm, "),
    (
        ["bench", "kernel", "--device", "cpu", "--only", "nccl+norm"],
        "--only: expected some of tw-gloo, gloo+norm, got 'n",
    ),
    (
        ["bench", "kernel", "--wire", "int8", "--only", "tw-stream-int6"],
        "--wire: expected exact, as no contender of --only",
    ),
    (["bench", "kernel", "--norm", "layer_norm", "--only", "tw-p2p"], "tw-p2p-layer_norm, "),
    (["bench", "kernel", "--sms", "4000"], "--sms: expected 128 or less, as no contender here can have more, got 4000"),
    (["bench", "kernel", "--sms", "4", "--only", "nccl+norm"], "--sms: expected no value, as no contender here takes"),
    (
        ["bench", "kernel", "--gemm", "64", "--prefetch", "off", "--only", "nccl+norm"],
        "--gemm: expected no value, as no",
    ),
    (["bench", "kernel", "--gated", "--regret", "nowhere/x.csv"], "--regret: expected a file in a folder that exists"),
    (["bench", "kernel", "--table", "nowhere/x.toml"], "--table: expected a file in a folder that exists"),
    (["bench", "beside", "--sms", "33"], "--sms: expected at most 32, the most that a call beside work has, got 33"),
    (
        ["bench", "beside", "--gemm", "8"],
        "--gemm: expected shapes KxN or KxN+N of positive numbers, separated by commas, got '8'",
    ),
    (
        ["bench", "beside", "--transport", "gloo"],
        "--transport: expected different ones of auto, p2p, host with --device",
    ),
    (["bench", "vllm", "--only", "nonsense"], "--only: expected some of off, fuse, "),
    (["bench", "paper", "tokenweave", "--from", "nowhere.csv"], "--from: expected a file that can be read"),
    (["bench", "vllm", *TINY, "--dry-run", "--layers", "5"], DEPTH),
    (["bench", "vllm", *TINY, "--dry-run", "--wire", "int4"], "'int4', which gathers normalised rows in 4 bits"),
    (["tune", "--device", "cpu", "--tp", "2,17"], "--tp: expected at most 16 ranks on a CPU, got 17"),
]

REFUSE = """
import json, sys
from typer.testing import CliRunner
from tw_compile.cli.app import app
refused = []
for args in json.loads(sys.argv[1]):
    result = CliRunner().invoke(app, args)
    refused.append((args, result.exit_code, result.output, [name for name in ("torch", "transformers") if name in sys.modules]))
print(json.dumps(refused))
"""


def test_bad_input_is_refused_without_torch() -> None:
    code = [sys.executable, "-c", REFUSE, json.dumps([args for args, _ in REFUSED])]
    done = subprocess.run(code, check=True, capture_output=True, text=True, timeout=120)
    for (args, exit_code, output, imported), (_, words) in zip(json.loads(done.stdout), REFUSED, strict=True):
        assert (exit_code, imported) == (2, []), (args, output)
        assert output.startswith("error: ") and output.count("\n") == 1 and words in output, (args, output)


def test_a_file_that_can_not_be_written_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    asked: list[Path] = []
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append(path))
    for name in ("there", "new"):
        with pytest.raises(
            UsageError, match=f"--csv: expected a file that can be written, got '.*{name}' \\(Permission"
        ):
            common.writable("--csv", str(tmp_path / name))
    assert asked == [tmp_path / "there", tmp_path]


@pytest.mark.parametrize("command", ["layer", "gemm-site", "model", "kernel --gated", "vllm"])
def test_thresholds_that_the_passes_would_refuse_are_refused_before(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "thresholds.toml"
    file.write_text("x = 1")
    monkeypatch.setenv("TW_COMPILE_THRESHOLDS", str(file))
    monkeypatch.setattr(bench_common, "ranks_here", None)
    result = CliRunner().invoke(app, ["bench", *command.split()])
    assert result.exit_code == 2 and f"{file}: expected the keys schema_version" in result.output, result.output


def test_a_wire_must_fit_the_text_part_of_a_multi_modal_model(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    with pytest.raises(UsageError, match=r"the hidden size of .*, 64, is no multiple of 128, got 'int8'"):
        bench_common.wires("int8", str(tmp_path), "bfloat16")


@pytest.mark.parametrize("model_type", ["lama", "", None, 7])
def test_a_model_type_that_transformers_does_not_know_is_refused(model_type: Any) -> None:
    with pytest.raises(
        ValueError, match=f"model_type: expected a model type that transformers knows, got {model_type!r}"
    ):
        check_model_type({"model_type": model_type})


def test_every_model_type_that_transformers_knows_is_taken() -> None:
    for model_type in CONFIG_MAPPING:
        check_model_type({"model_type": model_type})


def test_a_model_type_is_left_to_a_transformers_whose_files_are_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_file, "find_spec", lambda name: None)
    check_model_type({"model_type": "lama"})


def test_an_unknown_model_type_is_refused_by_a_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "lama"}')
    monkeypatch.setattr(common, "gpus", None)
    result = CliRunner().invoke(app, ["run", "--model", str(tmp_path), "--tp", "2"])
    assert result.exit_code == 2 and "a model type that transformers knows, got 'lama'" in result.output, result.output


def test_a_transport_of_gpus_is_refused_where_the_cpu_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "gpus", lambda: 0)
    with pytest.raises(UsageError, match="auto or gloo with the CPU, which is taken as there are 0 GPUs, got 'p2p'"):
        run.resolve("tiny-llama", None, None, None, None, "p2p", "bfloat16", "default", 60.0)


def test_the_ranks_that_are_taken_by_default_must_fit_the_heads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(common, "gpus", lambda: 8)
    with pytest.raises(UsageError, match="--tp: expected a divisor of 4, its num_key_value_heads, got 8"):
        run.resolve("tiny-llama", None, None, None, None, "auto", "bfloat16", "default", 60.0)
    assert bench_common.ranks_here("bench kernel", 16, "cpu") == 16


@pytest.mark.parametrize("model_type", sorted(WHOLE_HEADS))
def test_families_whose_heads_are_dealt_out_whole_are_those_of_transformers(model_type: str) -> None:
    plan = tensor_parallel_plan(CONFIG_MAPPING[model_type]())
    assert {plan[f"layers.*.self_attn.{name}_proj"] for name in "qkv"} == {"colwise"}


@pytest.mark.parametrize(
    ("values", "refused"),
    [
        ({"model_type": "llama", "num_attention_heads": 9}, True),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "num_key_value_heads": 1}}, True),
        ({"model_type": "olmo2", "num_attention_heads": 9}, False),
        ({"model_type": "llama"}, False),
        ({"model_type": "llama", "num_attention_heads": "many", "text_config": 3}, False),
    ],
)
def test_only_what_the_file_tells_is_judged(values: dict[str, Any], refused: bool) -> None:
    if refused:
        with pytest.raises(ValueError, match="--tp: expected a divisor of"):
            check_shape(values, 2, None)
    else:
        check_shape(values, 2, None)


@pytest.mark.parametrize("launched", [False, True])
def test_a_run_tells_nccl_to_leave_peers_unused_before_it_starts(
    launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []

    def report(*given: Any) -> dict[str, Any]:
        seen.append(os.environ.get("NCCL_P2P_DISABLE"))
        return {"numerics": {"passed": True}}

    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    monkeypatch.setattr("tw_compile.harness.launch.spawn_ranks", report)
    monkeypatch.setattr("tw_compile.runner.ranks.join_ranks", report)
    monkeypatch.setattr("tw_compile.cli.render.print_run", lambda console, report: None)
    monkeypatch.setattr("tw_compile.cli.run.leave", sys.exit)
    if launched:
        for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
    for switch in ("0", "1"):
        monkeypatch.setenv("TW_COMPILE_PEER_ACCESS", switch)
        result = CliRunner().invoke(app, ["run", "--device", "cpu"])
        assert result.exit_code == 0, result.output
    assert seen == ["1", None]


def test_without_the_driver_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", absent)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert common.gpus() == 0
    monkeypatch.setattr("ctypes.CDLL", lambda name: name)
    assert common.gpus() == 3


def test_the_version_is_told_without_torch() -> None:
    code = "import sys; from tw_compile.cli import main; sys.argv = ['tw-compile', '--version']; main()"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == f"tw-compile {__version__}\n"


@pytest.mark.parametrize(
    "command", [["run"], ["tune"], ["doctor"], ["bench", "kernel"], ["bench", "layer"]], ids=" ".join
)
def test_help_fills_the_terminal_and_not_the_lines_of_the_source(command: list[str]) -> None:
    text = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).output
    paragraphs = text.split("Usage:")[1].split("╭")[0].split("\n" + " " * 80 + "\n")
    for paragraph in paragraphs:
        *full, _ = [line.strip() for line in paragraph.strip().splitlines()] or [""]
        assert all(len(line) > 60 for line in full), paragraph


def test_help_is_grouped_and_completion_is_offered() -> None:
    text = CliRunner().invoke(app, ["--help"]).output
    assert all(word in text for word in ("See what would be done", "Run and check", "Measure", "--install-completion"))


@pytest.mark.parametrize(
    ("device", "tokens", "trace", "compiles", "steps"),
    [("cpu", (64, 63, 1), None, 4, 11), ("cuda", (64, 1), None, 4, 15), ("cuda", (64,), "t.json", 2, 12)],
)
def test_a_run_knows_how_many_steps_it_has(
    device: str, tokens: tuple[int, ...], trace: str | None, compiles: int, steps: int
) -> None:
    spec = run.RunSpec("tiny-llama", 2, device, tokens, "bfloat16", trace=trace)
    assert (spec.compiles, spec.steps) == (compiles, steps)
