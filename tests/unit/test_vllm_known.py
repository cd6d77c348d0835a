"""What vLLM's front end knows of a node: what its workers will use, and whether they will know more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from calibrations import FOUND

from tw_compile import calibration, current
from tw_compile.calibration import Calibration, default_folder, store
from tw_compile.config import Config
from tw_compile.files import user_file
from tw_compile.gating.facts import Node
from tw_compile.hosts.vllm import plan
from tw_compile.hosts.vllm.doctor import examine
from tw_compile.hosts.vllm.known import Known, known_before
from tw_compile.models.config import load_config, tensor_parallel_plan
from tw_compile.planning import device, layer_shape, links, load_profile
from tw_compile.planning.links import shipped_link
from tw_compile.planning.tables import toml_of
from tw_compile.tuning.calibrate import answer

NAME, RANKS, H100 = "NVIDIA L40S", 2, "NVIDIA H100 80GB HBM3"
H200 = load_profile("H200")
PROFILE = replace(
    H200,
    name=f"{NAME}, estimated",
    device_names=(NAME,),
    sms=142,
    memory_gb_per_s=700.0,
    gemm=replace(H200.gemm, tflops_per_sm=1.5, own_gemms=False),
    all_reduce={"nccl": replace(H200.all_reduce["nccl"], latency_us=25.0, link_gb_per_s=20.0)},
    fused={"push": replace(H200.fused["push"], latency_us=10.0, link_gb_per_s=21.0, ctas=(32, 64))},
    kernel="push",
    estimated=True,
)
"""As if a calibration had estimated it. Nobody has measured these numbers."""
NODE = Node((8, 9), False)
VLLM = Config(host="vllm-0.24")


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    yield
    calibration.use(None)


def keep(name: str = NAME, ranks: int = RANKS, node: Node = NODE, **values: Any) -> Calibration:
    """Store a calibration of such a node, as its ranks would."""
    here = current.measured_on(name, ranks, node, node.peer_access)
    found = replace(FOUND, measured_on=here, **{"profile": PROFILE, **values})
    assert store(default_folder(), found) is not None
    return found


def known(config: Config = VLLM, name: str | None = NAME, node: Node = NODE, **more: Any) -> Known:
    return known_before(config, name, RANKS, plan.gates(config, node.capability, node.peer_access), **more)


def write(name: str, text: str) -> None:
    file = user_file(name)
    assert file is not None
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_a_calibration_of_such_a_node_is_found() -> None:
    assert known() == Known(None, None, True)  # the ranks will measure
    keep()
    assert known() == Known(PROFILE, None, True)


@pytest.mark.parametrize("multicast", [False, True])
def test_multicast_need_not_be_known(multicast: bool) -> None:
    keep(node=Node((9, 0), multicast))
    assert known(node=Node((9, 0), False)).profile == PROFILE


@pytest.mark.parametrize("changes", [{"name": "NVIDIA L4"}, {"ranks": 4}, {"node": replace(NODE, peer_access=False)}])
def test_calibrations_of_other_nodes_are_not(changes: dict[str, Any]) -> None:
    keep(**changes)
    assert known().profile is None


@pytest.mark.parametrize("field", ["driver", "torch", "source"])
def test_calibrations_of_other_versions_are_not(field: str) -> None:
    found = keep()
    file = default_folder()
    assert file is not None
    (file / found.measured_on.file_name).unlink()
    store(file, replace(found, measured_on=replace(found.measured_on, **{field: "another"})))
    assert known().profile is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"calibrate": "off"}, Known(None, None, False)),
        ({"calibrate": "stored"}, Known(PROFILE, None, True)),
        ({"fuse": False}, Known(None, None, False)),
        ({"transport": "p2p"}, Known(None, None, False)),
        ({"device_profile": "H100"}, Known(load_profile("H100"), None, False)),
    ],
    ids=str,
)
def test_options_count_as_for_the_workers(options: dict[str, Any], expected: Known) -> None:
    keep()
    assert known(replace(VLLM, **options)) == expected


@pytest.mark.parametrize(
    ("options", "more"), [({"calibrate": "stored"}, {}), ({}, {"measures": False}), ({}, {"name": None})], ids=str
)
def test_where_ranks_measure_nothing_they_know_no_more(options: dict[str, Any], more: dict[str, Any]) -> None:
    assert known(replace(VLLM, **options), **more) == Known(None, None, False)


def test_a_calibration_that_timed_too_little_for_a_profile_gives_the_ranks_none() -> None:
    keep(profile=None)
    assert known() == Known(None, None, False)


def test_a_shipped_profile_counts_before_a_calibration_and_the_users_before_both() -> None:
    keep(H100, node=Node((9, 0), False))
    assert known(name=H100, node=Node((9, 0), False)) == Known(load_profile("H100"), None, False)
    keep()
    own = replace(PROFILE, name="mine", estimated=False)
    write(device.USER_FILE, toml_of(own))
    assert known() == Known(own, None, False)


def test_rates_of_host_memory_are_the_users_then_measured_then_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    node = replace(NODE, peer_access=False)
    assert known(node=node) == Known(None, shipped_link(), True)
    measured, own = (replace(shipped_link(), name=name) for name in ("measured", "own"))
    keep(node=node, link=measured)
    assert known(node=node) == Known(PROFILE, measured, True)
    write(links.USER_FILE, toml_of(own))
    assert known(node=node).link == own


def test_tables_that_say_what_the_node_does_leave_a_calibration_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    keep()
    monkeypatch.setattr("tw_compile.hosts.vllm.known.is_measured", lambda config, node, *rest: not node.multicast)
    assert known() == Known(None, None, True)  # nodes with multicast would be measured
    monkeypatch.setattr("tw_compile.hosts.vllm.known.is_measured", lambda *given: True)
    assert known() == Known(None, None, False)


def test_without_peer_access_ranks_may_know_the_link_of_a_known_device_better() -> None:
    assert known(name=H100, node=Node((9, 0), False, peer_access=False)) == Known(
        load_profile("H100"), shipped_link(), True
    )


@pytest.mark.parametrize("name", [NAME, H100, "NVIDIA H200"])
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("peers", [True, False])
@pytest.mark.parametrize("calibrate", ["auto", "stored", "off"])
def test_the_profile_is_that_of_a_rank(
    monkeypatch: pytest.MonkeyPatch, name: str, ranks: int, peers: bool, calibrate: str
) -> None:
    node = Node((8, 9) if name == NAME else (9, 0), False, peers)
    config = replace(VLLM, calibrate=calibrate)
    found = keep(name, ranks, node, link=replace(shipped_link(), name="measured"))
    monkeypatch.setattr(current.torch.cuda, "get_device_name", lambda: name)
    transport = "p2p" if peers else "host"
    state, _ = answer(config, node, found.measured_on, transport, default_folder())
    of_rank = found if state == "stored" and calibrate != "off" else None
    here = known_before(config, name, ranks, plan.gates(config, node.capability, peers))
    assert here.profile == current.own_profile(config, of_rank)
    if not peers:
        assert here.link == links.link_of_node(None if of_rank is None else of_rank.link)


LLAMA = load_config("llama-3.1-8b")
LAYER = layer_shape(LLAMA, tensor_parallel_plan(LLAMA), RANKS, merged=True)
ENGINE = plan.Engine(RANKS, LAYER.hidden_size, "bfloat16", 4096)


def ranges_of(split_for: plan.SplitFor, groups: bool = True) -> plan.PlannedRanges:
    choices = plan.gates(VLLM, NODE.capability)
    return plan.planned_ranges(ENGINE, VLLM, choices, 513, [2048], split_for, True, groups)


def test_what_only_the_ranks_know_is_left_to_them() -> None:
    """By what they have measured they plan. It is an estimate, so the start measures every range that is to be split."""
    coarse = ((513, 2048), (2049, 4096))
    left = ranges_of(plan.SplitFor(None, LAYER, by_ranks=True))
    assert left == (coarse, "split auto: planned by the ranks, by what they measure of this node", (), True)
    assert ranges_of(plan.SplitFor(PROFILE, LAYER, by_ranks=True)) == left  # so a second start compiles the same ranges
    planned = ranges_of(plan.SplitFor(PROFILE, LAYER))
    assert planned.tried and not planned.by_ranks and {end for _, end in coarse} <= {end for _, end in planned.ranges}
    planner = plan.split_planner(PROFILE, LAYER, ENGINE, VLLM, plan.gates(VLLM, NODE.capability), True, 0.0)
    assert planned.tried == tuple(ends for ends in planned.ranges if planner.split(*ends) is not None)
    assert planned.text == (
        f"split auto: steps of {planned.tried[0][0]} to 4096 tokens where the start measures that this is faster"
    )
    known_better = ranges_of(plan.SplitFor(replace(PROFILE, estimated=False), LAYER))
    assert "this is faster" not in known_better.text and (2049, 4096) not in known_better.tried


def test_ranges_that_are_not_to_be_split_are_not_tried() -> None:
    link = replace(PROFILE.fused["push"], link_gb_per_s=2000.0, latency_us=1.0)
    fast = replace(PROFILE, fused={"push": link})
    found = ranges_of(plan.SplitFor(fast, LAYER))
    assert found.tried == () and found.text == "split auto: none of up to 4096 tokens pays"


def test_ranks_that_cut_no_ranges_plan_at_the_next_start() -> None:
    first = ranges_of(plan.SplitFor(None, LAYER, by_ranks=True), groups=False)
    none = "split auto: none, no_device_profile: none says how long a layer takes"
    assert first == (
        ((513, 2048), (2049, 4096)),
        f"{none}; once the ranks have measured this node, a start plans by that",
        (),
        False,
    )
    assert ranges_of(plan.SplitFor(None, LAYER), groups=False).text == none
    assert "no_device_profile" not in ranges_of(plan.SplitFor(PROFILE, LAYER, by_ranks=True), groups=False).text


def test_graphs_of_layers_that_are_not_known_are_planned_one_by_one_by_what_ranks_measure() -> None:
    found = ranges_of(plan.SplitFor(None, None, by_ranks=True))
    assert found.ranges == ((513, 1024), (1025, 2048), (2049, 4096)) and "read off its graph" in found.text
    assert not found.by_ranks
    assert "no_device_profile" in ranges_of(plan.SplitFor()).text


def test_rates_of_a_link_decide_where_a_split_begins() -> None:
    host = shipped_link().transport("host")
    ways = {name: replace(way, gb_per_s=100 * way.gb_per_s, latency_us=1.0) for name, way in host.ways.items()}
    fast = replace(shipped_link(), transports={**shipped_link().transports, "host": replace(host, ways=ways)})
    choices = plan.gates(VLLM, NODE.capability, peer_access=False)
    slow, other = (
        plan.planned_ranges(ENGINE, VLLM, choices, 513, [], plan.SplitFor(PROFILE, LAYER, link), True)
        for link in (None, fast)
    )
    assert "split auto: steps of " in slow.text and slow.ranges != other.ranges


@pytest.mark.full
def test_doctor_forecasts_by_a_calibration() -> None:
    def split() -> str:
        return str(examine({}, NODE.capability, NAME)["groups"][1]["split"])

    assert split() == "split auto: planned by the ranks, by what they measure of this node"
    keep(ranks=4)
    assert split().startswith("split auto: steps of ") and split().endswith(
        f" (forecast for {PROFILE.name}; the ranks plan by what they measure)"
    )
