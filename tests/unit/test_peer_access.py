"""Nodes whose GPUs can't work on each other's memory: how that is known, and which transport is taken there."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tw_compile import Config, TWCompilePass, compat, current, peer_routes
from tw_compile.gating.facts import Node
from tw_compile.kernels.collective import p2p_group, peer_access, transport
from tw_compile.kernels.collective.peer_access import SWITCHED_OFF, copy_obstacle, link_obstacle, peer_access_obstacle
from tw_compile.kernels.collective.transport import group_facts, node_facts
from tw_compile.kernels.collective.transports import (
    NO_PEER_ACCESS,
    NO_PEER_ATOMICS,
    TRANSPORTS,
    GroupFacts,
    Obstacle,
    TransportEntry,
    choose_transport,
    prefer_transport,
)
from tw_compile.testing import fake_process_group

CUT_OFF = GroupFacts("cuda", 2, 1, peer_access=False)
HOST = TransportEntry("toy-host", ("cuda",), "nowhere:Toy", "pinned memory of the host", preference=0)
"""Between p2p and nccl: of equal preferences the one that was registered first comes first."""


class Gpus:
    """What torch.cuda and the driver say of so many GPUs, of which some pairs are cut off, or have a link without atomics."""

    def __init__(self, count: int, cut_off: set[tuple[int, int]]) -> None:
        self.count, self.cut_off, self.asked = count, cut_off, 0
        self.plain: set[tuple[int, int]] = set()

    def can_access(self, gpu: int, peer: int) -> bool:
        assert gpu != peer and max(gpu, peer) < self.count, "CUDA refuses these"
        self.asked += 1
        return (gpu, peer) not in self.cut_off

    def atomics(self, gpu: int, peer: int) -> bool:
        assert (gpu, peer) not in self.cut_off, "nobody asks for what can't be reached"
        return (gpu, peer) not in self.plain


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a node of so many GPUs, of which some pairs are cut off."""

    def make(count: int, *cut_off: tuple[int, int]) -> Gpus:
        gpus = Gpus(count, set(cut_off))
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus.count)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", gpus.can_access)
        monkeypatch.setattr(peer_access, "native_atomics", gpus.atomics)
        peer_routes.use(None)
        return gpus

    return make


@pytest.fixture
def group() -> Iterator[str]:
    """A group of one rank that agrees with itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield compat.group_name(dist.group.WORLD)
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["p2p", "multimem"])
def test_peer_memory_needs_peer_access(name: str) -> None:
    choice = choose_transport(CUT_OFF, 4096, torch.bfloat16.itemsize, name)
    assert (choice.name, choice.reason, choice.limited_by) == (None, NO_PEER_ACCESS, "device")
    off = dataclasses.replace(CUT_OFF, peer_obstacle=SWITCHED_OFF)
    assert choose_transport(off, 4096, torch.bfloat16.itemsize, name).reason == SWITCHED_OFF


def test_without_peer_access_the_next_by_preference_is_taken() -> None:
    choice = choose_transport(CUT_OFF, 4096, torch.bfloat16.itemsize)
    with transport.registered(HOST):
        between = choose_transport(CUT_OFF, 4096, torch.bfloat16.itemsize)
        assert choose_transport(GroupFacts("cuda", 2, 1), 4096, torch.bfloat16.itemsize).name == "p2p"
        assert prefer_transport(CUT_OFF, 4096, torch.bfloat16.itemsize, "p2p") == between
    assert (between.name, between.reason, between.limited_by) == ("toy-host", NO_PEER_ACCESS, "device")
    assert dataclasses.replace(choice, name="toy-host") == between
    ranked = sorted((entry.preference, entry.name) for entry in TRANSPORTS if entry.preference is not None)
    assert choice.name == next(name for _, name in ranked if name != "p2p" and "cuda" in TRANSPORTS[name].device_types)


def test_a_transport_that_cannot_serve_the_message_is_passed_over_too() -> None:
    short = dataclasses.replace(
        HOST,
        obstacle=lambda facts, hidden_size, element_bytes: (
            Obstacle("too long", "hidden_size") if hidden_size > 4096 else None
        ),
    )
    with transport.registered(short):
        names = [choose_transport(CUT_OFF, size, torch.bfloat16.itemsize).name for size in (4096, 8192)]
    assert names[0] == "toy-host" and names[1] == choose_transport(CUT_OFF, 8192, torch.bfloat16.itemsize).name


def test_each_direction_counts(node: Any) -> None:
    gpus = node(3, (2, 0))
    assert link_obstacle([0, 1]) is None and link_obstacle([1, 2, 1]) is None
    assert link_obstacle([0, 1, 2]) == NO_PEER_ACCESS
    assert link_obstacle([1]) is None and link_obstacle([]) is None
    gpus.plain = {(1, 0)}
    assert link_obstacle([0, 1]) == NO_PEER_ATOMICS and link_obstacle([1, 2]) is None
    assert link_obstacle([0, 1, 2]) == NO_PEER_ACCESS, "without access nobody else can use the link either"


def test_compile_time_says_of_a_link_without_atomics_what_the_first_use_finds(
    node: Any, monkeypatch: pytest.MonkeyPatch, group: str
) -> None:
    """So wires, plans and calibrations are those of ``host`` from the start, not those of ``p2p``."""
    node(2).plain = {(0, 1)}
    facts = node_facts("cuda", 2)
    assert facts == GroupFacts("cuda", 2, 1, False, NO_PEER_ATOMICS)
    choice = choose_transport(facts, 4096, torch.bfloat16.itemsize)
    assert (choice.name, choice.reason, choice.limited_by) == ("host", NO_PEER_ATOMICS, "device")
    monkeypatch.setattr(p2p_group, "device_uuids", lambda: ["a", "b"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(p2p_group.compat, "symm_mem_empty", lambda nbytes, device: pytest.fail("no memory is made"))
    monkeypatch.setattr(p2p_group, "gather", lambda own, _: [own, dataclasses.replace(own, device_uuid="b")])
    found = p2p_group.group_obstacle(dist.group.WORLD, torch.device("cuda", 0))
    assert found == f"rank 0: {facts.peer_obstacle} (to the GPU of rank 1)"


def test_a_driver_that_cannot_be_asked_promises_no_atomics(node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(gpu: int, peer: int) -> bool:
        raise OSError("libcuda.so.1")

    node(2)
    monkeypatch.setattr(peer_access, "native_atomics", no_library)
    assert link_obstacle((0, 1)) == NO_PEER_ATOMICS


def test_copies_need_no_atomics(node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = node(2)
    gpus.plain = {(0, 1)}
    assert peer_access_obstacle((0, 1)) == NO_PEER_ATOMICS and copy_obstacle((0, 1)) is None
    gpus.cut_off = {(0, 1)}
    assert copy_obstacle((0, 1)) == NO_PEER_ACCESS
    monkeypatch.setenv("TW_COMPILE_PEER_ACCESS", "0")
    assert copy_obstacle((0, 1)) == SWITCHED_OFF


def test_the_group_is_asked_for_its_own_gpus(node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of cards may be bridged, and cut off from other pairs."""
    node(4, *((a, b) for a in range(4) for b in range(4) if a // 2 != b // 2))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with fake_process_group(8):
        groups = {ranks: compat.group_name(dist.new_group(ranks)) for ranks in ((0, 1), (0, 2), (0, 4))}
        of = {ranks: group_facts(name, "cuda") for ranks, name in groups.items()}
        everyone = group_facts(compat.group_name(dist.group.WORLD), "cuda")
        assert group_facts(groups[0, 2], "cpu").peer_access, "it is about GPUs alone"
    assert [facts.peer_access for facts in of.values()] == [True, False, True]
    assert (everyone.peer_access, everyone.peer_obstacle, everyone.hosts) == (False, NO_PEER_ACCESS, 2)
    assert choose_transport(everyone, 4096, torch.bfloat16.itemsize).limited_by == "group"
    assert node_facts("cuda", 2).peer_access and not node_facts("cuda", 3).peer_access


@pytest.mark.parametrize("visible", [0, 1])
def test_a_rank_that_sees_its_own_gpu_alone_leaves_it_to_the_first_use(node: Any, visible: int) -> None:
    gpus = node(visible)
    assert node_facts("cuda", 4) == GroupFacts("cuda", 4, 1) and gpus.asked == 0


def test_nothing_is_asked_of_gpus_that_are_not_in_use(node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = node(2, (0, 1))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert node_facts("cuda", 2).peer_access and gpus.asked == 0
    monkeypatch.setenv("TW_COMPILE_PEER_ACCESS", "0")
    assert node_facts("cuda", 2) == GroupFacts("cuda", 2, 1, False, SWITCHED_OFF)


def test_the_switch_leaves_peers_unused(node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = node(2)
    monkeypatch.setenv("TW_COMPILE_PEER_ACCESS", "0")
    assert peer_access_obstacle((0, 1)) == SWITCHED_OFF == "peer access is switched off (TW_COMPILE_PEER_ACCESS=0)"
    assert gpus.asked == 0
    monkeypatch.setenv("TW_COMPILE_PEER_ACCESS", "1")
    assert peer_access_obstacle((0, 1)) is None
    monkeypatch.delenv("TW_COMPILE_PEER_ACCESS")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert peer_access_obstacle((0, 1)) is None, "that is NCCL's own"


def test_ranks_take_the_answer_of_the_one_that_asks_first(node: Any, group: str) -> None:
    store = compat.default_store()
    gpus = node(2)
    assert peer_access_obstacle((0, 1)) is None
    gpus.cut_off = {(1, 0)}
    asked = gpus.asked
    assert peer_access_obstacle((1, 0)) is None and gpus.asked == asked, "asked once in a process group"
    assert "None" not in str(store.get("tw_compile/peer_access/(0, 1)")), "and told to the others"
    assert group_facts(group, "cuda").peer_access
    gpus.count = 3
    assert peer_access_obstacle((0, 1, 2)) == NO_PEER_ACCESS, "other GPUs are another question"


def test_another_process_group_asks_anew(node: Any) -> None:
    gpus = node(2)
    answers = []
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        answers.append(peer_access_obstacle((0, 1)))
        dist.destroy_process_group()
        gpus.cut_off = {(0, 1)}
    assert answers == [None, NO_PEER_ACCESS]


def test_first_use_heeds_the_switch(monkeypatch: pytest.MonkeyPatch, group: str) -> None:
    """Also where no graph was compiled by these facts, as in a benchmark of the transport alone."""
    made: list[int] = []
    monkeypatch.setattr(p2p_group, "device_uuids", lambda: ["a"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(p2p_group.compat, "symm_mem_empty", lambda nbytes, device: made.append(nbytes))
    assert p2p_group.group_obstacle(dist.group.WORLD, torch.device("cuda", 0)) is None and len(made) == 1
    monkeypatch.setenv("TW_COMPILE_PEER_ACCESS", "0")
    assert p2p_group.group_obstacle(dist.group.WORLD, torch.device("cuda", 0)) == f"rank 0: {SWITCHED_OFF}"
    assert len(made) == 1, "no symmetric memory is made"


def test_compiled_graphs_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_process_group(2):
        before = TWCompilePass(Config()).uuid()
        monkeypatch.setenv("TW_COMPILE_PEER_ACCESS", "0")
        assert TWCompilePass(Config()).uuid() != before


@pytest.mark.parametrize("cut_off", [(), ((2, 0),)])
def test_the_node_of_the_gate_is_the_hardware(
    node: Any, monkeypatch: pytest.MonkeyPatch, cut_off: tuple[tuple[int, int], ...]
) -> None:
    """Hosts' all_reduces know nothing of our switch."""
    node(3, *cut_off)
    monkeypatch.setenv("TW_COMPILE_PEER_ACCESS", "0")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(current.compat, "multicast_support", lambda device: False)
    assert current.current_node() == Node((8, 9), False, peer_access=not cut_off, peer_atomics=not cut_off)
    with fake_process_group(2):
        assert "LOCAL_WORLD_SIZE" not in os.environ
        assert current.current_node().peer_access, "rank 2 is not there"


def test_hosts_all_reduces_use_a_link_without_atomics_and_our_kernels_do_not(
    node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    node(2).plain = {(0, 1), (1, 0)}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(current.compat, "multicast_support", lambda device: False)
    here = current.current_node()
    assert here == Node((8, 9), False, peer_atomics=False) and here.peer_access and not here.peer_kernels
