"""``tw-compile explain --model``: what it says of splits is what the pass would choose."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from tw_compile import Config
from tw_compile.cli import explain
from tw_compile.cli.app import app
from tw_compile.models.config import load_config
from tw_compile.models.decoder import build_decoder
from tw_compile.passes.split.analysis.choose import NotSplit, SplitChoice, choose_split
from tw_compile.planning import load_profile
from tw_compile.testing import fake_cuda, fake_process_group, rewrite

MODEL = "llama-3.3-70b"
ARGS = ["explain", "--tp", "4", "--model", MODEL]


def invoke(*args: str) -> Result:
    return CliRunner().invoke(app, list(args))


def explained(*args: str) -> list[dict[str, Any]]:
    result = invoke(*args, "--json", "-")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["messages"]


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention kernel that torch takes without a GPU, as the graphs of these tests have it."""
    of_model = explain.layer_of_model

    def layer_with_flash(model: str, tp: int) -> Any:
        layer, layers = of_model(model, tp)
        return replace(layer, attention=replace(layer.attention, kernel="flash")), layers

    monkeypatch.setattr(explain, "layer_of_model", layer_with_flash)


def chosen(tokens: int, named: str = "auto", model: str = MODEL) -> SplitChoice | NotSplit:
    """What the pass decides about one layer, as the fusion pass leaves it; ``auto`` is a process on an H200."""
    profile = load_profile("H200" if named == "auto" else named)
    with fake_process_group(4), fake_cuda():
        decoder = build_decoder(load_config(model), device="cuda", dtype=torch.bfloat16, num_layers=1)
        ids = torch.zeros(1, tokens, dtype=torch.long, device="cuda")
        graph = rewrite(decoder, (ids,), world_size=4, config=Config()).after.graph
        return choose_split(graph, Config(split="auto", device_profile=named), profile)


@pytest.mark.full
@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize("named", ["auto", "H100"])
@pytest.mark.parametrize(("tokens", "splits"), [(4096, True), (64, False)])
def test_what_explain_says_is_what_the_pass_chooses(tokens: int, splits: bool, named: str) -> None:
    choice = chosen(tokens, named)
    (message,) = explained(*ARGS, "--tokens", str(tokens), "--device-profile", named)
    split = message["split"]
    assert isinstance(choice, SplitChoice) is splits is bool(split["sizes"])
    assert choice.plan is not None
    if isinstance(choice, SplitChoice):
        assert split["sizes"] == list(choice.plan.sizes) and split["sizes"][0] == choice.first
        assert (split["mode"], split["gain"]) == (choice.plan.mode, choice.plan.gain)
    else:
        assert (split["mode"], split["reason"], split["detail"]) == ("off", choice.reason, choice.detail)
    assert split["plan"]["predicted"]["fused_us"] == choice.plan.predicted.fused_us


def test_a_layer_that_the_pass_cannot_plan_is_refused_for_the_same_reason() -> None:
    choice = chosen(4096, model="olmo-2-7b")
    assert isinstance(choice, NotSplit)
    (message,) = explained("explain", "--tp", "4", "--model", "olmo-2-7b", "--tokens", "4096")
    assert (message["split"]["mode"], message["split"]["reason"]) == ("off", choice.reason)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--device", "sm103"], "no_device_profile"),
        (["--dtype", "float32"], "layer_not_recognised"),
        (["--device", "sm90", "--multicast", "--tp", "8", "--backend", "multimem"], "layer_not_recognised"),
    ],
    ids=" ".join,
)
def test_why_nothing_is_planned_has_the_name_that_the_pass_gives_it(more: list[str], reason: str) -> None:
    (message,) = explained("explain", "--model", "llama-3.1-8b", "--tokens", "8192", *more)
    assert (message["split"]["mode"], message["split"]["reason"]) == ("off", reason)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--model", "gemma-2-9b"], "sliding windows come as masks"),
        (["--model", MODEL, "--host", "vllm-0.24"], "graphs of vllm-0.24 are for ranges of token counts"),
    ],
    ids=" ".join,
)
def test_what_only_the_graph_tells_is_said_to_be_unknown(more: list[str], words: str) -> None:
    (message,) = explained("explain", "--tp", "4", "--tokens", "8192", *more)
    assert message["split"]["mode"] == "unknown" and words in message["split"]["detail"]
    assert words in " ".join(invoke("explain", "--tp", "4", "--tokens", "8192", *more).output.split())


def test_the_lines_say_sizes_and_gain_or_the_reason() -> None:
    output = invoke(*ARGS, "--tokens", "64,4096").output
    _, small, large, *_ = output.splitlines()
    first, second = (message["split"] for message in explained(*ARGS, "--tokens", "64,4096"))
    assert small.split()[0] == "64" and small.rstrip().endswith("no, not_faster")
    assert f"not split, not_faster: {first['detail']}" in " ".join(output.split())
    sizes = " + ".join(map(str, second["sizes"]))
    assert large.split()[0] == "4096" and large.rstrip().endswith(f"{sizes}, {second['gain']:.2f}x")


def test_without_a_model_nothing_is_said_about_splits_but_where_to_ask() -> None:
    args = ["explain", "--device", "sm90", "--multicast", "--tokens", "20001", "--host", "vllm-0.24"]
    (message,) = explained(*args)
    assert message["split"] is None
    head, line, *rest = invoke(*args).output.splitlines()
    assert "split" not in head + line
    assert "--model NAME, or with tw-compile plan" in " ".join(" ".join(rest).split())


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--tp", "2"], "FlashInfer's fusion is off (vLLM has it on up to 64 MiB), measured_faster: "),
        (["--tp", "2", "--multicast"], "FlashInfer's fusion is off (vLLM has it on up to 64 MiB), measured_faster: "),
        (["--tp", "2", "--device", "sm100"], "FlashInfer's fusion is on up to 64 MiB (as in vLLM), not_measured: "),
        (["--tp", "4"], "FlashInfer's fusion is on up to 32 KiB (vLLM has it on up to 2 MiB), measured_faster: "),
    ],
)
def test_of_vllm_it_says_what_flashinfer_is_left(more: list[str], words: str) -> None:
    args = ["explain", "--tokens", "1", "--host", "vllm-0.24", *more]
    assert words in " ".join(invoke(*args).output.split())
    assert "FlashInfer's fusion" not in " ".join(invoke("explain", "--tokens", "1", *more).output.split())


@pytest.mark.parametrize(
    ("more", "named", "came"),
    [
        (["--hidden", "4096"], "--hidden", "4096"),
        (["--device-profile", "A100"], "--device-profile", "A100"),
        (["--model", "no-such-model"], "--model", "no-such-model"),
        (["--tp", "3"], "--tp", "3"),
    ],
    ids=" ".join,
)
def test_bad_input_is_one_line(more: list[str], named: str, came: str) -> None:
    result = invoke(*ARGS, *more)
    (line,) = result.output.splitlines()
    assert result.exit_code == 2 and line.startswith("error: ") and named in line and came in line


def test_the_model_says_how_large_its_messages_are() -> None:
    (message,) = explained("explain", "--tp", "4", "--model", "llama-3.1-8b", "--tokens", "16")
    assert message["bytes"] == 16 * 4096 * 2
