"""What is kept of a calibration, who goes by it, and where none is made."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from typer.testing import CliRunner

from tw_compile import agree, backend, calibration, compat, current
from tw_compile.agree import all_come, refuse
from tw_compile.calibration import Calibration, MeasuredOn, all_stored, calibration_of, store, stored, text_of
from tw_compile.cli.app import app
from tw_compile.config import Config
from tw_compile.current import current_gate, own_gate
from tw_compile.files import write_whole
from tw_compile.gating import Entry, Layer, Source, Table, table_text
from tw_compile.gating.facts import Node
from tw_compile.kernels.algorithms import ALGORITHMS
from tw_compile.kernels.algorithms.entry import AlgorithmEntry
from tw_compile.kernels.algorithms.multimem.multimem import Multimem
from tw_compile.kernels.collective.transports import GroupFacts
from tw_compile.kernels.registry import Benchmarked
from tw_compile.kernels.transports.selection import Step, shipped_steps, steps_for
from tw_compile.kernels.transports.selection import table_text as kernels_text
from tw_compile.kernels.transports.slot_transport import SlotTransport
from tw_compile.runner import machine
from tw_compile.testing import fake_process_group
from tw_compile.tuning import calibrate
from tw_compile.tuning.candidates import SPIN_LIMIT, candidates

SM90, MULTICAST = Node((9, 0), False), Node((9, 0), True)
HERE = MeasuredOn("A GPU", "sm90", 8, True, False, "570.1", "2.11", "abc")
SOURCE = Source("measured_tp8", "measured", ("8x A GPU", "torch 2.11", "2026-11-24", "tw_compile.calibrate"))
LEFT = Entry(8, "nccl", 0, None, "left", None, SOURCE)
STEPS = (Step(8, 4096, "push_one_shot", 128), Step(8, 8192, "push_two_shot", 128))
FOUND = Calibration(
    HERE, Table("calibration", "sm90", (LEFT,)), STEPS, ("stream is left out: no",), ({"label": "a"},), (2.5, 7.0)
)


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    yield
    calibration.use(None)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    read = calibration_of(text_of(FOUND), "file")
    assert read == FOUND
    assert stored(tmp_path, HERE) is None and all_stored(tmp_path / "nowhere") == []
    file = store(tmp_path / "new", FOUND)
    assert file == tmp_path / "new" / HERE.file_name and stored(tmp_path / "new", HERE) is not None
    assert [one.measured_on for one in all_stored(tmp_path / "new")] == [HERE]


@pytest.mark.parametrize(
    "change",
    [
        {"device_name": "Another GPU"},
        {"world_size": 4},
        {"peer_access": False},
        {"multicast": True},
        {"driver": "580"},
        {"torch": "2.12"},
        {"source": "def"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_file_is_for_one_kind_of_node(
    change: dict[str, Any], tmp_path: Path, tw_log: pytest.LogCaptureFixture
) -> None:
    other = replace(HERE, **change)
    store(tmp_path, FOUND)
    assert stored(tmp_path, other) is None and not tw_log.messages
    (tmp_path / HERE.file_name).rename(tmp_path / other.file_name)  # as if somebody had copied it
    assert stored(tmp_path, other) is None
    assert len(tw_log.messages) == 1 and "it was measured on another node" in tw_log.messages[0]


def _without(key: str) -> str:
    return json.dumps({name: value for name, value in json.loads(text_of(FOUND)).items() if name != key})


def _with(**values: Any) -> str:
    return json.dumps(json.loads(text_of(FOUND)) | values)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (text_of(FOUND)[:200], "expected JSON, got "),
        ("", "expected JSON, got "),
        ("[]", "schema_version: expected 1, got None"),
        (_with(schema_version=2), "schema_version: expected 1, got 2"),
        (_without("kernels"), "got no 'kernels'"),
        (_with(thresholds=3), "thresholds: expected str, got 3"),
        (_with(thresholds="schema_version = 1\n"), "expected the keys schema_version, device"),
        (_with(kernels='device = "A"\nstep = 1\n'), "expected the keys device and steps, got 'step'"),
        (_with(seconds=[1.0]), "seconds: expected two numbers, got [1.0]"),
        (_with(measured_on={}), "measured_on: expected the keys device_name, "),
        (
            _with(measured_on={**json.loads(text_of(FOUND))["measured_on"], "world_size": "8"}),
            "world_size: expected int",
        ),
    ],
    ids=lambda value: value if value.startswith(("expected", "schema", "got", "measured", "thr", "world")) else "text",
)
def test_a_file_that_cannot_be_used_is_named_in_one_line(
    text: str, why: str, tmp_path: Path, tw_log: pytest.LogCaptureFixture
) -> None:
    (tmp_path / HERE.file_name).write_text(text)
    assert stored(tmp_path, HERE) is None
    (line,) = tw_log.messages
    assert line.startswith(f"tw_compile: a calibration is not used: {tmp_path / HERE.file_name}: ") and why in line
    assert "\n" not in line


def test_of_two_writers_at_once_nothing_is_lost(tmp_path: Path) -> None:
    others = [replace(FOUND, measured_on=replace(HERE, driver=str(number))) for number in range(4)]
    threads = [threading.Thread(target=store, args=(tmp_path, one)) for one in (FOUND, *others) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {one.measured_on for one in all_stored(tmp_path)} == {HERE, *(other.measured_on for other in others)}
    assert len(list(tmp_path.iterdir())) == 5  # no part of a file stays


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(tmp_path / "a", "before")
    monkeypatch.setattr(Path, "replace", lambda self, other: (_ for _ in ()).throw(OSError("no room")))
    with pytest.raises(OSError, match="no room"):
        write_whole(tmp_path / "a", "after")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("a", "before")]


def test_a_folder_that_cannot_be_written_costs_one_line(tmp_path: Path, tw_log: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert store(tmp_path / "file", FOUND) is None and store(None, FOUND) is None
    assert [line.split(": ")[1].split(",")[0] for line in tw_log.messages] == ["the calibration is not kept"] * 2


def test_the_layer_is_above_what_is_shipped_and_below_the_users(tmp_path: Path) -> None:
    layer = Layer("calibration", "file", FOUND.table)

    def fused(calibrated: Layer | None, node: Node = SM90) -> bool:
        return own_gate(Config(), node, calibrated).decide(2**20, world_size=8, dtype="bfloat16").fused

    assert fused(None) and not fused(layer)
    assert fused(layer, Node((10, 0), False))  # it is about another class of devices
    source = Source("user", "public", ("somebody's",))
    (tmp_path / "tw_compile").mkdir()
    (tmp_path / "tw_compile" / "thresholds.toml").write_text(
        table_text(Table("user", "sm90", (Entry(8, "nccl", 0, None, "fused", "p2p", source),)))
    )
    assert fused(layer)


def test_kernels_come_from_the_user_then_from_the_calibration_then_from_what_is_shipped(tmp_path: Path) -> None:
    h200 = replace(FOUND, measured_on=replace(HERE, device_name="NVIDIA H200", world_size=4))
    four = tuple(replace(step, world_size=4) for step in STEPS)
    assert steps_for("A GPU", 8) == () and steps_for("NVIDIA H200", 4) == shipped_steps("NVIDIA H200", 4) != four
    calibration.use(FOUND)
    assert steps_for("A GPU", 8) == STEPS and steps_for("A GPU", 4) == ()
    calibration.use(replace(h200, steps=four))
    assert steps_for("NVIDIA H200", 4) == four and steps_for("NVIDIA H200", 2) == shipped_steps("NVIDIA H200", 2)
    (tmp_path / "tw_compile").mkdir()
    user = (Step(4, 1024, "stream", 16),)
    (tmp_path / "tw_compile" / "kernels.toml").write_text(kernels_text("NVIDIA H200", user, ""))
    assert steps_for("NVIDIA H200", 4) == user
    calibration.use(None)
    assert steps_for("A GPU", 8) == () and calibration.in_use() is None


def test_a_gate_that_was_agreed_before_does_not_hide_the_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(current, "current_node", lambda: SM90)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        before, off = current_gate(Config()), current_gate(Config(calibrate="off"))
        calibration.use(FOUND)
        after = current_gate(Config())
        assert before.digest() != after.digest() and current_gate(Config(calibrate="off")) is off
        verdict = after.decide(2**20, world_size=8, dtype="bfloat16")
        assert not verdict.fused and verdict.entry.startswith("calibration: world_size 8, nccl, from 0 bytes")
        assert verdict.source.startswith("measured on 8x A GPU")
    finally:
        dist.destroy_process_group()


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
        (Config(calibrate="auto", transport="nccl"), False, True),
        (Config(calibrate="auto", fuse=False), False, True),
        (Config(calibrate="auto"), True, True),
        (Config(calibrate="auto"), False, False),
        (Config(calibrate="auto"), False, True),
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
    assert len(asked) == (config == Config(calibrate="auto") and nccl and not capturing)


def test_by_default_nothing_is_measured_and_what_was_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Config] = []
    monkeypatch.setattr(calibrate, "use_stored", used.append)
    monkeypatch.setattr(calibrate, "measured_together", lambda *_: pytest.fail("measured"))
    with fake_process_group(2):
        calibrate.before_compile(Config(), _graph(None))
    assert used == [Config()]


def test_a_node_that_cannot_be_described_is_compiled_for_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise RuntimeError("no driver")

    monkeypatch.setattr(calibrate, "over_nccl", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(calibrate, "this_node", broken)
    for config in (Config(), Config(strict=True)):
        calibrate.asked_in.clear()
        with fake_process_group(2), caplog.at_level("WARNING"):
            if config.strict:
                with pytest.raises(RuntimeError, match="no driver"):
                    calibrate.before_compile(config, _graph(None))
            else:
                calibrate.before_compile(config, _graph(None))
    assert caplog.text.count("no calibration is used: no driver") == 1


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


def test_doctor_shows_the_layer_and_its_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "node_facts", lambda device, ranks: GroupFacts(device, ranks, 1))
    gpus = [{"name": "A GPU"}] * 8
    assert machine.calibrations_of(gpus, SM90) == []
    layer = machine.calibrated_layer([], SM90)
    report = machine.thresholds_report(own_gate(Config(), SM90, layer), layer)
    assert [row["layer"] for row in report["layers"]][2:4] == ["calibration", "user file"]
    assert report["layers"][2]["state"] == "absent"
    assert [row["state"] for row in machine.kernel_tables_report(gpus, [])["layers"]][1] == "absent"

    here = current.measured_on("A GPU", 8, SM90, True)
    folder = calibration.default_folder()
    store(folder, replace(FOUND, measured_on=here))
    found = machine.calibrations_of(gpus, SM90)
    assert [one.measured_on for one in found] == [here] and steps_for("A GPU", 8) == STEPS
    layer = machine.calibrated_layer(found, SM90)
    report = machine.thresholds_report(own_gate(Config(), SM90, layer), layer)
    assert report["layers"][2] == {"layer": "calibration", "from": str(folder), "state": "1 ranges"}
    (row,) = (row for row in machine.kernel_tables_report(gpus, found)["layers"] if row["layer"] == "calibration")
    assert row["state"] == "8 ranks"
    assert machine.calibrations_of(gpus[:4], SM90) == []


def test_explain_goes_by_what_ranks_of_such_a_node_measured() -> None:
    args = ["explain", "--device", "sm90", "--tp", "8", "--tokens", "64", "--json", "-"]

    def message(*more: str) -> dict[str, Any]:
        result = CliRunner().invoke(app, [*args, *more])
        assert result.exit_code == 0, result.output
        (only,) = json.loads(result.stdout)["messages"]
        return dict(only)

    assert message()["decision"] == "fused"
    here = current.measured_on("A GPU", 8, SM90, True)
    for other in (replace(here, torch="1.0"), replace(here, source="old"), replace(here, peer_access=False)):
        store(calibration.default_folder(), replace(FOUND, measured_on=other))
    assert message()["decision"] == "fused"
    store(calibration.default_folder(), replace(FOUND, measured_on=here))
    now = message()
    assert now["decision"] == "gated" and now["entry"].startswith("calibration: world_size 8, nccl")
    assert now["source"].endswith("2026-11-24: tw_compile.calibrate")
    assert not message("--multicast")["entry"].startswith("calibration")
    assert message("--thresholds", "off")["decision"] == "fused"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--device", "cpu"], "--quick: expected --device cuda with it, got 'cpu'"),
        (["--out", "folder"], "--out: expected none with --quick, got 'folder'"),
        (["--plot", "a.png"], "--plot: expected none with --quick, got 'a.png'"),
        (["--transport", "nccl"], "--transport: expected none with --quick, got 'nccl'"),
    ],
)
def test_what_does_not_go_with_quick_is_refused(args: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["tune", "--quick", *args])
    assert result.exit_code == 2 and message in result.output


def test_quick_shows_what_ranks_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    specs: list[Any] = []

    def spawn(spec: Any, progress: Any, entry: Any) -> dict[str, Any]:
        specs.append((spec.world_size, entry))
        return {"calibration": None if spec.world_size == 4 else text_of(FOUND)}

    monkeypatch.setattr("tw_compile.cli.tune.world_sizes_of", lambda asked, device, dry_run: asked or (2, 4))
    monkeypatch.setattr("tw_compile.harness.launch.spawn_ranks", spawn)
    result = CliRunner().invoke(app, ["tune", "--quick", "--tp", "2", "--json", "-"])
    assert result.exit_code == 0, result.output
    assert specs == [(2, calibrate.rank_process)]
    for line in (
        "push_one_shot (128 SMs) to 4.0 KiB, push_two_shot (128 SMs)",
        "left, measured",
        "stream is left out: no",
        "measured in 2.5 s, after 7.0 s",
    ):
        assert line in " ".join(result.stderr.split())
    assert json.loads(result.stdout)["calibrations"] == [json.loads(text_of(FOUND))]
    assert CliRunner().invoke(app, ["tune", "--quick"]).exit_code == 1  # 4 ranks measured nothing
    specs.clear()
    dry = CliRunner().invoke(app, ["tune", "--quick", "--dry-run"])
    assert dry.exit_code == 0 and "would time 1, 4, 16, " in dry.output and specs == []
