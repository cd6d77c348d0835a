"""Calls whose rows a GEMM is fed, from start to wait: which are, what is launched, what becomes of those that none is fed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from machine_code import MEMORY_ACCESSES, MEMORY_BARRIERS, instructions, ptx_with, resources, smallest_loop_with

from tw_compile.kernels.algorithms import row_kernel
from tw_compile.kernels.algorithms.push.fed_push import FedPush
from tw_compile.kernels.collective import fed_mm, ops
from tw_compile.kernels.collective.fed_mm import fed_gated_mm, fed_joint_mm
from tw_compile.kernels.collective.slot import GroupState, Slot, SymmetricBuffer, state_words
from tw_compile.kernels.collective.spec import FP8, NormSpec, Request, row_range
from tw_compile.kernels.collective.transport import Started, Transport, instances
from tw_compile.kernels.gemm import fed, joint_mm
from tw_compile.kernels.gemm.joint_mm import Form, fed_mm_program
from tw_compile.kernels.transports import p2p, slot_transport
from tw_compile.kernels.transports.selection import Selector
from tw_compile.planning.joint_tiles import WIDTHS
from tw_compile.testing import fake_process_group

RANKS, TOKENS, HIDDEN, FROM = 2, 6, 64, 4
BF16 = torch.bfloat16
DEVICE = torch.device("cpu")


class Device:
    """What is launched, by name: the parameters as they were then."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, dict[str, Any]]] = []

    def kernel(self, name: str) -> SimpleNamespace:
        def launch(params: Any, **options: Any) -> None:
            fields = [field for field, *_ in params._fields_]
            self.launches.append((name, {field: getattr(params, field) for field in fields} | options))

        return SimpleNamespace(launch=launch)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.launches]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    stream = SimpleNamespace(cuda_stream=1)
    monkeypatch.setattr(row_kernel, "prepare", lambda program, index: made.kernel(program.source.stem))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(slot_transport.compat, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: DEVICE.index)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(joint_mm, "multiplies", lambda a, matrices, biases=(): True)
    monkeypatch.setattr(joint_mm, "tensor_map", lambda *_: (0,) * 16)
    monkeypatch.setattr(joint_mm, "sms_of", lambda device: 132)
    kernels = {width: made.kernel("fed gemm") for width in WIDTHS}
    monkeypatch.setattr(joint_mm, "fed_kernels", lambda device, form, spin_limit: kernels)
    monkeypatch.setattr("tw_compile.kernels.runtime.wgmma.torch.cuda.get_device_capability", lambda device=None: (9, 0))
    return made


@pytest.fixture
def slot(device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slot]:
    """Of a group of ranks of which this is rank 1; it has all memory."""
    with fake_process_group(RANKS):
        ops.in_flight.clear()
        ops.completed_early.clear()
        transport = p2p.P2PTransport("p2p")
        group = slot_transport.compat.resolve_process_group("0")
        state = GroupState("0", group, DEVICE, 1, RANKS, Selector())
        buffers = {name: buffer(name) for name in ("inbox", "fed", "x", "hidden", "residual")}
        state.slots[0] = Slot(buffer("pads"), torch.zeros(32), torch.zeros(4, 8), buffers)
        transport.states["0", DEVICE] = state
        monkeypatch.setitem(instances, "p2p", transport)
        yield state.slots[0]
        ops.in_flight.clear()


def buffer(name: str) -> SymmetricBuffer:
    nbytes = 2**18
    words = torch.zeros(state_words(name), dtype=torch.int32)
    return SymmetricBuffer(
        torch.zeros(nbytes, dtype=torch.uint8), None, torch.zeros(3, dtype=torch.int64), nbytes, words
    )


def start(tokens: int = TOKENS, feed_from: int = FROM) -> tuple[torch.Tensor, torch.Tensor]:
    x, weight = torch.randn(tokens, HIDDEN).to(BF16), torch.randn(HIDDEN).to(BF16)
    rest = (None, None, weight, 1e-5, 0.0, None, BF16, torch.float32, False, "sharded", "0", "p2p", 0)
    started: tuple[torch.Tensor, torch.Tensor] = ops.start.direct(x, *rest, feed_from=feed_from)  # type: ignore[attr-defined]
    return started


def wait(hidden: torch.Tensor, residual: torch.Tensor) -> None:
    ops.wait_.direct(hidden, residual, [], "0", 0)  # type: ignore[attr-defined]


def matrices(count: int = 2) -> list[torch.Tensor]:
    return [torch.randn(24, HIDDEN).to(BF16).t() for _ in range(count)]


@pytest.mark.parametrize("again", [False, True], ids=["first", "known form"])
@pytest.mark.parametrize("gated", [False, True])
def test_the_gemm_gets_rows_in_the_slot_and_nothing_is_copied(
    slot: Slot, device: Device, gated: bool, again: bool
) -> None:
    if again:
        outputs = start()
        fed_joint_mm.direct(outputs[0], matrices(), [], [], "0", 0)  # type: ignore[attr-defined]
        wait(*outputs)
        device.launches.clear()
    hidden, residual = start()
    factors = matrices()
    if gated:
        product = fed_gated_mm.direct(hidden, *factors, [], "0", 0)  # type: ignore[attr-defined]
        assert product.shape == (TOKENS, 24)
    else:
        products = fed_joint_mm.direct(hidden, factors, [], [], "0", 0)  # type: ignore[attr-defined]
        assert [one.shape for one in products] == [(TOKENS, 24)] * 2
    wait(hidden, residual)
    assert device.names == ["push", "fed gemm"] and not ops.in_flight and not ops.completed_early
    (_, made), (_, read) = device.launches
    memory = slot.buffers["fed"]
    assert memory.state is not None
    assert made["hidden"] == memory.tensor.data_ptr() + fed.ROWS_OFFSET != hidden.data_ptr()
    assert made["fed"] == read["fed"].state == memory.state.data_ptr()
    assert read["fed"].memory == memory.table.data_ptr() and read["fed"].status == slot.status.data_ptr()
    assert (read["fed"].rank, read["fed"].world, read["rows"], read["depth"]) == (1, RANKS, TOKENS, HIDDEN)


def test_a_call_that_no_gemm_was_fed_is_complete_behind_its_wait(slot: Slot, device: Device) -> None:
    """By a GEMM of few columns that nobody reads, and a copy of the rows."""
    hidden, residual = start()
    rows = fed.rows_in(slot.buffers["fed"].tensor, TOKENS, HIDDEN)
    rows.fill_(3)
    wait(hidden, residual)
    assert device.names == ["push", "fed gemm"] and device.launches[1][1]["columns"][0] == 8
    assert bool((hidden == 3).all()) and not ops.in_flight


def test_the_next_start_completes_a_call_that_is_fed_later(slot: Slot, device: Device) -> None:
    first = start()
    slot.buffers["fed"].tensor.fill_(1)
    second = start()
    assert device.names == ["push", "fed gemm", "push"]
    (product,) = fed_joint_mm.direct(first[0], matrices(1), [], [], "0", 0)  # type: ignore[attr-defined]
    assert device.names[-1] == "push", "its rows are in its own result"
    assert product.shape == (TOKENS, 24)
    wait(*first)
    wait(*second)
    assert not ops.in_flight and not ops.completed_early


def test_gemms_that_ours_cant_compute_come_behind_the_rows(
    slot: Slot, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, residual = start()
    monkeypatch.setattr(joint_mm, "multiplies", lambda a, matrices, biases=(): False)
    (factor,) = matrices(1)
    (product,) = fed_joint_mm.direct(hidden, [factor], [], [], "0", 0)  # type: ignore[attr-defined]
    assert device.names == ["push", "fed gemm"] and torch.equal(product, hidden @ factor)
    wait(hidden, residual)


def test_short_messages_are_served_as_ever(slot: Slot, device: Device) -> None:
    """Without a table that is Triton's kernel, which there is none of here."""
    state = next(iter(instances["p2p"].states.values()))  # type: ignore[attr-defined]
    assert state.selector.choose(replace(request(), feed_from=TOKENS), state).name == "push_fed"
    assert state.selector.choose(replace(request(), feed_from=TOKENS + 1), state).name != "push_fed"
    assert state.selector.choose(request(feed_from=0), state).name != "push_fed"


def request(tokens: int = TOKENS, hidden_size: int = HIDDEN, **changes: Any) -> Request:
    norm = NormSpec(1e-5, 0.0, None, changes.pop("hidden_dtype", BF16), torch.float32)
    x = torch.empty(tokens, hidden_size, dtype=BF16)
    made = Request(x, None, None, None, norm, False, "sharded", "0", 0, feed_from=FROM)
    return replace(made, **changes)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"feed_from": 0}, "no GEMM is fed"),
        ({"tokens": FROM - 1}, "no GEMM is fed"),
        ({"overlap_sms": 8}, "beside other work"),
        ({"tokens": fed.MOST_ROWS + 1}, "more than 65536"),
        ({"tokens": 40_000, "hidden_size": 16384}, "several launches"),
        ({"hidden_dtype": FP8}, "rows of bfloat16"),
        ({"wire": "int8"}, "rows of bfloat16"),
        ({"residual_out": "replicated"}, "all ranks want all rows"),
        ({"hidden_size": 72}, "not a multiple of 64"),
    ],
)
def test_what_is_not_fed(slot: Slot, changes: dict[str, Any], why: str) -> None:
    state: Any = SimpleNamespace(world_size=RANKS, rank=0, device=DEVICE)
    with torch.device("meta"):
        asked = request(**changes)
    assert why in (FedPush().obstacle(asked, state) or "")
    assert FedPush().obstacle(request(), state) is None


def test_other_devices_are_not_fed(slot: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    from tw_compile.kernels.algorithms.push import fed_push

    monkeypatch.setattr(fed_push, "has_instructions", lambda device: False)
    state: Any = SimpleNamespace(world_size=RANKS, rank=0, device=DEVICE)
    assert "on this device" in (FedPush().obstacle(request(), state) or "")


def test_an_inbox_has_room_for_sums_alone() -> None:
    needs = FedPush().needs(request(), RANKS)
    assert needs == {"inbox": 3 * (TOKENS // RANKS * HIDDEN * 2 + 128), "fed": fed.ROWS_OFFSET + TOKENS * HIDDEN * 2}


def test_what_fed_calls_need_is_loaded_before_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not while a CUDA graph is captured."""
    loaded: list[str] = []
    monkeypatch.setattr(fed_mm, "_loaded", set())
    monkeypatch.setattr(fed_mm, "has_instructions", lambda device: True)
    monkeypatch.setattr(joint_mm, "fed_kernels", lambda device, form, spin_limit: loaded.append(form))
    capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    cuda = torch.device("cuda", 0)
    fed_mm._load(cuda, "gated")
    assert loaded == []
    capturing[0] = False
    for _ in range(2):
        fed_mm._load(cuda, "gated")
        fed_mm._load(torch.device("cpu"), "plain")
    assert loaded == ["gated"]


@given(st.integers(1, 5000), st.integers(2, 8), st.data())
def test_pairs_of_one_rank_alone_come_first(rows: int, world_size: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, world_size - 1))
    begin, end = row_range(rows, world_size, rank)
    high = (rows + 127) // 256
    alone = [pair for pair in range(high) if begin <= 256 * pair and min(256 * (pair + 1), rows) <= end and begin < end]
    first, own = fed.own_pairs(rows, begin, end)
    assert list(range(first, first + own)) == alone
    assert first >= 0 and first + own <= high


@given(st.integers(64, 2**20).map(lambda row_bytes: row_bytes // 16 * 16))
def test_chunks_divide_blocks_and_are_no_longer_than_they_may_be(row_bytes: int) -> None:
    rows = fed.rows_of_a_chunk(row_bytes)
    assert fed._BLOCK_ROWS % rows == 0
    assert rows == 1 or rows * row_bytes <= fed._CHUNK_BYTES
    assert rows == fed._BLOCK_ROWS or 2 * rows * row_bytes > fed._CHUNK_BYTES


@pytest.mark.parametrize(("world_size", "clusters", "senders"), [(2, 66, 3), (2, 2, 2), (4, 66, 5), (4, 1, 1)])
def test_no_more_clusters_send_than_there_are(world_size: int, clusters: int, senders: int) -> None:
    rows = torch.empty(512, HIDDEN, dtype=BF16)
    words = torch.zeros(8, dtype=torch.int64)
    params = fed.FedRows(rows, words, words, words, 0, world_size, 0, 256, 0).params(clusters)
    assert (params.senders, params.chunk) == (senders, 128)


# --- the kernel ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
def test_the_host_knows_the_kernels_sizes(tmp_path: Path, width: int) -> None:
    facts = {
        "FED_BLOCK * FED_BLOCKS": fed.MOST_ROWS,
        "FED_ROWS": fed.ROWS_OFFSET,
        "sizeof(FedState)": 4 * fed.STATE_WORDS,
        "sizeof(FedParams)": 64,
        "sizeof(Shared)": joint_mm.shared_bytes(width) + fed.SHARED_BYTES,
        "FED_BLOCK": fed._BLOCK_ROWS,
    }
    ptx_with(fed_mm_program(width, "plain", 0), tmp_path, *(f"{name} == {value}" for name, value in facts.items()))


@pytest.mark.full
@pytest.mark.parametrize(("width", "form"), [(256, "gated"), (224, "plain"), (192, "biased"), (160, "biased")])
def test_the_main_loops_wait_for_no_memory(tmp_path: Path, width: int, form: Form) -> None:
    """What a fed GEMM does besides is outside of them."""
    code = instructions(fed_mm_program(width, form, 0).cubin(), tmp_path)
    for columns in (width, width // 2):
        loop = smallest_loop_with(code, f"HGMMA.64x{columns}x16.F32.BF16", 4)
        assert not [text for text in loop if MEMORY_BARRIERS.search(text) or MEMORY_ACCESSES.search(text)]


@pytest.mark.full
@pytest.mark.parametrize(("width", "form"), [(256, "gated"), (224, "plain"), (192, "biased"), (160, "biased")])
def test_sums_and_rows_that_are_sent_stay_in_registers(tmp_path: Path, width: int, form: Form) -> None:
    cubin = fed_mm_program(width, form, 0).cubin()
    found = resources(cubin, tmp_path)
    assert found["STACK"] == found["LOCAL"] == 0
    assert not [text for text in instructions(cubin, tmp_path).values() if re.search(r"\b(LDL|STL)\b", text)]


class SameAddress(Transport):
    """Its outputs are where those of the call before were, as an allocator gives freed memory away again."""

    memory = torch.empty(TOKENS, HIDDEN)

    def start(self, request: Request) -> Started:
        hidden = self.memory.view(TOKENS, HIDDEN).fill_(torch.nan)
        return Started(hidden, hidden[:0], lambda: hidden.copy_(request.x))


def test_a_gemm_waits_for_its_call_though_an_abandoned_one_had_that_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "in_flight", {})
    monkeypatch.setattr(ops, "completed_early", set())
    monkeypatch.setitem(instances, "gloo", SameAddress())
    x, matrix = torch.randn(TOKENS, HIDDEN), torch.randn(HIDDEN, 8)
    rest = (None, None, None, 1e-5, 0.0, None, x.dtype, x.dtype, False, "none", "0", "gloo", 0)
    with fake_process_group(RANKS):
        ops.start(x, *rest, feed_from=FROM)  # the step fails here, before fed_joint_mm and wait_
        hidden, residual = ops.start(x, *rest, feed_from=FROM)  # the next step
        (product,) = fed_joint_mm(hidden, [matrix], [], [], "0", 0)
        ops.wait_(hidden, residual, [], "0", 0)
    assert torch.equal(product, x @ matrix)
