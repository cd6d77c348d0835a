"""A plan with multicast stands beside what was published of such a node, and is marked as a prediction."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from tw_compile.benchmark.papers.published import read_published
from tw_compile.cli.app import app
from tw_compile.cli.plan_published import gains_of_calls, gains_of_model

TOKENS = ("--tokens", "1024:65536")


def plan(*args: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["plan", "--device-profile", "H100", *args, "--json", "-"])
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def test_eight_gpus_with_multicast_gain_by_fusing_and_by_splitting_about_what_was_published() -> None:
    report = plan("--kernel", "multimem", "--tp", "8", *TOKENS)
    assert report["published"]["source"] == "arXiv 2505.11329"
    gains = report["published"]["gains"]
    assert [row["tokens"] for row in gains] == [2**power for power in range(10, 17)]
    for row, layer in zip(gains, report["plans"], strict=True):
        times = layer["predicted"]
        assert row["fused"] == pytest.approx(times["unfused_us"] / times["fused_us"])
        assert row["split"] == pytest.approx(times["unfused_us"] / times["split_us"])
        assert 1.0 < row["fused"] < row["split"]
        # GEMMs that are faster than its own leave a larger share to communication, so the prediction is above.
        assert row["published_split"] * 0.97 < row["split"] < row["published_split"] * 1.15
        assert 0.97 < row["no_communication"] / row["published_no_communication"] < 1.15
    assert gains[2]["published_split"] == pytest.approx(179.5 / 142.2)
    assert gains[0]["published_call_fused"] == pytest.approx(104.7 / 75.4)
    assert gains[-1]["published_call_fused"] is None  # its figure ends at 32768


def test_text_says_that_it_is_a_prediction() -> None:
    args = ["plan", "--device-profile", "H100", "--kernel", "multimem", "--tp", "8", "--tokens", "4096"]
    shown = " ".join(CliRunner().invoke(app, args).output.split())
    assert (
        "predicted from times of kernels that were published (arXiv 2505.11329), never measured on such a node" in shown
    )
    assert "1.26x" in shown and "its model, split" in shown


def test_without_multicast_nothing_is_beside() -> None:
    assert plan("--tp", "8", "--tokens", "1024")["published"] is None
    assert plan("--tp", "2", "--tokens", "1024", "--transport", "nccl")["published"] is None


def test_what_was_not_published_is_left_out() -> None:
    paper = read_published("tokenweave")
    assert gains_of_model(paper, "llama-3.1-8b", 8) == {"split": {}, "no_communication": {}}
    assert gains_of_model(paper, "llama-3.3-70b", 4) == {
        "split": dict(zip([2.0**n for n in range(10, 17)], (1.13, 1.10, 1.13, 1.15, 1.14, 1.13, 1.11), strict=True)),
        "no_communication": {},
    }
    assert gains_of_model(paper, "mixtral-8x22b", 8)["split"][1024] == 0.62
    assert gains_of_calls(paper)[64] == pytest.approx(24.9 / 17.1)
    (row,) = plan("--kernel", "multimem", "--tp", "4", "--tokens", "1024")["published"]["gains"]
    assert row["published_call_fused"] is None and row["published_split"] == 1.13
