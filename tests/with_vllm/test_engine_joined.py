"""Gate and up of vLLM's merged matrix, with its SiLU, in the graphs of vLLM's own compiler: joined where that is faster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx as fx
from fake_vllm import MAX_TOKENS, engine_config, llama, middle_pieces
from one_rank import one_rank  # noqa: F401

from tw_compile import collect_reports
from tw_compile.autotune.turns import Gemms
from tw_compile.passes import join
from tw_compile.testing.graphs import find_ops

pytestmark = pytest.mark.usefixtures("groups", "one_rank")


def test_gate_and_up_are_joined_in_the_pieces_of_an_engine(
    folder: Path, cold: None, graphs: list[fx.Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Gemms, tuple[int, ...]]] = []

    def measured(gemms: Gemms, rows: Sequence[int], device: torch.device) -> tuple[int, ...]:
        asked.append((gemms, tuple(rows)))
        return (16,)

    monkeypatch.setattr(join, "measured_turns", measured)
    monkeypatch.setenv("TW_COMPILE", "1")
    monkeypatch.setenv("TW_COMPILE_STRICT", "1")
    with collect_reports() as reports, llama(engine_config(folder)) as model:
        outputs: list[Any] = [model(tokens) for tokens in (MAX_TOKENS, 7)]
    assert all(one.isfinite().all() for one in outputs)
    counts = [each.counts.get("gated", 0) for report in reports for each in report.passes if each.name == "join_gemms"]
    assert sum(counts) == middle_pieces() + 1
    assert sum(len(find_ops(graph, "gated_mm_by_rows")) for graph in graphs) == middle_pieces() + 1
    assert all(gemms.gated and gemms.halves for gemms, _ in asked)
    assert {rows[-1] for _, rows in asked} == {MAX_TOKENS}
