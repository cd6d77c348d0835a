"""Where a node is measured, by whom, and where it is not."""

from __future__ import annotations

import multiprocessing
import threading
import time
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from calibrations import FOUND, HERE, MULTICAST, SM90

from tw_compile import agree, backend, calibration, compat, current
from tw_compile.agree import all_come, refuse
from tw_compile.calibration import Calibration, MeasuredOn, store, stored, text_of
from tw_compile.config import Config
from tw_compile.gating.facts import Node
from tw_compile.gating.table import Entry, Source, Table
from tw_compile.kernels.algorithms import ALGORITHMS
from tw_compile.kernels.algorithms.entry import AlgorithmEntry
from tw_compile.kernels.algorithms.multimem.multimem import Multimem
from tw_compile.kernels.collective.transports import GroupFacts
from tw_compile.kernels.registry import Benchmarked
from tw_compile.kernels.transports.selection import Step
from tw_compile.kernels.transports.slot_transport import SlotTransport
from tw_compile.testing import fake_process_group
from tw_compile.tuning import calibrate, short
from tw_compile.tuning.candidates import SPIN_LIMIT, candidates, for_planner
from tw_compile.tuning.short import SECONDS, ShortRun, short_spec


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    yield
    calibration.use(None)


@pytest.mark.parametrize(
    ("name", "world_size", "node", "transport", "expected"),
    [
        ("NVIDIA H200", 2, SM90, "p2p", "measured"),
        ("NVIDIA H200", 8, SM90, "p2p", "measure"),  # the tables end at 4 ranks
        ("NVIDIA H200", 4, MULTICAST, "p2p", "measure"),  # public tables are no measurement
        ("NVIDIA H200", 2, SM90, "host", "measure"),  # its kernels have no table
        ("NVIDIA A100", 2, Node((8, 0), False), "p2p", "measure"),
        ("A GPU", 8, SM90, "p2p", "stored"),
    ],
)
def test_what_has_been_measured_is_not_measured_again(
    name: str, world_size: int, node: Node, transport: str, expected: str, tmp_path: Path
) -> None:
    store(tmp_path, FOUND)
    here = replace(HERE, device_name=name, world_size=world_size)
    kind, text = calibrate.answer(Config(), node, here, transport, tmp_path)
    assert kind == expected and bool(text) == (expected == "stored")


@pytest.mark.parametrize("damage", ["truncated", "newer", "another node's"])
def test_a_file_that_is_of_no_use_is_one_line_and_measured_again(
    damage: str, tmp_path: Path, tw_log: pytest.LogCaptureFixture
) -> None:
    file, text = tmp_path / HERE.file_name, text_of(FOUND)
    if damage == "truncated":
        text = text[: len(text) // 2]
    elif damage == "newer":
        text = text.replace('"schema_version": 1', '"schema_version": 2', 1)
    else:
        text = text_of(replace(FOUND, measured_on=replace(HERE, driver="1.0")))
    file.write_text(text)
    assert calibrate.answer(Config(), SM90, HERE, "p2p", tmp_path) == ("measure", "")
    (line,) = tw_log.messages
    assert "not used" in line and str(file) in line
    store(tmp_path, FOUND)  # as the ranks do when they have measured
    assert calibrate.answer(Config(), SM90, HERE, "p2p", tmp_path) == ("stored", text_of(FOUND))


def _store_often(folder: Path, own: Calibration) -> None:
    for _ in range(20):
        store(folder, own)
        store(folder, FOUND)  # which others write, too


def test_of_two_processes_that_write_at_once_none_loses_anything(tmp_path: Path) -> None:
    others = [replace(FOUND, measured_on=replace(HERE, driver=str(number))) for number in range(2)]
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_store_often, args=(tmp_path, other)) for other in others]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert [stored(tmp_path, found.measured_on) for found in (FOUND, *others)] == [FOUND, *others]
    assert len(list(tmp_path.iterdir())) == 3


def test_multicast_and_missing_peer_access_choose_the_candidates() -> None:
    facts = GroupFacts("cuda", 4, 1)
    assert calibrate.transports_of(facts, SM90) == ["p2p"]
    assert calibrate.transports_of(facts, MULTICAST) == ["p2p", "multimem"]
    assert calibrate.transports_of(replace(facts, peer_access=False), MULTICAST) == ["host"]
    assert calibrate.transports_of(replace(facts, world_size=16), MULTICAST) == []


def test_every_kernel_of_the_registry_takes_part_and_can_give_up() -> None:
    toy = AlgorithmEntry(
        "toy",
        "tw_compile.kernels.algorithms.push.push:Push",
        (("one_shot", True),),
        sms=8,
        most_sms=8,
        benchmarked=(Benchmarked("tw-toy", sharded=False),),
    )
    with ALGORITHMS.registered(toy):
        everyone = candidates(["p2p"])
    assert [one.label for one in everyone[:2]] == ["nccl+norm", "tw-p2p"]
    assert {one.algorithm for one in everyone[2:]} >= {"push_one_shot", "push_two_shot", "stream", "toy"}
    assert all(one.hidden_scale is None for one in everyone)
    for one in everyone[1:]:
        transport = one.transport  # type: ignore[attr-defined]
        assert isinstance(transport, SlotTransport) and transport.spin_limit == SPIN_LIMIT
        assert transport.algorithm is not None
    assert {one.algorithm for one in candidates(["host"])[1:]} >= {"host_words", "host_one_shot", "host_two_shot"}


def test_multimem_takes_part_where_there_is_multicast_alone() -> None:
    facts = GroupFacts("cuda", 4, 1)
    without, everyone = (candidates(calibrate.transports_of(facts, node)) for node in (SM90, MULTICAST))
    assert "multimem" not in {one.algorithm for one in without}
    assert [one.label for one in everyone] == [*(one.label for one in without), "tw-multimem"]
    multimem = everyone[-1]
    transport = multimem.transport  # type: ignore[attr-defined]
    assert (transport.name, transport.multicast, transport.spin_limit) == ("multimem", True, SPIN_LIMIT)
    assert isinstance(transport.algorithm, Multimem) and multimem.max_sms == 16
    cut_off = candidates(calibrate.transports_of(replace(facts, peer_access=False), MULTICAST))
    assert "multimem" not in {one.algorithm for one in cut_off}


@pytest.mark.parametrize("switch", [None, "0", "1"])
def test_multimem_is_no_candidate_where_multicast_is_switched_off(
    switch: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a build of torch says that there is multicast all the same."""
    planted = types.SimpleNamespace(has_multicast_support=lambda device_type, index: True)
    monkeypatch.setattr(torch._C._distributed_c10d, "_SymmetricMemory", planted)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(current, "known_link_obstacle", lambda devices: None)
    if switch is None:
        monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", raising=False)
    else:
        monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", switch)
    node, off = current.current_node(), switch == "1"
    assert (node.multicast, node.device_class) == (not off, "sm90" if off else "sm90-multicast")
    transports = calibrate.transports_of(GroupFacts("cuda", 8, 1), node)
    assert transports == (["p2p"] if off else ["p2p", "multimem"])
    assert ("multimem" in {one.algorithm for one in candidates(transports)}) is not off


def test_the_planner_gets_what_it_does_not_know_at_a_few_sizes() -> None:
    more = for_planner(["p2p"], has_profile=False)
    assert {one.label: one.tokens for one in more} == {
        "no-communication": (16, 256, 1024, 4096),
        "o_proj": (256, 1024),
        "tw-push-two-shot-32sm": (256, 1024),
        "tw-stream-8sm": (256, 1024),
    }
    assert [one.kind for one in more] == ["bound", "bound", "ours", "ours"]
    assert for_planner(["p2p"], has_profile=True) == []
    assert [one.label for one in for_planner(["host"], has_profile=True)] == ["no-communication"]
    assert candidates(["p2p"])[0].tokens is None


def test_short_messages_make_up_for_uncertain_beginnings_and_long_ones_for_time() -> None:
    assert [short.calls_of(tokens * 16384) for tokens in (1, 64, 128, 256, 1024, 4096)] == [32, 32, 20, 10, 2, 2]


def test_a_kernel_that_gave_up_deviates() -> None:
    candidate = candidates(["p2p"])[1]

    class GaveUp(SlotTransport):
        def __init__(self) -> None:
            pass

        def group_obstacle(self, *args: Any) -> str | None:
            return None

        def serves(self, request: Any) -> bool:
            return True

        def check(self) -> None:
            raise RuntimeError("rank 1, CTA 0 gave up waiting for rank 0")

    candidate.transport = GaveUp()  # type: ignore[attr-defined]
    assert candidate.deviation(None) == "RuntimeError: rank 1, CTA 0 gave up waiting for rank 0"  # type: ignore[arg-type]


def test_ranks_that_come_late_hear_what_the_others_heard() -> None:
    store = dist.HashStore()
    heard: list[bool] = []
    threads = [threading.Thread(target=lambda: heard.append(all_come(store, "a", 3, 20.0))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard == [True] * 3
    assert [all_come(store, "b", 2, 0.1) for _ in range(2)] == [False, False]


def _graph(name: str | None) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    if name is not None:
        x = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", name))
    graph.output(x)
    return fx.GraphModule(torch.nn.Module(), graph)


def test_only_a_graph_that_every_rank_compiles_counts() -> None:
    with fake_process_group(4):
        assert dist.group.WORLD is not None
        some = dist.new_group([0, 1])
        names = (compat.group_name(dist.group.WORLD), compat.group_name(some), None)
        assert [calibrate.reduces_over_all_ranks(_graph(name)) for name in names] == [True, False, False]
        root = fx.GraphModule({"inner": _graph(names[0])}, _graph(None).graph)
        assert calibrate.reduces_over_all_ranks(root) is False  # a module that no node calls is no part of the graph


@pytest.mark.parametrize(
    ("config", "capturing", "nccl"),
    [
        (Config(calibrate="off"), False, True),
        (Config(transport="nccl"), False, True),
        (Config(fuse=False), False, True),
        (Config(), True, True),
        (Config(), False, False),
        (Config(), False, True),
    ],
)
def test_nothing_is_asked_where_nothing_may_be_measured(
    config: Config, capturing: bool, nccl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(calibrate, "over_nccl", lambda: nccl)
    monkeypatch.setattr(calibrate, "reduces_over_all_ranks", lambda graph: bool(asked.append(graph)))
    with fake_process_group(2):
        calibrate.before_compile(config, _graph(None))
    assert len(asked) == (config == Config() and nccl and not capturing)


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A process that is taken for the only rank on GPUs of the name ``A GPU``; what was measured is a list of names."""
    measured: list[str] = []

    def together(here: MeasuredOn, *_: Any) -> Calibration:
        measured.append(here.device_name)
        return replace(FOUND, measured_on=here)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(calibrate, "over_nccl", lambda: True)
    monkeypatch.setattr(calibrate, "current_node", lambda: SM90)
    monkeypatch.setattr(calibrate, "this_node", lambda: (HERE, ["p2p"]))
    monkeypatch.setattr(calibrate, "reduces_over_all_ranks", lambda graph: True)
    monkeypatch.setattr(calibrate, "candidates", lambda transports: [])
    monkeypatch.setattr(calibrate, "measured_together", together)
    calibrate.asked_in.clear()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    # Of eight, of whom nobody has to be waited for.
    monkeypatch.setattr(calibrate, "all_come", lambda store, key, ranks, seconds: True)
    yield measured
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("config", "measures"),
    [
        (Config(), True),
        (Config(calibrate="stored"), False),
        (Config(host="vllm-0.24"), False),  # vLLM compiles while it profiles its memory
        (Config(calibrate="off"), False),
    ],
)
def test_by_default_a_node_without_tables_is_measured_once(config: Config, measures: bool, on_gpus: list[str]) -> None:
    for _ in range(2):
        calibrate.before_compile(config, _graph(None))
    assert on_gpus == (["A GPU"] if measures else [])
    assert (calibration.in_use() is not None) is measures


@pytest.mark.parametrize("config", [Config(), Config(host="vllm-0.24"), Config(calibrate="stored")])
def test_where_there_is_a_calibration_it_is_used_and_nothing_is_measured(config: Config, on_gpus: list[str]) -> None:
    store(calibration.default_folder(), FOUND)
    calibrate.before_compile(config, _graph(None))
    assert on_gpus == [] and calibration.in_use() == FOUND


@pytest.mark.parametrize(
    ("config", "measures"), [(Config(host="vllm-0.24"), True), (Config(calibrate="stored"), False)]
)
def test_an_engine_measures_when_its_ranks_have_the_model(on_gpus: list[str], config: Config, measures: bool) -> None:
    """The host says that all ranks are there, so its all_reduce need not be NCCL's, and no graph is asked for."""
    calibrate.measure_or_use_stored(config)
    assert on_gpus == (["A GPU"] if measures else []) and (calibration.in_use() is not None) is measures


def test_an_engine_that_profiles_its_memory_measures_nothing(on_gpus: list[str]) -> None:
    """vLLM's pass asks for what is stored, whatever the option says."""
    calibrate.use_stored(Config())
    assert on_gpus == [] and calibration.in_use() is None


def test_tables_that_were_measured_are_enough(on_gpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = replace(HERE, device_name="NVIDIA H200", world_size=2)
    monkeypatch.setattr(calibrate, "this_node", lambda: (h200, ["p2p"]))
    calibrate.before_compile(Config(), _graph(None))
    assert on_gpus == [] and calibration.in_use() is None


def test_thresholds_that_are_off_are_no_reason_to_measure(on_gpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = replace(HERE, device_name="NVIDIA H200", world_size=2)
    monkeypatch.setattr(calibrate, "this_node", lambda: (h200, ["p2p"]))
    calibrate.before_compile(Config(thresholds="off"), _graph(None))
    assert on_gpus == [] and calibration.in_use() is None


@pytest.mark.parametrize(
    ("options", "measures"), [({}, True), ({"split": "off"}, False), ({"device_profile": "H200"}, False)]
)
def test_what_was_tuned_without_a_profile_gets_one_by_a_calibration(
    options: dict[str, str], measures: bool, on_gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nothing would be split there. A tuning's tables go before those of the calibration."""
    monkeypatch.setattr("tw_compile.own_gate.user_steps", lambda *device: (Step(8, 1 << 30, "push_two_shot", 128),))
    entry = Entry(8, "nccl", 0, None, "fused", "auto", Source("tuned", "measured", ()))
    table = Table("thresholds.toml", "generic", (entry,))
    monkeypatch.setattr("tw_compile.own_gate.tables_of", lambda layers, device_class: (table,))
    calibrate.before_compile(Config(**options), _graph(None))
    assert on_gpus == (["A GPU"] if measures else [])


def test_ranks_do_what_the_first_one_says_also_where_they_cannot_describe_their_node(
    on_gpus: list[str], monkeypatch: pytest.MonkeyPatch, tw_log: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise RuntimeError("no driver")

    agree.first_value(("stored", text_of(FOUND)), compat.default_store(), "calibration")  # another rank came first
    monkeypatch.setattr(calibrate, "this_node", broken)
    calibrate.before_compile(Config(), _graph(None))
    assert on_gpus == [] and calibration.in_use() == FOUND
    assert tw_log.messages == ["tw_compile: no calibration is used: RuntimeError: no driver"]


def test_ranks_that_would_measure_do_not_wait_for_one_that_cannot(
    on_gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("no driver")

    agree.first_value(("measure", ""), compat.default_store(), "calibration")
    monkeypatch.setattr(calibrate, "this_node", broken)
    calibrate.before_compile(Config(), _graph(None))
    assert on_gpus == [] and calibration.in_use() is None
    begin = time.monotonic()
    assert not all_come(compat.default_store(), "calibration/begin", 2, 20.0) and time.monotonic() - begin < 5.0


def test_a_node_that_cannot_be_described_is_compiled_for_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise RuntimeError("no driver")

    monkeypatch.setattr(calibrate, "over_nccl", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(calibrate, "this_node", broken)
    monkeypatch.setattr(calibrate, "reduces_over_all_ranks", lambda graph: True)
    for config in (Config(), Config(calibrate="stored"), Config(strict=True)):
        calibrate.asked_in.clear()
        with fake_process_group(2), caplog.at_level("WARNING"):
            if config.strict:
                with pytest.raises(RuntimeError, match="no driver"):
                    calibrate.before_compile(config, _graph(None))
            else:
                calibrate.before_compile(config, _graph(None))
    assert caplog.text.count("no calibration is used: RuntimeError: no driver") == 2


@pytest.mark.parametrize(
    ("config", "nccl"), [("cuda:nccl", True), ("cpu:gloo,cuda:nccl", True), ("cpu:gloo,cuda:gloo", False)]
)
def test_only_groups_of_nccl_are_measured(config: str, nccl: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda: config)
    assert calibrate.over_nccl() is nccl


@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_backend_calibrates_on_gpus_in_a_group_alone(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Config] = []
    monkeypatch.setattr(backend, "load", lambda path: lambda config, graph: asked.append(config))
    monkeypatch.setattr(backend.compat, "compile_with_inductor", lambda graph, inputs, patches: graph)
    backend.tw_compile_backend(_graph(None), [])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: on_gpu)
    backend.tw_compile_backend(_graph(None), [])  # no group yet
    with fake_process_group(2):
        backend.tw_compile_backend(_graph(None), [], options={"tw_compile.calibrate": "off"})
        assert asked == []
        backend.tw_compile_backend(_graph(None), [])
    assert asked == ([Config()] if on_gpu else [])


def test_a_rank_that_refuses_is_not_waited_for() -> None:
    store = dist.HashStore()
    refuse(store, "a")
    begin = time.monotonic()
    assert not all_come(store, "a", 2, 20.0) and time.monotonic() - begin < 5.0


def test_where_ranks_cannot_meet_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, tw_log: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def no_address(**options: Any) -> None:
        raise RuntimeError("gloo: no address")

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(dist, "new_group", no_address)
        assert calibrate.measured_together(HERE, tmp_path, torch.device("cpu"), []) is None
    finally:
        dist.destroy_process_group()
    assert "can't meet by gloo: gloo: no address" in tw_log.messages[-1]


def test_agreement_goes_on_where_a_store_has_been_told_already() -> None:
    store = dist.HashStore()
    agree.first_value(True, store, "a/all")
    assert all_come(store, "a", 5, 20.0)


def test_a_first_size_without_room_does_not_make_the_measurement_longer() -> None:
    now = [0.0]

    class Run(ShortRun):
        def _has_room(self, size: Any) -> bool:
            return size.tokens != 64

        def _check(self, *of: Any, **named: Any) -> list[Any]:
            return []

        def _time(self, *of: Any) -> list[Any]:
            now[0] += 1.0
            return []

        def _release(self) -> None:
            pass

    ranks = SimpleNamespace(gather=lambda value: [value], ctx=SimpleNamespace(rank=0))
    run = Run(ranks, short_spec(2, "cpu"), [], lambda: now[0])  # type: ignore[arg-type]
    run.run()
    assert sum(run.took) <= SECONDS
