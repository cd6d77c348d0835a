"""``tw-compile bench vllm`` for checkpoints with quantised weights: what its reference is, and where there is none."""

from __future__ import annotations

import dataclasses
import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tw_compile.benchmark.vllm.run import write_model
from tw_compile.benchmark.vllm.spec import VllmSpec, engines, is_float8, job
from tw_compile.cli.app import app

SPEC = VllmSpec("tiny-llama", 2, "bfloat16", (128,), (1,), kinds=("decode",))
BY_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def of_compressed(**weights: Any) -> dict[str, Any]:
    usual = {"num_bits": 8, "type": "float", "strategy": "channel"}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": usual | weights}}}


def quantised(folder: Path, quantisation: Any, model: str = "tiny-llama") -> str:
    """The file of a preset's configuration with this ``quantization_config``."""
    values = json.loads(resources.files("tw_compile.configs.models").joinpath(f"{model}.json").read_text())
    file = folder / "quantised.json"
    file.write_text(json.dumps(values | {"quantization_config": quantisation}))
    return str(file)


@pytest.mark.parametrize("name", ["token", "block"])
def test_the_examples_are_float8_checkpoints_of_the_presets_shape(name: str, tmp_path: Path) -> None:
    file = Path(__file__).parents[2] / "examples" / "models" / f"llama-3.1-8b-fp8-{name}.json"
    preset = json.loads(resources.files("tw_compile.configs.models").joinpath("llama-3.1-8b.json").read_text())
    values = json.loads(file.read_text())
    assert is_float8(values.pop("quantization_config")) and values == preset
    spec = dataclasses.replace(SPEC, model=str(file), layers=1)
    assert write_model(spec, tmp_path).quantization_config["quant_method"] in ("fp8", "compressed-tensors")


@pytest.mark.parametrize("quantisation", [BY_BLOCKS, of_compressed(), of_compressed(strategy="block")])
def test_of_a_float8_checkpoint_only_the_reference_is_not_quantised(tmp_path: Path, quantisation: Any) -> None:
    spec = dataclasses.replace(SPEC, model=quantised(tmp_path, quantisation), engine={"hf_overrides": {"x": 1}})
    config = write_model(spec, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"] == quantisation
    for engine in engines(spec, str(tmp_path)):
        dropped = {"quantization_config": None} if engine.variant.kind == "reference" else {}
        assert engine.arguments["hf_overrides"] == {"x": 1} | dropped
        assert job(engine, spec, config)["dtype"] == "float8_e4m3fn"
    shown = invoked("--model", spec.model, "--chunks", "256", "--only", "off,reference").stdout
    without, reference = (line for line in shown.splitlines() if line.startswith(("off: ", "reference: ")))
    assert "quantization_config" not in without and "hf_overrides={'quantization_config': None}" in reference


@pytest.mark.parametrize(
    ("model", "quantisation", "named"),
    [
        ("qwen3-30b-a3b", BY_BLOCKS, "'fp8' with experts"),
        ("qwen3-30b-a3b", of_compressed(), "'compressed-tensors' with experts"),
        ("tiny-llama", BY_BLOCKS | {"scale_fmt": "ue8m0"}, "'fp8'"),
        ("tiny-llama", of_compressed(type="int"), "'compressed-tensors'"),
        ("tiny-llama", of_compressed(strategy="group"), "'compressed-tensors'"),
        ("tiny-llama", {"quant_method": "awq", "bits": 4}, "'awq'"),
    ],
)
def test_a_reference_that_would_have_other_weights_is_refused_before_a_start(
    tmp_path: Path, model: str, quantisation: Any, named: str
) -> None:
    arguments = ("--model", quantised(tmp_path, quantisation, model), "--chunks", "256")
    result = invoked(*arguments)
    assert result.exit_code == 2 and result.stderr.startswith("error: --only: expected variants without reference")
    assert f"got quant_method {named} and the reference" in result.stderr and result.stderr.count("\n") == 1
    assert invoked(*arguments, "--only", "off,fuse").exit_code == 0
    spec = dataclasses.replace(SPEC, model=arguments[1], only=("off", "fuse"))
    rounded = job(engines(spec, "")[0], spec, write_model(spec, tmp_path))["dtype"]
    assert rounded == "bfloat16", "there is no reference, so nobody else must have the same weights"


def invoked(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "vllm", *arguments, "--dry-run"])
