"""Calls by copy engines through host memory, without a GPU: streams are queues, and ranks are in one process.

The launches are the real ones. What they enqueue runs here in many orders: streams side by side in a random order, or all of a
rank's streams one behind the other, as a driver may lay them out.
"""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_algorithms import kernels

from tw_compile.kernels.algorithms.host import host_copied
from tw_compile.kernels.algorithms.host.host_copied import Cuts, HostCopied, Lane, Part, Places, cuts_for
from tw_compile.kernels.collective.reference import add_rms_norm
from tw_compile.kernels.collective.slot import PIECES, Slot, SymmetricBuffer
from tw_compile.kernels.collective.spec import (
    FP8,
    NormSpec,
    Request,
    ResidualOut,
    row_range,
    rows_per_rank,
    scales_of,
)
from tw_compile.kernels.runtime import bindings

__all__ = ["kernels"]
BF16, FP32 = torch.bfloat16, torch.float32
HIDDEN = 64
ROW = HIDDEN * 2
DEVICE = torch.device("cpu")


class Stuck(Exception):
    """No stream can go on, and something is left to do."""


@dataclass
class Step:
    """``ready``: whether the stream can do it. ``earlier``: the steps that must be done before, besides the stream's own.

    ``moves``: it moves or computes rows. Ranks may have different numbers of such steps.
    """

    do: Callable[[], object] = lambda: None
    ready: Callable[[], bool] = lambda: True
    earlier: list[Step] = field(default_factory=list)
    moves: bool = False
    done: bool = False


class FakeStream:
    def __init__(self, handle: int) -> None:
        self.cuda_stream, self.steps = handle, list[Step]()

    def add(self, **named: Any) -> Step:
        self.steps.append(Step(**named))
        return self.steps[-1]

    def record_event(self) -> Step:
        return self.add()

    def wait_event(self, event: Step) -> None:
        self.add(earlier=[event])

    def wait_stream(self, other: FakeStream) -> None:
        self.wait_event(other.record_event())


class Machine:
    """The streams of all ranks, and a driver that enqueues on them."""

    CUstreamBatchMemOpType = SimpleNamespace(
        CU_STREAM_MEM_OP_WRITE_VALUE_32="write", CU_STREAM_MEM_OP_WAIT_VALUE_32="wait"
    )

    def __init__(self, world_size: int, ring: int, piece_bytes: int) -> None:
        self.streams: dict[int, FakeStream] = {}
        self.of_rank: list[dict[Any, FakeStream]] = [{} for _ in range(world_size)]
        self.rank = 0
        self.algorithm = HostCopied(piece_bytes, ring)
        self._handles = count(1)
        self._parts: dict[int, list[torch.Tensor]] = {}
        self._nbytes = Places.nbytes(world_size, ring, piece_bytes)

    def stream(self, key: Any) -> FakeStream:
        """A stream of the rank whose turn it is."""
        there = self.of_rank[self.rank]
        if key not in there:
            there[key] = FakeStream(next(self._handles))
            self.streams[there[key].cuda_stream] = there[key]
        return there[key]

    def slot(self, index: int) -> Slot:
        parts = self._parts.setdefault(
            index, [torch.zeros(self._nbytes, dtype=torch.uint8) for _ in range(len(self.of_rank))]
        )
        addresses = [part.data_ptr() for part in parts]
        buffer = SymmetricBuffer(parts[self.rank], None, torch.zeros(0), self._nbytes, None, addresses)
        return Slot(buffer, torch.zeros(1), torch.zeros(1, 8), {PIECES: buffer})

    def launch(self, requests: Sequence[Request]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Enqueue a call on all ranks."""
        results = []
        for self.rank, request in enumerate(requests):
            state: Any = SimpleNamespace(rank=self.rank, world_size=len(requests), device=DEVICE)
            started = self.algorithm.launch(request, state, self.slot(request.slot), 0)
            results.append((started.hidden, started.residual))
        return results

    # --- the driver

    def CUstreamBatchMemOpParams(self) -> Any:
        return SimpleNamespace(writeValue=SimpleNamespace(), waitValue=SimpleNamespace())

    def cuStreamBatchMemOp(self, stream: int, number: int, operations: list[Any], flags: int) -> tuple[int]:
        assert (len(operations), flags) == (number, 0)
        for each in operations:
            part = each.writeValue if each.operation == "write" else each.waitValue
            word = ctypes.c_int32.from_address(part.address)
            if each.operation == "write":
                self.streams[stream].add(do=lambda word=word, value=part.value: setattr(word, "value", value))
            else:
                assert part.flags == 1, "equal"
                self.streams[stream].add(ready=lambda word=word, value=part.value: word.value == value)
        return (0,)

    def cuMemcpyAsync(self, target: int, source: int, nbytes: int, stream: int) -> tuple[int]:
        self.streams[stream].add(do=lambda: ctypes.memmove(target, source, nbytes), moves=True)
        return (0,)

    # --- orders

    def run_side_by_side(self, seed: int) -> None:
        """Every stream goes on when it can, in a random order."""
        streams = [stream for there in self.of_rank for stream in there.values()]
        _run([stream.steps for stream in streams], random.Random(seed))
        for stream in streams:
            stream.steps.clear()

    def run_one_behind_the_other(self, seed: int) -> None:
        """Each rank does its steps in one order, which all ranks have, and which may be any that the events allow."""
        lines = []
        for there in self.of_rank:
            line: list[Step] = []
            _run([stream.steps for stream in there.values()], random.Random(seed), line)
            lines.append(line)
            for stream in there.values():
                stream.steps.clear()
        _run(lines, random.Random(seed))


def _run(queues: Sequence[list[Step]], chance: random.Random, line: list[Step] | None = None) -> None:
    """Empty the queues. With ``line``, only note the order there, in which no word is awaited."""
    noted: set[int] = set()
    waiting = [list(queue) for queue in queues]
    while any(waiting):
        able = [
            queue
            for queue in waiting
            if queue
            and all(each.done or id(each) in noted for each in queue[0].earlier)
            and (line is not None or queue[0].ready())
        ]
        if not able:
            raise Stuck
        queue = chance.choice(able)
        step = queue.pop(0)
        if line is None:
            step.do()
            step.done = True
            continue
        line.append(step)
        while queue and queue[0].moves:  # right behind, so that the order of the others is that of other ranks
            line.append(queue.pop(0))
        noted.update(map(id, line))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Machine]]:
    """Makes the machine on which everything runs from then on."""
    there: list[Machine] = []

    def norm(reduced: torch.Tensor, *operands: Any) -> None:
        residual, bias, weight, spec, hidden, kept, hidden_scale, norm_bias, scales, arrived, rank = operands

        def compute() -> None:
            parts = [*arrived[:rank], reduced, *arrived[rank:]]
            total = torch.zeros(reduced.shape)
            for part in parts:
                total += part.float()
            rows, sums = add_rms_norm(total, residual, bias, weight, spec, hidden_scale, norm_bias)
            hidden.copy_(rows)
            if kept is not None:
                kept.copy_(sums)
            if scales is not None:
                scales.copy_(scales_of(rows, spec.scale_columns))

        there[-1].stream("current").add(do=compute, moves=True)

    kept: list[object] = []  # a GPU's memory is reused in the order of a stream, and here it is when the launch returns
    enqueue = host_copied._Call.enqueue
    monkeypatch.setattr(host_copied._Call, "enqueue", lambda self: (kept.append(self), enqueue(self)))
    monkeypatch.setattr(host_copied, "load", lambda path: norm)
    monkeypatch.setattr(bindings, "load", lambda module: there[-1])
    monkeypatch.setattr(host_copied.compat, "current_stream", lambda device: there[-1].stream("current"))
    monkeypatch.setattr(
        host_copied, "lane_streams", lambda device, slot: tuple(there[-1].stream((slot, way)) for way in ("out", "in"))
    )

    def make(world_size: int = 2, ring: int = 2, piece_bytes: int = 4 * ROW) -> Machine:
        there.append(Machine(world_size, ring, piece_bytes))
        return there[-1]

    yield make


def requests(
    world_size: int,
    tokens: int,
    seed: int = 0,
    slot: int = 0,
    *,
    residual: str = "sharded",
    residual_out: ResidualOut = "sharded",
    **norm: Any,
) -> list[Request]:
    torch.manual_seed(seed)
    spec = NormSpec(1e-5, 0.0, BF16, **{"hidden_dtype": BF16, "residual_dtype": BF16} | norm)
    whole, weight, bias = torch.randn(tokens, HIDDEN).bfloat16(), torch.randn(HIDDEN).bfloat16(), torch.randn(HIDDEN)
    per_rank = rows_per_rank(tokens, world_size)
    made = []
    for rank in range(world_size):
        begin, end = row_range(tokens, world_size, rank)
        own = torch.zeros(per_rank, HIDDEN, dtype=BF16)
        own[: end - begin] = whole[begin:end]
        held = {"sharded": own, "whole": whole, "none": None}[residual]
        made.append(
            Request(
                torch.randn(tokens, HIDDEN).bfloat16(),
                held,
                bias,
                weight,
                spec,
                residual == "sharded",
                residual_out,
                "group",
                slot,
                torch.full((1,), 0.03) if spec.hidden_dtype == FP8 and not spec.scale_columns else None,
            )
        )
    return made


def expect_right(asked: Sequence[Request], results: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """All rows of all ranks have the bits of the reference."""
    first, world_size, tokens = asked[0], len(asked), len(asked[0].x)
    whole = first.residual
    if first.residual_sharded:
        shards = [request.residual for request in asked]
        assert all(shard is not None for shard in shards)
        whole = torch.cat([shard for shard in shards if shard is not None])[:tokens]
    total = torch.zeros(tokens, HIDDEN)
    for request in asked:
        total += request.x.float()
    rows, sums = add_rms_norm(total, whole, first.bias, first.weight, first.norm, first.hidden_scale, None)
    columns = first.norm.scale_columns
    for rank, (hidden, residual) in enumerate(results):
        assert torch.equal(hidden.float(), rows.float()), f"rank {rank}"
        if columns:
            assert torch.equal(scales_of(hidden, columns), scales_of(rows, columns)), f"rank {rank}"
        begin, end = row_range(tokens, world_size, rank)
        want = {"none": sums[:0], "sharded": sums[begin:end], "replicated": sums}[first.residual_out]
        assert torch.equal(residual[: len(want)], want), f"rank {rank}"


FORMS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "first": {"residual": "whole"},
    "nothing kept": {"residual": "none", "residual_out": "none"},
    "replicated": {"residual": "whole", "residual_out": "replicated", "residual_dtype": FP32},
    "float8": {"hidden_dtype": FP8},
    "float8 with scales": {"hidden_dtype": FP8, "scale_columns": HIDDEN, "residual_out": "replicated"},
}
ORDERS = ("run_side_by_side", "run_one_behind_the_other")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("world_size", "tokens"), [(2, 1), (2, 33), (3, 2), (3, 64), (4, 41), (8, 130)])
def test_every_rank_gets_every_row(
    machine: Callable[..., Machine], world_size: int, tokens: int, form: str, order: str
) -> None:
    there = machine(world_size, piece_bytes=16 * ROW if form == "replicated" else 4 * ROW)
    for seed in range(3):
        asked = requests(world_size, tokens, seed, **FORMS[form])
        results = there.launch(asked)
        getattr(there, order)(seed)
        expect_right(asked, results)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ring", [1, 2, 4])
def test_calls_of_other_sizes_and_forms_follow_each_other_on_two_slots(
    machine: Callable[..., Machine], ring: int, order: str
) -> None:
    there = machine(3, ring)
    for seed in range(5):
        made = []
        for number, (form, tokens) in enumerate((("sharded", 40), ("float8", 5), ("first", 77), ("sharded", 1))):
            asked = requests(3, tokens, 10 * seed + number, slot=number % 2, **FORMS[form])
            made.append((asked, there.launch(asked)))
        getattr(there, order)(seed)
        for asked, results in made:
            expect_right(asked, results)


def test_two_slots_are_side_by_side(machine: Callable[..., Machine]) -> None:
    """Each has streams of its own, so a call's copies need not wait for the other call's ranks."""
    there = machine()
    for slot in range(2):
        there.launch(requests(2, 8, slot=slot))
    assert [len(streams) for streams in there.of_rank] == [5, 5]


def broken(monkeypatch: pytest.MonkeyPatch, machine: Callable[..., Machine], seeds: int, order: str) -> set[str]:
    """What comes of calls over a ring of one place, in many orders: "stuck", "wrong" or "right"."""
    found = set()
    for seed in range(seeds):
        there = machine(2, ring=1)
        made = [(asked, there.launch(asked)) for asked in (requests(2, 40, seed), requests(2, 23, seed + 1))]
        try:
            getattr(there, order)(seed)
            for asked, results in made:
                expect_right(asked, results)
            found.add("right")
        except Stuck:
            found.add("stuck")
        except AssertionError:
            found.add("wrong")
    return found


@pytest.mark.parametrize(("awaited", "found"), [("full", "stuck"), ("free", "wrong")])
def test_without_waiting_for_a_free_place_a_word_is_lost_and_without_waiting_for_rows_results_are_wrong(
    monkeypatch: pytest.MonkeyPatch, machine: Callable[..., Machine], awaited: str, found: str
) -> None:
    """``awaited``: what is still waited for."""
    wait = Lane.wait

    def wait_for_one(self: Lane, words: Sequence[int], value: int, owners: Sequence[int]) -> None:
        if bool(value) is (awaited == "full"):
            wait(self, words, value, owners)

    monkeypatch.setattr(Lane, "wait", wait_for_one)
    assert found in broken(monkeypatch, machine, 20, "run_side_by_side")


@pytest.mark.parametrize("way", ["out", "in"])
def test_without_the_events_between_the_lanes_ranks_wait_for_each_other_for_ever(
    monkeypatch: pytest.MonkeyPatch, machine: Callable[..., Machine], way: str
) -> None:
    """Only where streams are one behind the other. ``way``: the lane that does not wait for the other lane's events."""
    original = FakeStream.wait_event

    def wait_event(self: FakeStream, event: Step) -> None:
        there = next(machines[-1].of_rank[machines[-1].rank][key] for key in [(0, "in" if way == "out" else "out")])
        lane = machines[-1].of_rank[machines[-1].rank][(0, way)]
        if self is lane and event in there.steps:
            return
        original(self, event)

    machines: list[Machine] = []
    real = machine

    def make(*arguments: Any, **named: Any) -> Machine:
        machines.append(real(*arguments, **named))
        return machines[-1]

    assert broken(monkeypatch, make, 20, "run_one_behind_the_other") == {"right"}
    monkeypatch.setattr(FakeStream, "wait_event", wait_event)
    assert "stuck" in broken(monkeypatch, make, 20, "run_one_behind_the_other")
    assert broken(monkeypatch, make, 20, "run_side_by_side") == {"right"}


def test_pieces_are_all_rows_of_an_owner_once() -> None:
    for tokens, world_size in ((1, 2), (7, 4), (1024, 2), (4095, 8)):
        cuts = cuts_for(tokens, world_size, 8192)
        assert all(1 <= len(cuts.piece(0, index)) <= cuts.rows for index in range(cuts.count))
        for owner in range(world_size):
            rows = [row for index in range(cuts.count) for row in cuts.piece(owner, index)]
            assert rows == list(range(*row_range(tokens, world_size, owner)))


@pytest.mark.parametrize(
    ("tokens", "pieces", "rows"), [(2, 1, 16), (64, 2, 16), (512, 4, 64), (1024, 4, 128), (2048, 8, 128)]
)
def test_a_message_has_four_pieces_unless_they_were_too_short_or_too_long(tokens: int, pieces: int, rows: int) -> None:
    cuts = cuts_for(tokens, 2, 8192)
    assert (cuts.count, cuts.rows) == (pieces, rows)
    assert Cuts(tokens, 2, rows) == cuts


def test_places_and_words_do_not_overlap_and_all_readers_find_the_results() -> None:
    places = Places([10**6, 2 * 10**7, 3 * 10**8], ring=2, piece_bytes=1000)
    end = places.addresses[1] + Places.nbytes(3, 2, 1000)
    words = {
        places.word(1, leg, reader, index): (leg, reader, index)
        for leg in (0, 1)
        for reader in (0, 2)
        for index in (0, 1)
    }
    sums = {places.place(1, 0, reader, index) for reader in (0, 2) for index in (0, 1)}
    results = {places.place(1, 1, reader, index) for reader in (0, 2) for index in (0, 1)}
    assert len(words) == 8 and len(sums) == 4 and len(results) == 2 and not sums & results
    begins = sorted(sums | results)
    assert all(later - earlier >= 1000 for earlier, later in pairwise(begins))
    assert max(words) + 4 <= begins[0] and begins[-1] + 1000 <= end
    assert places.place(1, 0, 2, 3) == places.place(1, 0, 2, 1), "the ring begins anew"


def test_a_part_knows_the_bytes_of_a_piece() -> None:
    rows = torch.zeros(6, 4, dtype=BF16)
    assert Part(rows, first=10).of(range(12, 15)) == (rows.data_ptr() + 2 * 8, 24)


def test_what_it_cannot_serve_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, kernels: object) -> None:
    monkeypatch.setattr(host_copied, "streams_await_words", lambda device: able)
    state: Any = SimpleNamespace(rank=0, world_size=2, device=DEVICE)
    (asked, _), able = requests(2, 4), True
    assert HostCopied().obstacle(asked, state) is None
    assert "longer than a piece of 100 bytes" in str(HostCopied(100).obstacle(asked, state))
    able = False
    assert "no stream wait for words" in str(HostCopied().obstacle(asked, state))


def test_memory_does_not_grow_with_the_message() -> None:
    algorithm = HostCopied()
    small, large = (algorithm.needs(requests(2, tokens)[0], 2) for tokens in (1, 500))
    assert small == large == {PIECES: Places.nbytes(2, host_copied.RING, host_copied.PIECE_BYTES)}


def test_in_debug_mode_a_kernel_waits_and_reports_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments, **named: launched.append((grid, arguments, named))

    monkeypatch.setattr(host_copied, "await_word", Kernel())
    monkeypatch.setattr(torch.cuda, "stream", _Nothing)
    report = torch.zeros(8, dtype=torch.int32)
    Lane(FakeStream(3), report, 77).wait([800, 900], 1, [2, 5])  # type: ignore[arg-type]
    for (grid, arguments, named), word, owner in zip(launched, (800, 900), (2, 5), strict=True):
        assert grid == (1,) and arguments[:2] == (word, 1) and arguments[3] == 2 and named["SPIN_LIMIT"] == 77
        assert arguments[2].data_ptr() == report.data_ptr() + 4 * owner


class _Nothing:
    def __init__(self, stream: object) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


SUMS_IN_THE_INTERPRETER = """
import torch
from tw_compile.kernels.collective.norm_kernel import add_rms_norm_cuda
from tw_compile.kernels.collective.reference import add_rms_norm
from tw_compile.kernels.collective.spec import NormSpec

norm = NormSpec(1e-5, 0.0, None, torch.float32, torch.float32)
for world_size in (2, 3, 8):
    parts = torch.randn(world_size, 5, 104) * 10.0 ** torch.arange(world_size)[:, None, None].remainder(4)
    residual, weight, total = torch.randn(5, 104), torch.randn(104), torch.zeros(5, 104)
    for part in parts:
        total += part
    want_hidden, want_h = add_rms_norm(total, residual, None, weight, norm)
    for rank in range(world_size):
        arrived = torch.full((world_size - 1, 9, 104), float("nan"))  # of all the rank's rows, and these are some of them
        arrived[:, 2:7] = torch.cat([parts[:rank], parts[rank + 1 :]])
        hidden, h = torch.empty(5, 104), torch.empty(5, 104)
        operands = (parts[rank], residual, None, weight, norm, hidden, h, None, None, None)
        add_rms_norm_cuda(*operands, arrived[:, 2:7], rank)
        assert torch.equal(h, want_h), (world_size, rank)
        torch.testing.assert_close(hidden, want_hidden)
print("same")
"""


def test_partial_sums_are_added_in_rank_order_on_every_rank() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SUMS_IN_THE_INTERPRETER],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout == "same\n", done.stderr


@pytest.mark.parametrize("arch", [75, 90, 120])
def test_the_kernel_that_waits_compiles_and_acquires_at_system_scope(arch: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from tw_compile.kernels.runtime.await_word import await_word

    types = {"word": "i64", "value": "i32", "report": "*i32", "number": "i32", "SPIN_LIMIT": "constexpr"}
    source = ASTSource(await_word, types, {"SPIN_LIMIT": 1000})
    ptx = compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 1}).asm["ptx"]
    assert ptx.count("ld.acquire.sys.global.u32") == 2 and "st.global" in ptx
