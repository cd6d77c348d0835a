"""Which layers are traced in place of all, and that what is said of the whole model is what tracing all of them gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tw_compile.cli import render
from tw_compile.cli.app import app
from tw_compile.models.alike import Alike, alike_layers, choose
from tw_compile.models.config import config_from_dict, keep_layers, load_config

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 128,
}
GEMMA = SMALL | {"model_type": "gemma2", "num_hidden_layers": 8, "head_dim": 16, "sliding_window": 8}
LLAMA = SMALL | {"model_type": "llama", "num_hidden_layers": 6}


@pytest.mark.parametrize(
    ("kinds", "layers", "stand_for"),
    [
        ("A", (0,), ((0,),)),
        ("AA", (0, 1), ((0,), (1,))),
        ("AAAAAA", (0, 1, 5), ((0,), (1, 2, 3, 4), (5,))),
        ("ABABAB", (0, 1, 2, 5), ((0,), (1, 3), (2, 4), (5,))),
        ("ABABABA", (0, 1, 2, 5, 6), ((0,), (1, 3), (2, 4), (5,), (6,))),
        ("BAAAAAA", (0, 1, 2, 6), ((0,), (1,), (2, 3, 4, 5), (6,))),
        ("ABCDEF", (0, 1, 2, 3, 4, 5), ((0,), (1,), (2,), (3,), (4,), (5,))),
    ],
)
def test_every_kind_is_there_between_its_neighbours(
    kinds: str, layers: tuple[int, ...], stand_for: tuple[tuple[int, ...], ...]
) -> None:
    assert choose(kinds) == Alike(layers, stand_for)
    contexts = {kinds[max(index - 1, 0) : index + 2] for index in range(len(kinds))}
    kept = "".join(kinds[index] for index in layers)
    assert {kept[max(index - 1, 0) : index + 2] for index in range(len(kept))} == contexts


@pytest.mark.parametrize(
    ("model", "layers"),
    [
        ("llama-3.3-70b", (0, 1, 79)),
        ("gemma-2-9b", (0, 1, 2, 41)),
        ("gpt-oss-20b", (0, 1, 2, 23)),
        ("qwen3-30b-a3b", (0, 1, 47)),
    ],
)
def test_layers_of_presets(model: str, layers: tuple[int, ...]) -> None:
    config = load_config(model)
    found = alike_layers(config)
    assert found.layers == layers
    assert sorted(index for group in found.stand_for for index in group) == list(range(config.num_hidden_layers))


def test_layers_of_experts_among_dense_ones_are_another_kind() -> None:
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
    config = config_from_dict(LLAMA | moe | {"model_type": "qwen3_moe", "mlp_only_layers": [0]})
    # Of the layers 0, 1, 2, 5 alone the first would be dense, too, so these may stand for all.
    assert alike_layers(config).layers == (0, 1, 2, 5)
    config = config_from_dict(LLAMA | moe | {"model_type": "qwen3_moe", "mlp_only_layers": [5]})
    assert alike_layers(config).layers == (0, 1, 2, 3, 4, 5), "of fewer layers none would be the sixth"


def test_lists_of_layers_are_cut_alike() -> None:
    config = config_from_dict(GEMMA)
    assert keep_layers(config, (0, 1, 2, 7)).layer_types == [config.layer_types[index] for index in (0, 1, 2, 7)]
    assert len(config.layer_types) == config.num_hidden_layers == 8


@pytest.mark.full
@pytest.mark.parametrize(("values", "traced"), [(LLAMA, [0, 1, 5]), (GEMMA, [0, 1, 2, 7])], ids=["llama", "gemma2"])
def test_what_is_said_of_the_model_is_what_all_layers_give(
    tmp_path: Path, values: dict[str, Any], traced: list[int]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    args = ["inspect", "--model", str(tmp_path), "--tp", "2", "--tokens", "16", "--json"]
    reports, outputs = [], []
    for more in ([], ["--all-layers"]):
        result = CliRunner().invoke(app, [*args, str(tmp_path / "report.json"), *more])
        assert result.exit_code == 0, result.output
        outputs.append(result.output)
        reports.append(json.loads((tmp_path / "report.json").read_text()))
    few, full = reports
    assert (few["layers_traced"], full["layers_traced"]) == (traced, None)
    assert few["counts"] == full["counts"] and few["counts"]["all_reduce"] > 2 * len(traced)
    assert few["layers"] == full["layers"] == values["num_hidden_layers"]
    assert render.group_sites(few["sites"]) == render.group_sites(full["sites"])
    assert (
        f", of {few['layers']} layers; each other layer is like one of these" in outputs[0]
        and "traced:" not in outputs[1]
    )
