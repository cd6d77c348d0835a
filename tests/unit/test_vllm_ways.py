"""Which way steps of a range run that was compiled split and whole: what is timed, and what follows from the times."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tw_compile.hosts.vllm import ways
from tw_compile.hosts.vllm.step_graphs import StepGraph, StepGraphs
from tw_compile.hosts.vllm.ways import Times, Tried, split_from


@pytest.mark.parametrize(
    ("whole", "split", "expected"),
    [
        ((10.0, 20.0, 30.0), (7.0, 14.0, 21.0), 1000),
        ((10.0, 20.0, 30.0), (12.0, 20.0, 30.0), 3001),  # as fast is no gain
        ((10.0, 20.0, 30.0), (12.0, 18.0, 25.0), 1714),
        ((10.0, 20.0, 30.0), (12.0, 19.0, 25.0), 1833),
        ((10.0, 20.0, 30.0), (7.0, 21.0, 29.0), 2500),  # the gain at 1000 tokens is not one of all longer steps
        ((10.0, 20.0, 30.0), (12.0, 22.0, 31.0), 3001),
        ((12.2, 16.5, 24.7), (21.0, 21.6, 23.1), 3001),  # four H100, where serving made the last 5% slower
        ((12.2, 16.5, 30.0), (21.0, 21.6, 27.0), 2764),
    ],
)
def test_steps_are_split_from_where_all_longer_ones_gain(
    whole: tuple[float, ...], split: tuple[float, ...], expected: int
) -> None:
    tried = Tried(1000, 3000)
    assert tried.sizes() == [1000, 2000, 3000]
    assert split_from(tried, Times(whole, split, launch_ms=split[0])) == expected


def test_a_range_of_two_sizes_is_timed_at_both() -> None:
    assert Tried(7, 8).sizes() == [7, 8]
    assert split_from(Tried(7, 8), Times((1.0, 3.0), (2.0, 0.5), 0.4)) == 8


@pytest.mark.parametrize("range_", [(4097, 8192), (6145, 8192)])
def test_a_gain_that_the_host_does_not_limit_counts_from_the_first_step_on(range_: tuple[int, int]) -> None:
    tried = Tried(*range_)
    whole = [tokens * 0.01 for tokens in tried.sizes()]
    split = [0.92 * ms for ms in whole]
    assert split_from(tried, Times(whole, split, launch_ms=20.0)) == tried.low
    assert split_from(tried, Times(whole, split, launch_ms=whole[-1])) == tried.high + 1


class Worker:
    """The host launches a step and goes on, and the device runs it. Both have a clock of their own. ``log`` has the steps."""

    def __init__(self, tried: Tried, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tried, self.now, self.done, self.launch_s = tried, 0.0, 0.0, 0.016
        self.log: list[tuple[int, bool]] = []
        self.model_runner = SimpleNamespace(_dummy_run=self._dummy_run)
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=2048))
        monkeypatch.setattr(ways.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(ways, "_synchronise", self._synchronise)

    def _synchronise(self) -> None:
        self.now = max(self.now, self.done)

    def _dummy_run(
        self,
        tokens: int,
        cudagraph_runtime_mode: Any = None,
        force_attention: bool = False,
        skip_eplb: bool = False,
        profile_seq_lens: int | None = None,
    ) -> None:
        assert (cudagraph_runtime_mode, force_attention, skip_eplb) == ("none", True, True)
        assert profile_seq_lens == min(tokens, 2048), "pages behind a block table's row would be read"
        split = tokens >= self.tried.split_from
        self.log.append((tokens, split))
        begun = max(self.now, self.done)
        self.now += self.launch_s if split else 0.0
        self.done = max(begun + tokens * (8e-6 if split else 1e-5), self.now)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Tried:
    """The only range of a model of two ranks. Of these the other one takes 1 ms more for a split step."""
    found = Tried(1000, 3000)
    monkeypatch.setattr(ways, "tried_ranges", [found])
    config, state = ModuleType("vllm.config"), ModuleType("vllm.distributed.parallel_state")
    config.CUDAGraphMode = SimpleNamespace(NONE="none")  # type: ignore[attr-defined]
    group = SimpleNamespace(cpu_group="cpu", world_size=2, rank_in_group=0)
    state.get_tp_group = lambda: group  # type: ignore[attr-defined]
    for name, module in (("vllm.config", config), ("vllm.distributed.parallel_state", state)):
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(ways.dist, "get_world_size", lambda: 2)

    def gather(own: list[float], group: Any) -> list[list[float]]:
        assert group == "cpu"
        return [own, [*own[: len(found.sizes())], *(ms + 1.0 for ms in own[len(found.sizes()) :])]]

    monkeypatch.setattr(ways.agree, "gather", gather)
    return found


def test_the_slowest_ranks_times_decide(
    tried: Tried, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(tried, monkeypatch)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="vllm.tw_compile"):
        ways.choose_ways(worker)
    timed = [(tokens, split) for split in (False, True) for tokens in tried.sizes() for _ in range(4)]
    assert worker.log == [*timed * ways.TRIALS, *[(1000, True)] * ways.RUNS]
    # Whole 10, 20, 30 ms; split 17, 17, 25 on the other rank, whose host may need 21.25 ms.
    assert tried.split_from == 2200
    (said,) = caplog.messages
    assert said.startswith(
        "tw_compile: launched by the host, steps of 1000 to 3000 tokens are split from 2200 tokens on: split and whole "
    )
    assert "17.0 and 20.0 ms for 2000" in said and "the host launches a split one in 17.0 ms" in said


def test_others_that_use_the_gpu_for_a_while_do_not_change_the_choice(
    tried: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first trial the device takes 50 ms more for each split step."""
    worker = Worker(tried, monkeypatch)

    def disturbed(tokens: int, *args: Any, **options: Any) -> None:
        worker._dummy_run(tokens, *args, **options)
        worker.done += 0.05 * (len(worker.log) <= 24 and tokens >= tried.split_from)

    def dummy_run(
        tokens: int, cudagraph_runtime_mode: Any, force_attention: bool, skip_eplb: bool, profile_seq_lens: int
    ) -> None:
        disturbed(tokens, cudagraph_runtime_mode, force_attention, skip_eplb, profile_seq_lens)

    worker.model_runner = SimpleNamespace(_dummy_run=dummy_run)
    ways.choose_ways(worker)
    assert tried.split_from == 2200


def test_the_time_of_a_gpu_is_not_taken_for_the_hosts(tried: Tried, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shortest step takes the GPU 10 ms whole, and 9 split on the other rank. Nobody waits for a host that needs 2."""
    worker = Worker(tried, monkeypatch)
    worker.launch_s = 0.001
    ways.choose_ways(worker)
    assert tried.split_from == 1000


def test_the_second_runner_has_other_options(tried: Tried, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, options = Worker(tried, monkeypatch), []

    def second(tokens: int, *args: Any, skip_attn: bool = False, skip_eplb: bool = False, **named: Any) -> None:
        options.append((args, skip_attn, skip_eplb, named))
        worker._dummy_run(tokens, "none", True, True, min(tokens, 2048))

    worker.model_runner = SimpleNamespace(_dummy_run=second)
    ways.choose_ways(worker)
    assert tried.split_from == 2200
    assert options == [((), False, True, {})] * (24 * ways.TRIALS + ways.RUNS)


def test_a_runner_without_the_options_leaves_steps_whole_with_one_line(
    tried: Tried, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=2048))
    worker = SimpleNamespace(model_runner=SimpleNamespace(_dummy_run=lambda tokens: None), vllm_config=config)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    ways.choose_ways(worker)
    assert tried.split_from == 3001
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert (
        "steps stay whole that were not timed: TypeError: _dummy_run of SimpleNamespace: expected options"
        in caplog.text
    )
    monkeypatch.setenv("TW_COMPILE_STRICT", "1")
    with pytest.raises(TypeError, match="_dummy_run"):
        ways.choose_ways(worker)


def test_measuring_again_drops_what_was_captured(tried: Tried, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, graphs = Worker(tried, monkeypatch), StepGraphs(1000, 3000, ())
    graphs.graphs[3000] = StepGraph(3000, (), (), [])
    monkeypatch.setattr(ways, "of_models", [graphs])
    monkeypatch.setattr(ways, "_pass_that_asks_for_graphs", lambda worker: None)
    tried.split_from = 1
    ways.measure(worker)
    assert not graphs.graphs and tried.split_from == 2200


def test_nothing_runs_where_other_ranks_need_not_come(tried: Tried, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(tried, monkeypatch)
    monkeypatch.setattr(ways.dist, "get_world_size", lambda: 4)
    ways.choose_ways(worker)
    monkeypatch.setattr(ways.dist, "get_world_size", lambda: 2)
    monkeypatch.setenv("TW_COMPILE", "0")
    ways.choose_ways(worker)
    assert worker.log == [] and tried.split_from == 3001
    monkeypatch.delenv("TW_COMPILE")
    ways.choose_ways(worker)
    assert worker.log
