"""Which long steps are kept as CUDA graphs: those that gain, on the slowest rank, as long as all have room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from tw_compile.hosts.vllm import step_graphs
from tw_compile.hosts.vllm.step_graphs import Limits, StepGraph, StepGraphs, StepTimes, least_tokens, sizes_of

LIMITS = Limits(8, 4096)


@pytest.mark.parametrize(
    ("before", "size", "replayed", "expected"),
    [
        ((512, 20.0), (768, 20.0), 7.0, 513),  # the host needs the same time for all
        ((512, 20.0), (768, 30.0), 24.0, 621),  # 24.24 at 513 + 255 x 0.424
        ((512, 20.0), (768, 24.0), 24.0, 769),  # as fast is no gain
        ((512, 20.0), (768, 24.2), 24.0, 769),  # less than a hundredth
        ((512, 30.0), (768, 20.0), 24.0, 513),
    ],
)
def test_steps_gain_from_where_they_take_longer_uncaptured(
    before: tuple[int, float], size: tuple[int, float], replayed: float, expected: int
) -> None:
    assert least_tokens(before, size, replayed) == expected


class Engine:
    """Steps take a hundredth of a millisecond for each token; uncaptured a little more, and 20 at least.

    There is no room for steps of ``full`` tokens and more. ``launch_ms`` is what the host needs to launch one.
    """

    launch_ms = 0.0

    def __init__(self, full: int = 10**6, obstacle_here: bool = True) -> None:
        self.graphs = StepGraphs(513, 4096, ())
        self.full, self.obstacle_here = full, obstacle_here
        self.steps: list[tuple[int, str]] = []

    def run(self, tokens: int) -> None:
        graphs = self.graphs
        if graphs.limits is not None:
            assert graphs.limits == LIMITS and graphs.prepared is None
            self.steps.append((tokens, "prepared"))
            graphs.prepared = StepGraph(tokens, (), (), [])
            if tokens >= self.full and self.obstacle_here:
                graphs.prepared, graphs.obstacle = None, "OutOfMemoryError: no room"
        elif graphs.prepared is not None:
            self.steps.append((tokens, "captured"))
            graphs.graphs[tokens], graphs.prepared = graphs.prepared, None
        else:
            self.steps.append((tokens, ""))

    def timed(self, tokens: int) -> float:
        by_graph = any(graph.least <= tokens <= size for size, graph in self.graphs.graphs.items())
        return tokens / 100 if by_graph else max(tokens / 100 * 1.002, 20.0)

    def slowest(self, value: float) -> float:
        """Another rank has no room either."""
        return max(value, float(bool(self.steps) and self.steps[-1][0] >= self.full))

    def capture(self) -> list[str]:
        return self.captured_by(self.run, StepTimes(self.timed, lambda tokens: self.launch_ms, self.slowest))

    def captured_by(self, run: Callable[[int], None], times: StepTimes) -> list[str]:
        return step_graphs._capture(self.graphs, sizes_of(self.graphs.low, self.graphs.high), LIMITS, run, times)


def test_all_sizes_are_tried_and_those_kept_that_gain() -> None:
    engine = Engine()
    said = engine.capture()
    assert {size: graph.least for size, graph in engine.graphs.graphs.items()} == {768: 513, 1024: 769, 1536: 1025}
    assert said[0] == "513 to 768 tokens, 7.7 ms and not 20.0"
    assert said[3:] == [
        "nothing gained by 2048 tokens, 20.5 and 20.5 ms",
        "nothing gained by 3072 tokens, 30.7 and 30.8 ms",
        "nothing gained by 4096 tokens, 41.0 and 41.0 ms",
    ]
    sizes = [tokens for tokens, capturing in engine.steps if capturing == "captured"]
    assert sizes == [768, 1024, 1536, 2048, 3072, 4096]
    assert engine.graphs.limits is None


def test_a_host_that_serves_may_be_slower_than_the_gpu() -> None:
    """It needs 25 ms for a step then, so steps of 2048 tokens gain, too. Those of 3072 take the GPU longer."""
    engine = Engine()
    engine.launch_ms = 20.0
    said = engine.capture()
    assert said[3:5] == [
        "1537 to 2048 tokens, 20.5 ms and not 25.0",
        "nothing gained by 3072 tokens, 30.7 and 30.8 ms",
    ]


def test_one_long_trial_of_an_uncaptured_step_makes_no_graph() -> None:
    engine, trials = Engine(), dict[int, int]()

    def timed(tokens: int) -> float:
        trials[tokens] = trials.get(tokens, 0) + 1
        return engine.timed(tokens) + 100.0 * (trials[tokens] == 1 and tokens == 4096)

    said = engine.captured_by(engine.run, StepTimes(timed, lambda tokens: 0.0, lambda value: value))
    assert said[-1] == "nothing gained by 4096 tokens, 41.0 and 41.0 ms"
    assert trials[4096] == 2 * step_graphs.TRIALS


@pytest.mark.parametrize(("here", "why"), [(True, "OutOfMemoryError: no room"), (False, "by another rank")])
def test_a_step_that_one_rank_cannot_capture_is_left_by_all(here: bool, why: str) -> None:
    engine = Engine(full=1024, obstacle_here=here)
    assert engine.capture()[-1] == f"1024 tokens can't be captured, {why}"
    assert list(engine.graphs.graphs) == [768]


def test_a_rank_without_room_for_the_second_way_keeps_no_graph_of_the_first() -> None:
    """The other ranks have one of the second way then, and its calls are others."""
    engine, ways = Engine(), 0

    def run(tokens: int) -> None:
        nonlocal ways
        ways += engine.graphs.limits is not None
        Engine.run(engine, tokens)
        if ways == 2 and engine.graphs.limits is not None:
            engine.graphs.prepared, engine.graphs.obstacle = None, "OutOfMemoryError: no room"

    engine.graphs.ways = lambda tokens: [("split", nullcontext()), ("whole", nullcontext())]
    said = engine.captured_by(run, StepTimes(engine.timed, lambda tokens: 0.0, lambda value: value))
    assert said == ["768 tokens can't be captured, OutOfMemoryError: no room"]
    assert not engine.graphs.graphs and engine.graphs.limits is None


def test_an_error_ends_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()

    def broken(tokens: int) -> None:
        raise RuntimeError("a rank died")

    monkeypatch.setattr(engine, "run", broken)
    with pytest.raises(RuntimeError, match="a rank died"):
        engine.capture()
    assert engine.graphs.limits is None and not engine.graphs.graphs


@pytest.mark.parametrize(
    ("low", "high", "sizes"),
    [
        (513, 4096, [768, 1024, 1536, 2048, 3072, 4096]),
        (1000, 2303, [1024, 1536, 2048, 2303]),
        (513, 16384, [768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384]),
        (513, 700, [700]),
        (33, 512, [64, 96, 128, 192, 256, 384, 512]),
        (33, 100, [64, 96, 100]),
    ],
)
def test_a_step_is_padded_by_a_third_at_most(low: int, high: int, sizes: list[int]) -> None:
    assert step_graphs.sizes_of(low, high) == sizes


def test_only_sizes_are_tried_to_which_vllm_pads() -> None:
    """A step of 97 to 256 tokens reaches the model's function with 256 tokens, those of more as they are."""
    captured = [1, 2, 4, 8, 16, 96, 256]
    assert step_graphs.sizes_of(33, 512, captured) == [96, 256, 384, 512]
    assert step_graphs.sizes_of(33, 256, captured) == [96, 256]
    assert step_graphs.sizes_of(33, 90, captured) == []
    assert step_graphs.sizes_of(33, 128, range(1, 129)) == [64, 96, 128]


def test_the_faster_of_two_ways_is_kept() -> None:
    """Split steps gain from 1000 tokens on."""
    engine, way = Engine(), [""]
    captured: dict[int, list[str]] = {}

    @contextmanager
    def inside(name: str) -> Iterator[None]:
        way[0] = name
        yield
        way[0] = ""

    def timed(tokens: int) -> float:
        graph = next((graph for size, graph in engine.graphs.graphs.items() if graph.least <= tokens <= size), None)
        if graph is None:
            return max(tokens / 50, 40.0)
        return tokens / 100 * (1000 / tokens if graph.first_results == ("split",) else 1.0)

    def run(tokens: int) -> None:
        prepared = engine.graphs.prepared
        Engine.run(engine, tokens)
        if prepared is not None:
            captured.setdefault(tokens, []).append(way[0])
            engine.graphs.graphs[tokens].first_results = (way[0],)

    engine.graphs.ways = lambda tokens: [(name, inside(name)) for name in ("split", "whole")]
    said = engine.captured_by(run, StepTimes(timed, lambda tokens: 0.0, lambda value: value))
    kept = {size: graph.first_results[0] for size, graph in engine.graphs.graphs.items()}
    assert kept == {768: "whole", 1024: "split", 1536: "split", 2048: "split", 3072: "split", 4096: "split"}
    assert list(captured.values()) == [["split", "whole"]] * 6 and way == [""]
    assert said[:2] == [
        "513 to 768 tokens whole, 7.7 ms and not 40.0",
        "769 to 1024 tokens split, 10.0 ms and not 40.0",
    ]


def test_a_model_of_short_steps_has_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    engine.graphs.high = 700
    engine.capture()
    assert list(engine.graphs.graphs) == [700]


@pytest.mark.parametrize(
    ("asked", "requests", "tokens", "part_mib", "splits"),
    [
        (32, 256, 512, 4, 32),
        (32, 256, 512, 8, 16),  # 128 MiB for all parts
        (8, 256, 512, 8, 8),
        (32, 256, 2048, 256, 1),
        (32, 1024, 512, 4, 1),  # FlashAttention would split all requests alike
        (0, 256, 512, 4, 32),
        (0, 256, 1024, 4, 1),  # vLLM splits none there
    ],
)
def test_short_steps_split_keys_as_far_as_there_is_memory(
    asked: int, requests: int, tokens: int, part_mib: int, splits: int
) -> None:
    metadata = SimpleNamespace(max_num_splits=asked)
    assert step_graphs.most_splits(metadata, requests, tokens, part_mib * 2**20) == splits


def test_a_graph_reads_positions_that_lie_in_memory_as_the_steps_do() -> None:
    """The strides of positions [3, tokens] are arguments of the compiled code, and the graph passes those of its capture."""
    positions = torch.arange(303).view(3, 101)[:, :64]
    graph = StepGraph(64, (64, positions, torch.ones(64, 2)), ((1, 1), (2, 0)), [])
    own = graph.arguments[1]
    assert own.stride() == positions.stride() == (101, 1) and torch.equal(own, positions)
    assert own.data_ptr() != positions.data_ptr()
    graph.fill((40, positions[:, :40] + 7, torch.zeros(40, 2)), 40, SimpleNamespace(attn_metadata={}))
    assert torch.equal(own[:, :40], positions[:, :40] + 7) and torch.equal(own[:, 40:], positions[:, 40:])


def test_an_error_of_any_kind_leaves_no_step_prepared() -> None:
    """Else the next step that vLLM serves would be captured."""
    engine = Engine()

    def broken(tokens: int) -> None:
        engine.run(tokens)
        if engine.graphs.prepared is not None:
            raise AssertionError("in the first run")

    with pytest.raises(AssertionError, match="in the first run"):
        engine.captured_by(broken, StepTimes(engine.timed, lambda tokens: 0.0, lambda value: value))
    assert engine.graphs.prepared is None and engine.graphs.limits is None
