"""What a wire was measured to cost a checkpoint: the file, and what ``wire`` = ``auto`` makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_wire_cost import tiny, words_tokenizer
from typer.testing import CliRunner

from tw_compile import Config, agree
from tw_compile.cli.app import app
from tw_compile.current import current_gate
from tw_compile.gating.facts import Node
from tw_compile.gating.gate import Gate
from tw_compile.gating.table import Source, Table, WireEntry
from tw_compile.gating.wire_accuracy import (
    AccuracyCost,
    CheckpointAccuracy,
    accuracy_text,
    load_accuracy,
    read_accuracy,
)
from tw_compile.own_gate import own_gate
from tw_compile.passes.fusion.wire import Threshold, message_refusal
from tw_compile.passes.reasons import WireRefusal, WireRefused
from tw_compile.runner import accuracy as simulation
from tw_compile.runner.accuracy import Cost, digest_of_weights

assert tiny  # a fixture
MEBI = 2**20
COST = AccuracyCost("int8", 2, "all", 0.0055, 0.0021, 3066, "prose.txt", "2026-11-24")
KEPT = CheckpointAccuracy("llama", "3f" * 32, (COST, replace(COST, world_size=4, sites="mlp", added_nats=-0.001)))
SOURCE = Source("h200", "measured", ("2x H200", "torch 2.11", "2026-11-24", "tw-compile tune --wire int8"))


def test_a_file_is_read_as_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / KEPT.file_name
    file.write_text(accuracy_text(KEPT))
    assert load_accuracy(str(file)) == KEPT and file.name == "wire-accuracy-3f3f3f3f3f3f.toml"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[: len(text) // 2].rpartition("\n")[0] + "\nadded", "expected TOML"),
        (lambda text: text[: text.index("[[costs]]")], "expected the keys schema_version, checkpoint, digest, costs"),
        (lambda text: text[: text.rindex("standard_error")], "costs[1]: expected the keys wire,"),
        (lambda text: text.replace("schema_version = 1", "schema_version = 2"), "schema_version: expected 1, got 2"),
        (lambda text: text.replace("schema_version = 1\n", ""), "schema_version: expected 1, got None"),
        (lambda text: text.replace('"int8"', '"int5"'), "costs[0].wire: expected one of int8, int6, int4, got 'int5'"),
        (lambda text: text.replace("world_size = 2", "world_size = 1"), "costs[0].world_size: expected a number of at"),
        (lambda text: text.replace("0.0055", "nan"), "costs[0].added_nats: expected a finite number, got nan"),
        (lambda text: text.replace("0.0055", '"little"'), "costs[0].added_nats: expected a finite number"),
        (lambda text: text.replace("tokens = 3066", "words = 3066"), "costs[0]: expected the keys"),
        (lambda text: text + text[text.index("[[costs]]") :], "costs: expected one for a wire"),
        (lambda text: text.replace('"llama"', '""'), "checkpoint: expected text, got ''"),
    ],
)
def test_a_file_that_is_wrong_is_refused_in_one_line(change: Callable[[str], str], words: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(change(accuracy_text(KEPT)))
    with pytest.raises(ValueError) as error:
        own_gate(Config(wire="auto", wire_accuracy=str(file)), Node((9, 0), False))
    assert words in str(error.value) and "\n" not in str(error.value)
    result = CliRunner().invoke(app, ["explain", "--tp", "2", "--wire", "auto", "--wire-accuracy", str(file)])
    assert result.exit_code == 2 and words in result.output and result.output.count("\n") == 1
    with pytest.raises(ValueError, match="wire_accuracy: expected a file that can be read"):
        load_accuracy(str(tmp_path / "none.toml"))


def test_the_option_is_a_file() -> None:
    with pytest.raises(TypeError, match=r"tw_compile\.wire_accuracy: expected a file, got 3"):
        Config(wire_accuracy=3)  # type: ignore[arg-type]


def answer(accuracy: CheckpointAccuracy | None, world_size: int = 2, **options: Any) -> WireRefused | Threshold:
    """Of 8 MiB over NVLink, where a table says that int8 is faster from 4 MiB on."""
    shipped = own_gate(Config(), Node((9, 0), False))
    table = Table("mine.toml", "sm90", (), (WireEntry("int8", "any", "p2p", 4 * MEBI, SOURCE),))
    gate = Gate(shipped.node, shipped.settings, (table, *shipped.tables), accuracy)
    config = Config(**{"wire": "auto", "wire_accuracy": "kept.toml", **options})
    return message_refusal(config, gate, world_size, "p2p", 4096, torch.bfloat16, (1024, 1024))


def test_auto_takes_a_wire_where_it_is_faster_and_does_not_cost_the_checkpoint_too_much() -> None:
    taken = answer(KEPT)
    assert isinstance(taken, Threshold) and taken.nbytes == 4 * MEBI
    assert isinstance(answer(KEPT, wire_sites="attention"), Threshold)  # all sums cost no less
    assert isinstance(answer(KEPT, 4, wire_sites="mlp"), Threshold)


@pytest.mark.parametrize(
    ("accuracy", "world_size", "options", "reason", "words"),
    [
        (None, 2, {"wire_accuracy": None}, WireRefusal.ACCURACY_NOT_MEASURED, "no file of tw_compile.wire_accuracy"),
        (KEPT, 8, {}, WireRefusal.ACCURACY_NOT_MEASURED, "nothing in kept.toml says what int8 costs"),
        (KEPT, 4, {}, WireRefusal.ACCURACY_NOT_MEASURED, "with 4 ranks"),  # sums of the MLP alone were measured
        (
            replace(KEPT, costs=(replace(COST, added_nats=0.0101),)),
            2,
            {},
            WireRefusal.ACCURACY_BEYOND_BUDGET,
            "int8, 2 ranks: +0.0101",
        ),
    ],
)
def test_auto_is_exact_where_that_was_not_measured_or_is_too_much(
    accuracy: CheckpointAccuracy | None, world_size: int, options: dict[str, Any], reason: WireRefusal, words: str
) -> None:
    refused = answer(accuracy, world_size, **options)
    assert isinstance(refused, WireRefused) and refused.reason == reason and words in refused.detail


def test_who_names_a_wire_is_asked_for_no_accuracy() -> None:
    assert isinstance(answer(None, wire="int8", wire_accuracy=None), Threshold)


def test_ranks_agree_on_the_accuracy_as_part_of_the_gate(tmp_path: Path) -> None:
    file = tmp_path / "kept.toml"
    digests = set()
    for kept in (KEPT, KEPT.with_costs([replace(COST, added_nats=0.1)])):
        file.write_text(accuracy_text(kept))
        digests.add(own_gate(Config(wire_accuracy=str(file)), Node((9, 0), False)).digest())
    assert len(digests) == 2


def test_explain_says_what_auto_does(tmp_path: Path) -> None:
    file, table = tmp_path / "kept.toml", tmp_path / "thresholds.toml"
    file.write_text(accuracy_text(KEPT))
    table.write_text(
        'schema_version = 1\ndevice_class = "sm90"\n[sources.mine]\nkind = "default"\nwhy = "to try it"\n'
        '[[wires]]\nwire = "int8"\nworld_size = 2\ntransport = "p2p"\nfrom_bytes = 4194304\nsource = "mine"\n'
    )
    args = ["explain", "--tp", "2", "--tokens", "512", "--wire", "auto", "--thresholds", str(table)]
    told = tmp_path / "told.json"
    for more, expected in (([], ("exact", "accuracy_not_measured")), (["--wire-accuracy", str(file)], ("int8", ""))):
        result = CliRunner().invoke(app, [*args, *more, "--json", str(told)])
        assert result.exit_code == 0, result.output
        wire = json.loads(told.read_text())["messages"][0]["wire"]
        assert (wire["wire"], wire["reason"]) == expected


class TestTune:
    """``tw-compile tune --wire --checkpoint``, with a random model and planted costs."""

    @pytest.fixture
    def args(self, tiny: Any, tmp_path: Path) -> list[str]:
        model, text = tmp_path / "model", tmp_path / "text.txt"
        tiny.save_pretrained(model)
        words_tokenizer().save_pretrained(model)
        text.write_text("the cat sat on a mat " * 8)
        return ["tune", "--checkpoint", str(model), "--text", str(text), "--out", str(tmp_path / "kept")]

    def run(self, *args: str) -> Any:
        return CliRunner().invoke(app, args)

    def test_costs_are_kept_by_the_weights(
        self, args: list[str], tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[tuple[int, str, str]] = []

        def cost(model: Any, pieces: Any, ranks: int, wire: str, sites: str, **named: Any) -> Cost:
            asked.append((ranks, wire, sites))
            return Cost(ranks, 7, 3.0, 3.02 if wire == "int6" else 3.001, 0.001)

        monkeypatch.setattr(simulation, "cost_of_wire", cost)
        told = tmp_path / "told.json"
        done = self.run(*args, "--wire", "int8", "--json", str(told))
        assert done.exit_code == 0 and asked == [(2, "int8", "all"), (4, "int8", "all")], done.output
        (file,) = (tmp_path / "kept").iterdir()
        report = json.loads(told.read_text())
        assert report["file"] == str(file) and report["digest"] == digest_of_weights(tiny)
        again = self.run(*args, "--wire", "int6", "--tp", "2", "--wire-sites", "mlp")
        assert again.exit_code == 1 and "+0.0200 +- 0.0010" in again.output and "BEYOND 0.01" in again.output
        kept = load_accuracy(str(file))
        assert [one.key for one in kept.costs] == [("int8", 2, "all"), ("int8", 4, "all"), ("int6", 2, "mlp")]
        assert kept.cost("int8", 2, "attention") == kept.costs[0] and kept.costs[0].added_nats == pytest.approx(0.001)

    def test_the_simulation_is_that_of_run(self, args: list[str], tmp_path: Path) -> None:
        done = self.run(*args, "--wire", "int8", "--tp", "2")
        assert done.exit_code in (0, 1) and "int8, 2 ranks: " in done.output, done.output
        (file,) = (tmp_path / "kept").iterdir()
        told = tmp_path / "told.json"
        self.run("run", "--wire", "int8", "--tp", "2", *args[1:5], "--json", str(told))
        assert load_accuracy(str(file)).costs[0].added_nats == json.loads(told.read_text())["costs"][0]["added_nats"]

    def test_a_dry_run_does_nothing(self, args: list[str], tmp_path: Path) -> None:
        done = self.run(*args, "--wire", "int8,int6", "--dry-run")
        assert done.exit_code == 0 and "simulate 2, 4 ranks with int8, int6" in done.output
        assert not (tmp_path / "kept").exists()

    def test_a_kept_file_that_is_wrong_is_refused_and_stays(
        self, args: list[str], tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(simulation, "cost_of_wire", lambda *given, **named: Cost(2, 7, 3.0, 3.0, 0.001))
        file = tmp_path / "kept" / replace(KEPT, digest=digest_of_weights(tiny)).file_name
        file.parent.mkdir()
        file.write_text("schema_version = 2\n")
        done = self.run(*args, "--wire", "int8")
        assert done.exit_code == 2 and "--out: expected a file that can be read" in done.output
        assert "schema_version: expected 1, got 2" in done.output and file.read_text() == "schema_version = 2\n"

    @pytest.mark.parametrize(
        ("more", "words"),
        [
            ([], "--checkpoint: expected --wire with it"),
            (["--wire", "exact"], "--wire: expected different ones of int8, int6, got 'exact'"),
            (["--wire", "int4"], "'int4', which gathers normalised rows in 4 bits"),
            (["--wire", "int8", "--quick"], "--quick: expected none with --wire"),
            (["--wire", "int8", "--transport", "nccl"], "--transport: expected none with --wire, got 'nccl'"),
            (["--wire", "int8", "--text-tokens", "0"], "--text-tokens: expected"),
            (["--wire", "int8", "--wire-sites", "some"], "--wire-sites: expected one of all, attention, mlp"),
            (["--wire", "int8", "--tp", "1"], "--tp: expected"),
        ],
    )
    def test_bad_input_is_refused(self, args: list[str], more: list[str], words: str) -> None:
        done = self.run(*args, *more)
        assert done.exit_code == 2 and words in done.output and done.output.count("\n") == 1, done.output


def test_text_and_checkpoint_go_together() -> None:
    for option in ("--text", "--checkpoint"):
        done = CliRunner().invoke(app, ["tune", "--wire", "int8", option, "x"])
        assert done.exit_code == 2 and "--text: expected it and --checkpoint together" in done.output
    assert read_accuracy(accuracy_text(KEPT), "x") == KEPT


def test_ranks_without_gpus_agree_on_what_a_wire_costs(tmp_path: Path) -> None:
    file, decided = tmp_path / "costs.toml", []
    config = Config(wire="auto", wire_min_bytes=0, wire_accuracy=str(file))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for nats in (0.005, 0.5):  # the file of one host, and of another one
            cost = AccuracyCost("int8", 2, "all", nats, 0.001, 100, "prose.txt", "2026-11-24")
            file.write_text(accuracy_text(CheckpointAccuracy("llama", "3f5a", (cost,))))
            agree.forget()  # another rank
            gate = current_gate(config)
            decided.append(message_refusal(config, gate, 2, "gloo", 4096, torch.bfloat16, (1024, 1024)))
    finally:
        dist.destroy_process_group()
    assert type(decided[0]) is type(decided[1])
