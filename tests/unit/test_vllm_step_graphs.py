"""Which graph of a long step is kept: ways are timed in turns, and one long trial decides nothing."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from tw_compile.hosts.vllm import step_graphs
from tw_compile.hosts.vllm.step_graphs import Limits, StepGraph, StepGraphs, StepTimes

LIMITS = Limits(requests=4, length=4096)
UNCAPTURED_MS = 20.0


class Timer:
    """Times steps as the slowest rank does. ``late``: which trials of a way take 9 ms more."""

    def __init__(self, graphs: StepGraphs, late: dict[str, set[int]]) -> None:
        self.graphs, self.late = graphs, late
        self.trials: list[str] = []

    def __call__(self, tokens: int) -> float:
        graph: Any = self.graphs.graphs.get(tokens)
        if graph is None:
            return UNCAPTURED_MS
        way, ms = graph.arguments
        self.trials.append(way)
        return float(ms) + 9.0 * (self.trials.count(way) in self.late.get(way, set()))


@pytest.mark.parametrize(
    ("late", "said"),
    [
        ({}, "1000 to 1024 tokens split, 12.5 ms and not 20.0"),
        ({"split": {1}, "whole": {2}}, "1000 to 1024 tokens split, 12.5 ms and not 20.0"),
        ({"split": {2, 3}}, "1000 to 1024 tokens split, 12.5 ms and not 20.0"),
        ({"split": {1, 2, 3}}, "1000 to 1024 tokens whole, 12.8 ms and not 20.0"),
        ({"split": {1, 2, 3}, "whole": {1, 2, 3}}, "nothing gained by 1024 tokens, 21.5 and 20.0 ms"),
    ],
)
def test_the_shortest_of_three_trials_in_turns_decides(
    late: dict[str, set[int]], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {"split": 12.5, "whole": 12.8}
    now: list[str] = []

    def inside(way: str) -> Any:
        now.append(way)
        return nullcontext()

    graphs = StepGraphs(1000, 1024, (), lambda tokens: [(way, inside(way)) for way in made])

    def capture(graphs: StepGraphs, limits: Limits, run: Any, size: int, slowest: Any) -> None:
        way = now.pop(0)
        graphs.graphs[size] = StepGraph(size, (way, made[way]), (), [])

    monkeypatch.setattr(step_graphs, "_capture_step", capture)
    timer = Timer(graphs, late)
    times = StepTimes(timer, lambda tokens: 0.0, lambda value: value)
    assert step_graphs._capture(graphs, [1024], LIMITS, lambda tokens: None, times) == [said]
    assert timer.trials == ["split", "whole"] * step_graphs.TRIALS
    kept: Any = graphs.graphs.get(1024)
    assert (kept is None) if said.startswith("nothing") else (kept.arguments[0] in said and kept.least == 1000)
