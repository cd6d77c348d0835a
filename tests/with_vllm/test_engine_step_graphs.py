"""Steps of a Llama of vLLM's that were captured: other requests and fewer tokens than those of the captured step.

Long steps run by groups of layers, and short ones by vLLM's pieces.

There is no GPU. In place of a CUDA graph, the captured function runs again and writes its results where those of the first run
are. So it reads what a graph would read, and nothing else that differs between steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import paged
import pytest
import torch
from fake_vllm import LAYERS, MAX_TOKENS, engine_config, llama
from one_rank import one_rank  # noqa: F401

from tw_compile.hosts.vllm import step_graphs, ways
from tw_compile.hosts.vllm.plan import Engine
from tw_compile.hosts.vllm.step_graphs import Limits, StepGraphs

pytestmark = pytest.mark.usefixtures("groups", "one_rank", "cold", "wide_residuals", "kernels_on_cpu")

SIZE = 80
STEPS = (
    [
        paged.Request(7, 1),
        paged.Request(30, 1),
        paged.Request(3, 58),
        paged.Request(0, 20),
    ],  # as long as the captured one
    [paged.Request(0, 80)],
    [paged.Request(5, 14), paged.Request(9, 40)],
    [paged.Request(2, 3), paged.Request(0, 26)],  # half 2 has one request alone
    [paged.Request(11, 10), paged.Request(0, 2), paged.Request(1, 1)],  # half 2 has nothing
)
LIMITS = Limits(requests=6, length=MAX_TOKENS)
SPLITTING = replace(LIMITS, splits=True)
SMALLER = 48


class Again:
    """In place of a CUDA graph."""

    def __init__(self, run: Callable[[], tuple[torch.Tensor, ...]]) -> None:
        self._run, self.results, self.replays = run, run(), 0

    def replay(self) -> None:
        self.replays += 1
        for own, now in zip(self.results, self._run(), strict=True):
            own.copy_(now)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Again]:
    graphs: list[Again] = []

    def captured(run: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[Again, tuple[torch.Tensor, ...]]:
        graphs.append(Again(run))
        return graphs[-1], graphs[-1].results

    monkeypatch.setattr(step_graphs, "captured", captured)
    monkeypatch.setattr(step_graphs, "of_models", [])
    monkeypatch.setattr("tw_compile.hosts.vllm.steps.of_models", step_graphs.of_models)
    return graphs


@pytest.fixture
def kernels_on_cpu(groups: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    from tw_compile.hosts.vllm import attention

    monkeypatch.setattr(FlashAttentionImpl, "forward", paged.forward)
    monkeypatch.setattr(FlashAttentionImpl, "do_kv_cache_update", paged.update)
    monkeypatch.setattr("tw_compile.hosts.vllm.plan.MOST_SHORT_TOKENS", 23)
    with torch.library._scoped_library("tw_compile", "FRAGMENT") as library:
        library.impl("vllm_attention_half", attention.attend_half, "CPU")
        yield


class Model:
    """An engine's model with caches for the steps of this module, in which each request has blocks of its own."""

    def __init__(self, config: Any, run: Any) -> None:
        self.layers = config.compilation_config.static_forward_context
        self._run = run
        self.reset()

    def reset(self) -> None:
        blocks = LIMITS.requests * MAX_TOKENS // paged.BLOCK
        for number, layer in enumerate(self.layers.values()):
            layer.impl.vllm_flash_attn_version = 3
            shape = (blocks, 2, paged.BLOCK, layer.num_kv_heads, layer.head_size)
            cache = torch.randn(shape, generator=torch.Generator().manual_seed(number)).bfloat16()
            layer.kv_cache = cache if layer.kv_cache.shape != shape else layer.kv_cache.copy_(cache)

    def step(self, requests: list[paged.Request], **changes: Any) -> torch.Tensor:
        metadata = replace(paged.metadata_of(requests), **{"use_cascade": False} | changes)
        slots = dict.fromkeys(self.layers, metadata.slot_mapping)

        def context(model: Any) -> dict[str, Any]:
            return {"attn_metadata": dict.fromkeys(self.layers, metadata), "slot_mapping": slots}

        first = requests[0].context + len(requests)  # other tokens, at other positions, than in other steps
        return self._run(metadata.num_actual_tokens, context, first).clone()  # type: ignore[no-any-return]

    def caches(self) -> list[torch.Tensor]:
        return [layer.kv_cache.clone() for layer in self.layers.values()]


def engine(folder: Path, **options: Any) -> Any:
    compilation = {"pass_config": {"fuse_allreduce_rms": False}}
    given = {"tw_compile": {"strict": True, "vllm_layer_groups": LAYERS, "split": "16", **options}}
    return engine_config(folder, compilation=compilation, additional_config=given)


@pytest.fixture(params=["long", "short"])
def results(
    request: pytest.FixtureRequest, folder: Path, made: list[Again], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Model, StepGraphs, list[torch.Tensor], list[Any]]]:
    """A model that has captured a step of ``SIZE`` tokens, and what ``STEPS`` gave before, with the caches after each."""
    long_from, options, limits = 24, {}, LIMITS
    if request.param != "long":
        long_from, options, limits = 97, {"vllm_layer_groups": 0} if request.param == "all short" else {}, SPLITTING
        monkeypatch.setattr("tw_compile.hosts.vllm.plan.MOST_SHORT_TOKENS", long_from - 1)
        monkeypatch.setattr("tw_compile.hosts.vllm.plan.FEWEST_GRAPH_TOKENS", 24)
        monkeypatch.setattr(Engine, "graphs_obstacle", lambda self: None)
    config = engine(folder, **options)
    with llama(config) as run:
        run(MAX_TOKENS)
        model = Model(config, run)
        outputs, caches = zip(*((model.step(requests), model.caches()) for requests in STEPS), strict=True)
        *long, graphs = step_graphs.of_models
        most = {"long": MAX_TOKENS, "short": long_from - 1, "all short": MAX_TOKENS}[request.param]
        assert (graphs.low, graphs.high) == (24, most) and len(graphs.rows) == 2
        assert graphs.short is (request.param != "long")
        assert [(one.low, one.high) for one in long] == ([(97, MAX_TOKENS)] if request.param == "short" else [])
        model.reset()
        model.step(STEPS[0])
        for step in range(2):  # it gets memory, then it is captured
            graphs.limits = limits if not step else None
            torch.testing.assert_close(model.step([paged.Request(0, SIZE)]), outputs[1], rtol=0, atol=0)
        assert graphs.prepared is None
        assert not made[0].replays
        graphs.graphs[SIZE].least = 0
        model.reset()
        yield model, graphs, list(outputs), list(caches)


def test_padded_steps_of_other_requests_have_the_same_bits(results: Any, made: list[Again]) -> None:
    model, graphs, outputs, caches = results
    for number, requests in enumerate(STEPS):
        torch.testing.assert_close(model.step(requests), outputs[number], rtol=0, atol=0)
        for one, other in zip(model.caches(), caches[number], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert made[0].replays == sum(sum(one.query for one in requests) >= graphs.low for requests in STEPS) == 4
    memory = graphs.graphs[SIZE].arguments
    assert all(len(memory[number]) == SIZE for number, _ in graphs.rows)


def test_graphs_of_two_sizes_run_in_turn_with_one_block_table(results: Any, made: list[Again]) -> None:
    model, graphs, outputs, caches = results
    for step in range(2):
        graphs.limits = LIMITS if not step else None
        graphs.graphs.pop(SMALLER, None)
        model.step([paged.Request(SIZE - SMALLER, SMALLER)])  # as many blocks as the other graph has
    graphs.graphs[SMALLER].least = 0
    model.reset()
    for number, requests in enumerate(STEPS):
        torch.testing.assert_close(model.step(requests), outputs[number], rtol=0, atol=0)
        for one, other in zip(model.caches(), caches[number], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert all(one.replays for one in made)
    tables = [one.metadata.block_table for size in (SMALLER, SIZE) for one in graphs.graphs[size]._attention]
    assert len({table.data_ptr() for table in tables}) == 1 and len(tables) == 2


@pytest.mark.parametrize(
    ("requests", "changes"),
    [
        ([paged.Request(0, 10)] * 7, {}),  # more requests than a step can have
        ([paged.Request(0, 81)], {}),
        ([paged.Request(0, 60)], {"causal": False}),
        ([paged.Request(0, 60)], {"use_cascade": True}),
        ([paged.Request(0, 60)], {"block_table": torch.zeros(1, 99, dtype=torch.int32)}),
    ],
    ids=["requests", "tokens", "causal", "cascade", "blocks"],
)
def test_other_steps_are_not_run_by_the_graph(
    results: Any, made: list[Again], requests: list[paged.Request], changes: dict[str, Any]
) -> None:
    model, graphs, _, _ = results
    if "causal" in changes and not graphs.short:
        with pytest.raises(RuntimeError, match="causal"):  # nor by halves
            model.step(requests, **changes)
    else:
        assert not model.step(requests, **changes).isnan().any()
    assert not made[0].replays


@pytest.mark.parametrize("results", ["all short"], indirect=True)
def test_steps_without_groups_of_layers_are_short_ones(results: Any, made: list[Again]) -> None:
    test_padded_steps_of_other_requests_have_the_same_bits(results, made)


def test_what_is_not_known_is_not_captured(folder: Path, made: list[Again], monkeypatch: pytest.MonkeyPatch) -> None:
    config = engine(folder)
    with llama(config) as run:
        expected = Model(config, run).step(STEPS[1])
        (graphs,) = step_graphs.of_models

        def step_with(limits: Limits | None, version: int = 3) -> None:
            """A step, which gets memory for a graph if there are limits."""
            model, graphs.limits, graphs.obstacle = Model(config, run), limits, ""
            for layer in model.layers.values():
                layer.impl.vllm_flash_attn_version = version
            torch.testing.assert_close(model.step(STEPS[1]), expected, rtol=0, atol=0)
            graphs.limits = None

        step_with(LIMITS, version=2)
        assert graphs.prepared is None and "not FlashAttention 3's" in graphs.obstacle
        with monkeypatch.context() as patch:
            patch.setattr(step_graphs, "_memory", mock.Mock(side_effect=torch.OutOfMemoryError("no room")))
            step_with(LIMITS)
        assert graphs.prepared is None and graphs.obstacle == "OutOfMemoryError: no room"
        step_with(LIMITS)
        assert graphs.prepared is not None and not graphs.obstacle
        monkeypatch.setattr(step_graphs, "captured", mock.Mock(side_effect=torch.OutOfMemoryError("no room")))
        step_with(None)
        assert graphs.prepared is None and not graphs.graphs and graphs.obstacle == "OutOfMemoryError: no room"
    assert not made


def worker_of(config: Any, tokens: list[int]) -> Any:
    """A worker whose runner notes its steps."""

    def dummy_run(count: int, *, skip_attn: bool = False, skip_eplb: bool = False) -> None:
        tokens.append(count)

    class Worker:
        vllm_config = config
        model_runner = SimpleNamespace(_dummy_run=dummy_run)

        def compile_or_warm_up_model(self) -> str:
            return "warm"

    return Worker()


CAPTURING = {"compilation": {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [8]}}


@pytest.mark.parametrize(
    ("options", "arguments", "said"),
    [
        (
            {},
            CAPTURING,
            "long steps as CUDA graphs: 64 tokens can't be captured, vLLM runs such a step without the model's function",
        ),
        ({}, CAPTURING | {"enable_lora": True}, "no steps as CUDA graphs: a step's adapters decide"),
        ({}, {}, "no steps as CUDA graphs: vLLM captures none"),
        ({"vllm_step_graphs": "off"}, CAPTURING, None),
    ],
    ids=["by default", "adapters", "no graphs at all", "off"],
)
def test_the_warm_up_captures_by_default(
    options: dict[str, str],
    arguments: dict[str, Any],
    said: str | None,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    tokens: list[int] = []
    graphs = StepGraphs(24, MAX_TOKENS, (), obstacle="of an earlier warm-up")
    monkeypatch.setattr(step_graphs, "of_models", [graphs])
    monkeypatch.setattr(ways, "of_models", step_graphs.of_models)
    monkeypatch.setattr(ways, "tried_ranges", [])
    monkeypatch.setattr(step_graphs.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(step_graphs.agree, "gather", lambda own, group: [own, own])
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    wrapper: Any = object.__new__(WorkerWrapperBase)
    wrapper.worker = worker_of(engine_config(folder, additional_config={"tw_compile": options}, **arguments), tokens)
    with caplog.at_level(logging.INFO, logger="vllm.tw_compile"):
        assert wrapper.compile_or_warm_up_model() == "warm"
    assert (said is None and "CUDA graphs" not in caplog.text) or str(said) in caplog.text
    assert sorted(set(tokens)) == ([24, 64] if said is not None and "can't" in said else [])
    assert graphs.limits is None and not graphs.graphs


def test_short_steps_are_timed_as_they_are_served(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sizes are those that vLLM captures, and beyond them any. Long steps run without vLLM's graphs."""
    captured: list[tuple[list[int], bool, float]] = []

    def capture(graphs: StepGraphs, sizes: list[int], limits: Limits, run: Any, times: Any) -> list[str]:
        captured.append((sizes, limits.splits, times.uncaptured(50)))
        return []

    def run(tokens: int) -> None: ...

    def served(tokens: int) -> None: ...

    kinds = [StepGraphs(129, 600, ()), StepGraphs(33, 128, (), short=True), StepGraphs(33, 60, (), short=True)]
    monkeypatch.setattr(step_graphs, "of_models", kinds)
    monkeypatch.setattr(step_graphs, "_capture", capture)
    monkeypatch.setattr(step_graphs.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(step_graphs.agree, "gather", lambda own, group: [own, [own[0] + 1.0]])
    compilation = {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [8, 64, 80]}
    worker = worker_of(engine_config(folder, compilation=compilation), [])
    step_graphs.capture_steps(worker, run, served, lambda way, _: 3.0 if way is served else 1.0, lambda way, _: 2.0)
    assert captured == [
        ([192, 256, 384, 512, 600], False, 3.5),  # 1.25 times the host's time, and 1 ms more on another rank
        ([64, 96, 128], True, 4.5),  # 1.75 times
    ]


@pytest.mark.parametrize("mega", ["0", "1"])
def test_a_warm_start_has_short_steps(
    folder: Path, made: list[Again], monkeypatch: pytest.MonkeyPatch, mega: str
) -> None:
    monkeypatch.setenv("VLLM_USE_MEGA_AOT_ARTIFACT", mega)
    monkeypatch.setattr(Engine, "graphs_obstacle", lambda self: None)
    results = []
    for _ in range(2):
        step_graphs.of_models.clear()
        with llama(engine(folder, vllm_layer_groups=0)) as run:
            results.append(run(MAX_TOKENS).clone())
        assert [(one.low, one.high, one.short) for one in step_graphs.of_models] == [(33, MAX_TOKENS, True)]
    assert torch.equal(*results)


def test_steps_of_unknown_layers_are_short_ones(
    folder: Path, made: list[Again], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tw_compile.hosts.vllm.groups.cut", lambda graph, layers: None)
    monkeypatch.setattr("tw_compile.hosts.vllm.plan.FEWEST_GRAPH_TOKENS", 8)
    monkeypatch.setattr(Engine, "graphs_obstacle", lambda self: None)
    with llama(engine(folder)) as run:
        run(MAX_TOKENS)
    assert [(one.low, one.high, one.short) for one in step_graphs.of_models] == [(8, MAX_TOKENS, True)]


def test_what_speaks_against_graphs_is_said_by_one_rank(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group = SimpleNamespace(rank_in_group=1)
    monkeypatch.setattr("vllm.distributed.parallel_state.get_tp_group", lambda: group)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="vllm.tw_compile"):
        ways._capture_steps(None, None)
        assert not caplog.messages
        group.rank_in_group = 0
        ways._capture_steps(None, None)
    assert set(caplog.messages) == {"tw_compile: no steps as CUDA graphs: the pass does not know its engine"}
