"""The transport through host memory: when it is chosen, which kernel serves a call, and what a launch is given; no GPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_algorithms import HIDDEN, RANK, WORLD_SIZE, FakeKernel, group, kernels, request

from tw_compile.kernels.algorithms.host.host_rows import HostRows, half_bytes
from tw_compile.kernels.algorithms.host.host_words import HostWords
from tw_compile.kernels.collective.slot import Slot, SymmetricBuffer, state_words
from tw_compile.kernels.collective.transports import GroupFacts, choose_transport
from tw_compile.kernels.transports.host import HostTransport
from tw_compile.kernels.transports.selection import Selector, default_steps

__all__ = ["kernels"]
BF16 = torch.bfloat16


def slot_for(needs: dict[str, int]) -> Slot:
    buffers = {
        name: SymmetricBuffer(
            torch.zeros(nbytes, dtype=torch.uint8),
            None,
            torch.zeros(WORLD_SIZE + 1, dtype=torch.int64),
            nbytes,
            torch.zeros(state_words(name), dtype=torch.int32),
        )
        for name, nbytes in needs.items()
    }
    return Slot(next(iter(buffers.values())), torch.zeros(1), torch.zeros(1), buffers)


@pytest.mark.parametrize(
    ("facts", "hidden_size", "name", "why"),
    [
        (GroupFacts("cuda", 2, 1), 4096, "p2p", "one host"),
        (GroupFacts("cuda", 2, 1, peer_access=False), 4096, "host", "no peer access between the GPUs"),
        (GroupFacts("cuda", 8, 1, peer_access=False), 4096, "host", "no peer access between the GPUs"),
        (GroupFacts("cuda", 9, 1, peer_access=False), 4096, "nccl", "world_size 9"),
        (GroupFacts("cuda", 4, 2, peer_access=False), 4096, "nccl", "2 hosts"),
        (GroupFacts("cuda", 2, 1, peer_access=False), 40000, "nccl", "hidden_size 40000"),
    ],
)
def test_chosen_where_gpus_cannot_reach_each_other(facts: GroupFacts, hidden_size: int, name: str, why: str) -> None:
    choice = choose_transport(facts, hidden_size, BF16.itemsize)
    assert choice.name == name and why in choice.reason


def test_rows_of_half_vectors_are_refused_by_name() -> None:
    choice = choose_transport(GroupFacts("cuda", 2, 1), 4100, torch.float32.itemsize, "host")
    assert choice.name is None and choice.reason == "hidden_size 4100 is not a multiple of 8"


@pytest.mark.parametrize(
    ("world_size", "nbytes", "overlap_sms", "name", "sms"),
    [
        (2, 2**14, 0, "host_words", 32),
        (2, 2**20, 0, "host_words", 32),
        (2, 2**20 + 8192, 0, "host_one_shot", 8),
        (2, 2**23, 0, "host_one_shot", 8),
        (2, 2**24, 0, "host_two_shot", 8),
        (2, 2**14, 8, "host_one_shot", 8),
        (2, 2**23, 8, "host_one_shot", 8),
        (2, 2**14, 4, "host_two_shot", 24),
        (2, 2**23, 6, "host_two_shot", 24),
        (2, 2**23 + 8192, 8, "host_two_shot", 24),
        (4, 2**14, 8, "host_two_shot", 24),
        (4, 2**18, 0, "host_words", 32),
        (4, 2**18 + 8192, 0, "host_two_shot", 8),
    ],
)
def test_which_kernel_serves_a_message_that_nobody_measured(
    monkeypatch: pytest.MonkeyPatch, world_size: int, nbytes: int, overlap_sms: int, name: str, sms: int
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 6))
    x = SimpleNamespace(nbytes=nbytes, shape=(nbytes // 8192, 4096), dtype=BF16, device="cuda:0")
    norm = SimpleNamespace(epilogue="rms_norm", hidden_dtype=BF16, scale_columns=0)
    asked: Any = SimpleNamespace(
        x=x,
        residual=None,
        bias=None,
        weight=None,
        norm_bias=None,
        norm=norm,
        residual_sharded=False,
        residual_out="sharded",
        overlap_sms=overlap_sms,
        wire="exact",
        feed_from=0,
    )
    state: Any = SimpleNamespace(world_size=world_size, rank=0)
    selector = Selector(default_steps("host", world_size), "host")
    chosen = selector.choose(asked, state)
    assert chosen.name == name and chosen.sms(10**6, world_size) == sms
    if not overlap_sms:
        assert all(one.sms(10**6, world_size) == 8 for one in selector.candidates(asked)[1:]), (
            "what serves in its place"
        )


def test_what_the_device_cannot_do_goes_through_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = HostTransport("host")
    float8 = replace(request(), norm=replace(request().norm, hidden_dtype=torch.float8_e4m3fn))
    for capability, served in (((7, 5), False), ((8, 9), True)):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device, now=capability: now)
        assert transport.serves(request())
        assert transport.serves(float8) is served


def test_words_launches_what_it_was_asked_for(kernels: list[FakeKernel]) -> None:
    asked = request(residual_sharded=False)
    algorithm = HostWords(max_sms=4)
    slot = slot_for(algorithm.needs(asked, WORLD_SIZE))
    started = algorithm.launch(asked, group(), slot, 7)
    ((params, keywords),) = kernels[0].launches
    words = slot.buffers["words"]
    assert (params.outboxes, params.state) == (words.table.data_ptr(), words.state.data_ptr())  # type: ignore[union-attr]
    assert (params.part_bytes, params.rank, params.tokens) == (words.capacity // 2, RANK, 10)
    assert params.part_bytes >= 2 * asked.x.nbytes, "each half has all words"
    assert (keywords["grid"], keywords["programmatic"], keywords["beside"]) == (4, True, False)
    assert started.hidden.shape == (10, HIDDEN)


@pytest.mark.parametrize(("overlap_sms", "cluster"), [(0, 1), (2, 2), (8, 2)])
def test_rows_launch_what_they_were_asked_for(kernels: list[FakeKernel], overlap_sms: int, cluster: int) -> None:
    asked = replace(request(400), overlap_sms=overlap_sms)
    algorithm = HostRows(False, max_sms=2)
    slot = slot_for(algorithm.needs(asked, WORLD_SIZE))
    algorithm.launch(asked, group(), slot, 7)
    ((params, keywords),) = kernels[0].launches
    outbox = slot.buffers["outbox"]
    assert params.outboxes == outbox.table.data_ptr() and params.half_bytes == half_bytes(outbox.capacity)
    assert keywords["cluster"] == cluster and keywords["beside"] is (overlap_sms > 0)
    defines = dict(kernels[0].program.defines)
    needed = defines["RING"] * (WORLD_SIZE - 1) * defines["GROUPS"] * HIDDEN * asked.x.element_size()
    assert params.half_bytes >= needed and params.half_bytes % 16 == 0
    assert keywords["block"] == defines["THREADS"] * defines["GROUPS"] + 64


@pytest.mark.parametrize(
    ("wire", "mebibytes", "overlap_sms", "cluster"),
    [
        ("exact", 8, 8, 2),
        ("int8", 8, 8, 8),
        ("int6", 8, 4, 4),
        ("int8", 8, 6, 2),
        ("int8", 7, 8, 2),
        ("int8", 8, 0, 1),
    ],
)
def test_long_calls_with_codes_are_larger_clusters_beside_other_work(
    kernels: list[FakeKernel], wire: str, mebibytes: int, overlap_sms: int, cluster: int
) -> None:
    tokens = mebibytes * 2**20 // (HIDDEN * BF16.itemsize)
    asked = replace(request(tokens), overlap_sms=overlap_sms, wire=wire)
    algorithm = HostRows(False, max_sms=24)
    algorithm.launch(asked, group(), slot_for(algorithm.needs(asked, WORLD_SIZE)), 7)
    ((_, keywords),) = kernels[0].launches
    assert (keywords["grid"], keywords["cluster"]) == (overlap_sms or 24, cluster)


def test_calls_alone_and_beside_other_work_have_kernels_of_their_own(kernels: list[FakeKernel]) -> None:
    """Words of codes gather in one of them alone, so a call has as much shared memory as its own kernel says."""
    alone = replace(request(4000), wire="int8")
    beside = replace(alone, overlap_sms=8)
    algorithm, slot = HostRows(False, max_sms=24), slot_for(HostRows(False).needs(alone, WORLD_SIZE))
    for asked in (beside, alone, beside):
        algorithm.launch(asked, group(), slot, 7)
    of_beside, of_alone = kernels
    assert [len(kernel.launches) for kernel in kernels] == [2, 1]
    for kernel in kernels:
        shared_bytes = dict(kernel.program.defines)["SHARED_BYTES"]
        assert all(keywords["shared_bytes"] == shared_bytes for _, keywords in kernel.launches)
    sums = [dict(kernel.program.defines)["SUM_WORDS"] for kernel in (of_beside, of_alone)]
    assert sums == [0, HIDDEN // 128]


def test_a_longer_message_needs_no_more_memory(kernels: list[FakeKernel]) -> None:
    short, long = request(), replace(request(), x=torch.empty(10_000, HIDDEN, dtype=BF16))
    for one_shot in (True, False):
        assert HostRows(one_shot).needs(short, 2) == HostRows(one_shot).needs(long, 2)


def test_one_shot_beside_other_work_has_room_for_all_rows(kernels: list[FakeKernel]) -> None:
    algorithm = HostRows(True)
    asked = replace(request(residual_sharded=False), overlap_sms=2)
    assert asked.residual_out == "sharded"
    slot = slot_for(algorithm.needs(asked, WORLD_SIZE))
    hidden, residual = algorithm.outputs(asked, group(), slot)
    started = algorithm.launch(replace(asked, outputs=(hidden, residual)), group(), slot, 0)
    assert residual.shape[0] == WORLD_SIZE * started.residual.shape[0] >= 10
    assert started.residual.untyped_storage().data_ptr() == residual.data_ptr()


def test_host_memory_is_none_of_the_devices() -> None:
    transport = HostTransport("host")
    state = SimpleNamespace(slots={0: slot_for({"outbox": 1000})})
    transport.states["g", torch.device("cuda", 0)] = state  # type: ignore[assignment]
    assert transport.reserved_bytes() == 0
