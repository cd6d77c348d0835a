"""Host side of the CUDA algorithms: what they refuse, what they ask for and what they launch; no GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tw_compile.kernels.algorithms import barrier_kernel, row_kernel
from tw_compile.kernels.algorithms.multimem import multimem
from tw_compile.kernels.algorithms.multimem.multimem import Multimem, MultimemParams
from tw_compile.kernels.algorithms.push import push
from tw_compile.kernels.algorithms.push.push import MOST_INBOX_BYTES, PARTS, Push, PushParams, part_bytes
from tw_compile.kernels.algorithms.stream.stream import Shape, Stream, StreamParams, shape_for
from tw_compile.kernels.algorithms.two_shot import two_shot
from tw_compile.kernels.algorithms.two_shot.two_shot import TwoShot
from tw_compile.kernels.collective.algorithm import Algorithm
from tw_compile.kernels.collective.cuda_variant import VECTOR, aligned
from tw_compile.kernels.collective.slot import GroupState, Slot, SymmetricBuffer, capacity_for
from tw_compile.kernels.collective.spec import (
    NormSpec,
    Request,
    ResidualOut,
    rows_per_rank,
    slice_of_whole_residual,
    whole_residual,
)
from tw_compile.kernels.runtime.barrier import MAX_CTAS, REPORT_ROWS
from tw_compile.kernels.transports.selection import Selector

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
WORLD_SIZE, RANK, HIDDEN = 4, 2, 64
SHARED_BYTES = 227 * 1024

EACH = pytest.mark.parametrize("make", [partial(Push, False), Stream, Multimem], ids=["push", "stream", "multimem"])
WITH_BARRIERS = pytest.mark.parametrize("make", [Stream, Multimem], ids=["stream", "multimem"])

hidden_sizes = st.integers(1, 4096).map(lambda vectors: vectors * VECTOR)
world_sizes = st.integers(2, 8)
token_counts = st.integers(1, 200)


class FakeKernel:
    """Takes notes of its launches: ``(params, keywords)``. ``program`` is what it was made from."""

    def __init__(self, program: Any) -> None:
        self.program = program
        self.launches: list[tuple[Any, dict[str, Any]]] = []

    def launch(self, params: Any, **keywords: Any) -> None:
        self.launches.append((params, keywords))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[FakeKernel]:
    """A device of compute capability 9.0, as far as algorithms look; grows with every kernel that is prepared."""
    made: list[FakeKernel] = []

    def prepare(program: Any, device: int) -> FakeKernel:
        made.append(FakeKernel(program))
        return made[-1]

    for module in (row_kernel, barrier_kernel):
        monkeypatch.setattr(module, "prepare", prepare)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=0xABC))
    return made


def request(
    tokens: int = 10,
    hidden_size: int = HIDDEN,
    dtype: torch.dtype = BF16,
    *,
    residual_out: ResidualOut = "sharded",
    residual_sharded: bool = True,
    **norm: Any,
) -> Request:
    rows = rows_per_rank(tokens, WORLD_SIZE) if residual_sharded else tokens
    spec = NormSpec(
        **{"eps": 1e-5, "weight_offset": 1.0, "cast_before_weight": None, "scale": 0.5} | norm_dtypes(dtype, norm)
    )
    return Request(
        torch.zeros(tokens, hidden_size, dtype=dtype),
        torch.zeros(rows, hidden_size, dtype=spec.residual_dtype),
        torch.zeros(hidden_size, dtype=dtype),
        torch.zeros(hidden_size, dtype=dtype),
        spec,
        residual_sharded,
        residual_out,
        "group",
        0,
        torch.ones(1) if spec.hidden_dtype == FP8 else None,
    )


def norm_dtypes(dtype: torch.dtype, norm: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_dtype": dtype, "residual_dtype": FP32} | norm


def group(multimem: bool = True) -> GroupState:
    device = torch.device("cuda", 0)
    return GroupState("group", None, device, RANK, WORLD_SIZE, Selector(), multimem)  # type: ignore[arg-type]


def slot_for(needs: dict[str, int]) -> Slot:
    def buffer(name: str, size: int) -> SymmetricBuffer:
        tensor = torch.zeros(size, dtype=torch.uint8)
        state = torch.zeros(5, dtype=torch.int32) if name == "inbox" else None
        return SymmetricBuffer(tensor, None, torch.zeros(WORLD_SIZE + 1, dtype=torch.int64), size, state)

    epochs, status = torch.zeros(MAX_CTAS, dtype=torch.int32), torch.zeros(REPORT_ROWS, 8, dtype=torch.int32)
    return Slot(buffer("pads", 1024), epochs, status, {name: buffer(name, size) for name, size in needs.items()})


def addresses(*tensors: torch.Tensor | None) -> list[int | None]:
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


# --- what they refuse ------------------------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize(
    ("asked", "capability", "reason"),
    [
        (request(), (9, 0), None),
        (request(), (10, 0), None),
        (request(), (7, 0), "the device has 7.0"),
        (request(hidden_size=68), (9, 0), "hidden_size 68 is not a multiple of 8"),
        (replace(request(), weight=torch.zeros(HIDDEN, dtype=torch.float64)), (9, 0), "dtype torch.float64"),
        (replace(request(), bias=torch.zeros(HIDDEN, dtype=FP8)), (9, 0), "dtype torch.float8_e4m3fn"),
    ],
)
def test_obstacles_of_each(
    kernels: list[FakeKernel],
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[..., Algorithm],
    asked: Request,
    capability: tuple[int, int],
    reason: str | None,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    found = make().obstacle(asked, group())
    assert found is None if reason is None else reason in str(found)


def test_obstacles_of_stream(kernels: list[FakeKernel], monkeypatch: pytest.MonkeyPatch) -> None:
    state = group()
    odd = request(hidden_size=72, hidden_dtype=FP8)
    assert "72 bytes is not a multiple of 16" in str(Stream().obstacle(odd, state))
    assert Push(False).obstacle(odd, state) is None
    assert Stream().obstacle(request(1, 18432), state) is None
    for too_long in (request(1, 20480, FP32), request(1, 32768, residual_out="none")):  # in bytes, and in threads
        assert "too long for one CTA" in str(Stream().obstacle(too_long, state))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (12, 0))
    assert "capability 12.0 has less than 232448 bytes" in str(Stream().obstacle(request(), state))
    assert Push(False).obstacle(request(), state) is None


def test_obstacles_of_multimem(kernels: list[FakeKernel]) -> None:
    odd = request(hidden_size=72, hidden_dtype=FP8)
    assert "72 bytes is not a multiple of 16" in str(Multimem().obstacle(odd, group()))
    assert "no multicast addresses" in str(Multimem().obstacle(request(), group(multimem=False)))
    assert Multimem(emulated=True).obstacle(request(), group(multimem=False)) is None
    assert Multimem().obstacle(request(1, 32768, FP32), group()) is None


def test_one_shot_needs_all_rows_of_the_residual(kernels: list[FakeKernel]) -> None:
    state, one_shot = group(), Push(True)
    assert "all rows" in str(one_shot.obstacle(request(), state))
    assert one_shot.obstacle(request(residual_sharded=False), state) is None
    whole = torch.zeros(WORLD_SIZE * rows_per_rank(10, WORLD_SIZE), HIDDEN)
    assert (
        one_shot.obstacle(replace(request(), residual=slice_of_whole_residual(whole, WORLD_SIZE, RANK)), state) is None
    )


@pytest.mark.parametrize("make", [lambda n: Push(True, n), lambda n: Push(False, n), Stream, Multimem])
def test_numbers_of_ctas_are_checked(make: Any) -> None:
    most = MAX_CTAS if make in (Stream, Multimem) else 128
    for count in (0, most + 1):
        with pytest.raises(ValueError, match=rf"max_sms: expected 1 to {most}, got {count}"):
            make(count)
    make(most)


# --- what they ask for -----------------------------------------------------------------------------------------------


@given(token_counts, world_sizes, st.integers(1, 32))
def test_a_launch_has_a_cta_for_every_row_up_to_the_limit(tokens: int, world_size: int, limit: int) -> None:
    per_rank = rows_per_rank(tokens, world_size)
    assert Push(True, limit).sms(tokens, world_size) == min(tokens, limit)
    for algorithm in (Push(False, limit), Stream(limit), Multimem(limit)):
        assert algorithm.sms(tokens, world_size) == min(per_rank, limit)


@given(
    token_counts,
    world_sizes,
    hidden_sizes,
    st.sampled_from([BF16, FP16, FP32]),
    st.sampled_from([None, FP8]),
    st.sampled_from(["none", "sharded", "replicated"]),
    st.booleans(),
)
def test_a_part_of_the_inbox_holds_all_rows_of_a_launch(
    tokens: int,
    world_size: int,
    hidden_size: int,
    dtype: torch.dtype,
    hidden_dtype: torch.dtype | None,
    residual_out: ResidualOut,
    one_shot: bool,
) -> None:
    norm = NormSpec(1e-5, 0.0, None, hidden_dtype or dtype, FP32)
    x = torch.empty(tokens, hidden_size, dtype=dtype, device="meta")
    asked = Request(x, None, None, None, norm, False, residual_out, "", 0)
    algorithm = Push(one_shot)
    needs = algorithm.needs(asked, world_size)
    assert needs["inbox"] <= MOST_INBOX_BYTES
    # As push.cu lays them out: sections by sender, each kind of row at the next multiple of 16 bytes.
    rows = algorithm.rows_of_a_launch(asked, world_size)
    assert 1 <= rows <= (tokens if one_shot else rows_per_rank(tokens, world_size))
    row_elements = [dtype.itemsize]
    if not one_shot:
        row_elements += [norm.hidden_dtype.itemsize, *([4] if residual_out == "replicated" else [])]
    end = 0
    for itemsize in row_elements:
        end = -(-(end + (world_size - 1) * rows * hidden_size * itemsize) // 16) * 16
    for capacity in (needs["inbox"], capacity_for(needs["inbox"])):
        assert part_bytes(capacity) % 128 == 0
        assert end <= part_bytes(capacity) and PARTS * part_bytes(capacity) <= capacity


def test_large_messages_are_done_in_launches_of_about_equal_size(
    kernels: list[FakeKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(residual_out="none", residual_sharded=False)  # 10 tokens on 4 ranks
    row_bytes = 3 * HIDDEN * (2 + 2)
    monkeypatch.setattr(push, "MOST_INBOX_BYTES", PARTS * (2 * row_bytes + 128))
    algorithm = Push(False)
    assert algorithm.rows_of_a_launch(asked, WORLD_SIZE) == 2
    algorithm.launch(asked, group(), slot_for(algorithm.needs(asked, WORLD_SIZE)), 0)
    launches = [(params.begin, params.end, keywords["grid"]) for params, keywords in kernels[0].launches]
    assert launches == [(0, 2, 2), (2, 3, 1)]
    monkeypatch.setattr(push, "MOST_INBOX_BYTES", PARTS * (9 * 3 * HIDDEN * 2 + 128))
    assert Push(True).rows_of_a_launch(asked, WORLD_SIZE) == 5, "not 9 and 1"


@WITH_BARRIERS
def test_kernels_with_barriers_need_a_buffer_for_each_kind_of_row(make: Callable[[], Algorithm]) -> None:
    asked = request(10, HIDDEN, hidden_dtype=FP8)
    assert make().needs(asked, WORLD_SIZE) == {"x": 10 * HIDDEN * 2, "hidden": 10 * HIDDEN}
    replicated = replace(asked, residual_out="replicated")
    assert make().needs(replicated, WORLD_SIZE)["residual"] == 10 * HIDDEN * 4


# --- residuals of which all rows are known ---------------------------------------------------------------------------


@given(token_counts, world_sizes, st.integers(1, 8).map(lambda n: 8 * n), st.sampled_from([BF16, FP32]))
def test_slice_of_a_whole_residual_is_recognised_and_nothing_else(
    tokens: int, world_size: int, hidden_size: int, dtype: torch.dtype
) -> None:
    per_rank = rows_per_rank(tokens, world_size)
    whole = torch.arange(world_size * per_rank).repeat_interleave(hidden_size).view(-1, hidden_size).to(dtype)
    larger = torch.zeros(1 + world_size * per_rank, hidden_size, dtype=dtype)
    for rank in range(world_size):
        shard = slice_of_whole_residual(whole, world_size, rank)
        assert shard.shape == (per_rank, hidden_size) and shard.is_contiguous()
        found = whole_residual(shard, tokens, world_size, rank)
        assert found is not None and found.data_ptr() == whole.data_ptr()
        assert torch.equal(found, whole[:tokens])
        begin = rank * per_rank
        others = {
            "a shard of its own": torch.zeros(per_rank, hidden_size, dtype=dtype),
            "a copy": shard.clone(),
            "the slice of another rank": slice_of_whole_residual(whole, world_size, (rank + 1) % world_size),
            "a slice of more rows": larger[begin : begin + per_rank],
            "a shifted slice": larger[begin + 1 : begin + 1 + per_rank],
        }
        for name, other in others.items():
            assert whole_residual(other, tokens, world_size, rank) is None, name


# --- what they launch ------------------------------------------------------------------------------------------------


def test_two_shot_launches_what_it_was_asked_for(kernels: list[FakeKernel]) -> None:
    algorithm, asked = Push(False, max_sms=2), request()
    slot = slot_for(algorithm.needs(asked, WORLD_SIZE))
    started = algorithm.launch(asked, group(), slot, 7)
    ((params, keywords),) = kernels[0].launches
    inbox = slot.buffers["inbox"]
    assert isinstance(params, PushParams)
    names = ("x", "residual", "bias", "weight", "hidden_scale", "hidden", "residual_out", "inboxes", "state", "status")
    assert [getattr(params, name) for name in names] == [
        *addresses(asked.x, asked.residual, asked.bias, asked.weight, None, started.hidden, started.residual),
        *addresses(inbox.table, inbox.state, slot.status),
    ]
    assert (params.part_bytes, params.rank, params.tokens) == (part_bytes(inbox.capacity), RANK, 10)
    assert (params.begin, params.end) == (0, 3)
    assert (params.eps, params.weight_offset, params.scale) == (pytest.approx(1e-5), 1.0, 0.5)
    expected = {"stream": 0xABC, "grid": 3, "block": 32, "shared_bytes": 8}
    assert keywords == expected | {"programmatic": True, "beside": False}
    defines = dict(kernels[0].program.defines)
    assert (defines["ONE_SHOT"], defines["THREADS"], defines["SPIN_LIMIT"]) == (0, 32, 7)
    assert started.hidden.shape == (10, HIDDEN) and started.residual.shape == (3, HIDDEN)
    assert started.finish is None


def test_one_shot_hands_all_rows_on_to_the_next_call(kernels: list[FakeKernel]) -> None:
    algorithm, state, first = Push(True), group(), request(residual_sharded=False)
    slot = slot_for(algorithm.needs(first, WORLD_SIZE))
    started = algorithm.launch(first, state, slot, 0)
    assert started.residual.shape == (3, HIDDEN) and started.residual.dtype == FP32
    (params, _), base = kernels[0].launches[0], started.residual.untyped_storage().data_ptr()
    assert params.residual_out == base
    defines = dict(kernels[0].program.defines)
    assert (defines["RESIDUAL_SHARDED"], defines["RESIDUAL_OUT"]) == (0, "ALL_ROWS")

    second = replace(request(), residual=started.residual)
    assert algorithm.obstacle(second, state) is None
    algorithm.launch(second, state, slot, 0)
    (params, keywords) = kernels[-1].launches[-1]
    assert params.residual == base
    assert keywords["grid"] == 10
    assert dict(kernels[-1].program.defines)["RESIDUAL_SHARDED"] == 0


@pytest.mark.parametrize(("residual_out", "rows"), [("none", 0), ("replicated", 10)])
def test_one_shot_gives_the_rows_that_are_wanted(
    kernels: list[FakeKernel], residual_out: ResidualOut, rows: int
) -> None:
    algorithm, asked = Push(True), request(residual_sharded=False, residual_out=residual_out)
    started = algorithm.launch(asked, group(), slot_for(algorithm.needs(asked, WORLD_SIZE)), 0)
    assert started.residual.shape == (rows, HIDDEN)
    assert (kernels[0].launches[0][0].residual_out or 0) == started.residual.data_ptr()


def test_stream_launches_what_it_was_asked_for(kernels: list[FakeKernel]) -> None:
    algorithm, asked = Stream(max_sms=2), request(residual_out="replicated")
    slot = slot_for(algorithm.needs(asked, WORLD_SIZE))
    started = algorithm.launch(asked, group(), slot, 7)
    ((params, keywords),) = kernels[0].launches
    assert isinstance(params, StreamParams)
    names = [name for name, *_ in StreamParams._fields_][:13]
    buffers = [slot.buffers[name].table for name in ("x", "hidden", "residual")]
    assert [getattr(params, name) for name in names] == [
        *addresses(asked.x, asked.residual, asked.bias, asked.weight, None, started.hidden, started.residual),
        *addresses(*buffers, slot.pads.table, slot.epochs, slot.status),
    ]
    assert (params.rank, params.tokens, params.weight_offset, params.scale) == (RANK, 10, 1.0, 0.5)
    shape = shape_for(HIDDEN, 2, 2, 4, 4)
    expected = {"stream": 0xABC, "grid": 2, "block": shape.block, "shared_bytes": SHARED_BYTES, "cluster": 1}
    assert keywords == expected | {"programmatic": True, "beside": False}
    defines = dict(kernels[0].program.defines)
    assert Shape(*(defines[name] for name in ("THREADS", "GROUPS", "STAGES", "RESULTS"))) == shape
    assert (defines["STAGED"], defines["PULL"], defines["SPIN_LIMIT"]) == (1, 1, 7)


@pytest.mark.parametrize("emulated", [False, True])
def test_multimem_launches_what_it_was_asked_for(kernels: list[FakeKernel], emulated: bool) -> None:
    algorithm, asked = Multimem(max_sms=2, emulated=emulated), request(residual_out="replicated")
    slot = slot_for(algorithm.needs(asked, WORLD_SIZE))
    started = algorithm.launch(asked, group(), slot, 7)
    ((params, keywords),) = kernels[0].launches
    assert isinstance(params, MultimemParams)
    names = [name for name, *_ in MultimemParams._fields_][:13]
    buffers = [slot.buffers[name].table for name in ("x", "hidden", "residual")]
    assert [getattr(params, name) for name in names] == [
        *addresses(asked.x, asked.residual, asked.bias, asked.weight, None, started.hidden, started.residual),
        *addresses(*buffers, slot.pads.table, slot.epochs, slot.status),
    ]
    assert (params.rank, params.tokens, params.weight_offset, params.scale) == (RANK, 10, 1.0, 0.5)
    # Groups of one warp; each warp has a sum of squares of two rows.
    expected = {"stream": 0xABC, "grid": 2, "block": 256, "shared_bytes": 2 * 8 * 4, "cluster": 1}
    assert keywords == expected | {"programmatic": True, "beside": False}
    defines = dict(kernels[0].program.defines)
    assert multimem.Shape(*(defines[name] for name in ("THREADS", "GROUPS", "DEPTH"))) == multimem.shape_for(64, 2, 4)
    assert (defines["STAGED"], defines["PULL"], defines["SPIN_LIMIT"]) == (1, 1, 7)
    assert defines["EMULATED_MULTICAST"] == emulated


@WITH_BARRIERS
def test_the_residuals_table_is_left_out_without_replicated_rows(
    kernels: list[FakeKernel], make: Callable[[], Algorithm]
) -> None:
    algorithm, asked = make(), request()
    algorithm.launch(asked, group(), slot_for(algorithm.needs(asked, WORLD_SIZE)), 0)
    assert kernels[0].launches[0][0].residual_table is None


@WITH_BARRIERS
def test_what_lies_in_the_slot_is_not_staged(kernels: list[FakeKernel], make: Callable[[], Algorithm]) -> None:
    algorithm, asked = make(), request()
    slot = slot_for(algorithm.needs(asked, WORLD_SIZE))
    in_slot = replace(asked, x=slot.buffers["x"].view((10, HIDDEN), BF16))
    for x_request, staged in ((in_slot, 0), (asked, 1)):
        algorithm.launch(x_request, group(), slot, 0)
        assert dict(kernels[-1].program.defines)["STAGED"] == staged
        assert kernels[-1].launches[-1][0].x == x_request.x.data_ptr()
    assert len(kernels) == 2


@WITH_BARRIERS
def test_results_in_the_slot_are_the_slots_memory(kernels: list[FakeKernel], make: Callable[[], Algorithm]) -> None:
    algorithm, asked = make(), replace(request(residual_out="replicated"), results_in_slot=True)
    slot = slot_for(algorithm.needs(asked, WORLD_SIZE))
    started = algorithm.launch(asked, group(), slot, 0)
    assert started.hidden.data_ptr() == slot.buffers["hidden"].tensor.data_ptr()
    assert started.residual.data_ptr() == slot.buffers["residual"].tensor.data_ptr()
    assert (started.hidden.shape, started.residual.dtype) == ((10, HIDDEN), FP32)
    assert dict(kernels[0].program.defines)["PULL"] == 0
    sharded = algorithm.launch(replace(request(), results_in_slot=True), group(), slot, 0)
    assert sharded.residual.data_ptr() != slot.buffers["residual"].tensor.data_ptr()
    assert sharded.hidden.data_ptr() == slot.buffers["hidden"].tensor.data_ptr()


@EACH
def test_kernels_are_kept_by_variant(kernels: list[FakeKernel], make: Callable[..., Algorithm]) -> None:
    algorithm, wide = make(), request(20, dtype=FP32, residual_out="replicated")
    slot = slot_for(algorithm.needs(wide, WORLD_SIZE))
    same = [request(), request(), request(3), request(eps=1e-3), request(scale=2.0)]
    others = [
        request(dtype=FP16),
        request(hidden_dtype=FP8),
        replace(request(), bias=None),
        request(residual_out="none"),
        replace(request(), results_in_slot=True),
    ]
    for asked in (*same, *others, *same):
        algorithm.launch(asked, group(), slot, 0)
    assert len(kernels) == 1 + len(others)


# --- what they load ahead --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("residual_sharded", [True, False])
@pytest.mark.parametrize("residual_out", ["none", "sharded", "replicated"])
@pytest.mark.parametrize(
    ("make", "count"),
    [(partial(Push, True), 1), (partial(Push, False), 1), (Stream, 2), (Multimem, 2)],
    ids=["one", "two", "stream", "multimem"],
)
def test_what_is_loaded_ahead_serves_all_messages_like_the_first(
    kernels: list[FakeKernel],
    make: Callable[[], Algorithm],
    count: int,
    residual_out: ResidualOut,
    residual_sharded: bool,
) -> None:
    algorithm, state = make(), group()
    algorithm.prepare(request(residual_sharded=residual_sharded, residual_out=residual_out), state, 7)
    assert len(kernels) == count
    assert not any(kernel.launches for kernel in kernels)
    for tokens in (10, 3):
        asked = request(tokens, residual_sharded=residual_sharded, residual_out=residual_out)
        if residual_sharded:
            whole = torch.zeros(WORLD_SIZE * rows_per_rank(tokens, WORLD_SIZE), HIDDEN)
            asked = replace(asked, residual=slice_of_whole_residual(whole, WORLD_SIZE, RANK))
        slot = slot_for(algorithm.needs(asked, WORLD_SIZE))
        algorithm.launch(asked, state, slot, 7)
        if "x" in slot.buffers:
            algorithm.launch(replace(asked, x=slot.buffers["x"].view((tokens, HIDDEN), BF16)), state, slot, 7)
    assert len(kernels) == count
    assert all(kernel.launches for kernel in kernels)


@EACH
def test_nothing_is_loaded_ahead_of_what_cannot_be_served(
    kernels: list[FakeKernel], make: Callable[..., Algorithm]
) -> None:
    make().prepare(request(hidden_size=68), group(), 0)
    assert kernels == []


class FakeTritonKernel:
    """What Triton compiled."""

    function = packed_metadata = None

    def __init__(self) -> None:
        self.loaded, self.launches, self.grids = False, 0, []

    def _init_handles(self) -> None:
        self.loaded = True

    def launch_metadata(self, *arguments: Any) -> None:
        return None

    def run(self, *arguments: Any) -> None:
        self.launches += 1
        self.grids.append(arguments[0])


@pytest.fixture
def triton_kernels(monkeypatch: pytest.MonkeyPatch) -> list[FakeTritonKernel]:
    """The two-shot kernel on a device of capability 9.0, as far as Triton looks; grows with every variant it compiles."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import CompiledKernel
    from triton.runtime import driver, jit

    assert hasattr(CompiledKernel, "_init_handles")  # private, and all that the fake has of it besides a launch

    made: list[FakeTritonKernel] = []

    def compile(self: Any, key: Any, *rest: Any) -> FakeTritonKernel:
        made.append(FakeTritonKernel())
        return self.device_caches[0][0].setdefault(key, made[-1])

    target = GPUTarget("cuda", 90, 32)
    device = SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: target
    )
    kernel = two_shot.all_reduce_rms_norm_kernel
    monkeypatch.setattr(driver, "_active", device)
    monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
    monkeypatch.setattr(jit.JITFunction, "_do_compile", compile)
    return made


@pytest.mark.parametrize(
    "first",
    [
        request(),
        request(residual_out="replicated", residual_sharded=False, cast_before_weight=BF16),
        request(hidden_dtype=FP8, residual_out="none"),
        replace(request(dtype=FP16), bias=None, weight=None),
        replace(request(dtype=FP32, residual_sharded=False), residual=None),
    ],
)
def test_two_shot_loads_what_its_launches_look_for(triton_kernels: list[FakeTritonKernel], first: Request) -> None:
    algorithm, state = TwoShot(), group()
    algorithm.prepare(first, state, 7)
    assert [kernel.loaded for kernel in triton_kernels] == [True, True]
    for tokens in (10, 1):
        asked = replace(first, x=first.x[:tokens])
        slot = slot_for(algorithm.needs(asked, WORLD_SIZE))
        in_slot = slot.buffers["x"].view((tokens, HIDDEN), first.x.dtype)
        for x in (asked.x, in_slot):
            algorithm.launch(replace(asked, x=x), state, slot, 7)
    assert [kernel.launches for kernel in triton_kernels] == [2, 2]


@pytest.mark.parametrize(("overlap_sms", "ctas", "cluster"), [(0, 25, 1), (3, 3, 1), (16, 16, 2), (32, 25, 1)])
def test_beside_other_work_all_have_the_sms_of_the_request(
    kernels: list[FakeKernel], triton_kernels: list[FakeTritonKernel], overlap_sms: int, ctas: int, cluster: int
) -> None:
    asked = replace(request(100), overlap_sms=overlap_sms)  # 25 rows a rank
    asked = replace(asked, outputs=asked.allocate(WORLD_SIZE))
    for algorithm in (Push(False), Stream(32), Multimem(32), TwoShot()):
        started = algorithm.launch(asked, group(), slot_for(algorithm.needs(asked, WORLD_SIZE)), 0)
        assert (started.hidden, started.residual) == asked.outputs
    launches = [keywords for kernel in kernels for _, keywords in kernel.launches]
    two_an_sm = min(25, 2 * ctas)
    assert [keywords["grid"] for keywords in launches] == [two_an_sm, ctas, ctas]
    assert [(one["programmatic"], one["beside"]) for one in launches] == 3 * [(not overlap_sms, overlap_sms > 0)]
    assert [keywords["cluster"] for keywords in launches[1:]] == [cluster, cluster]
    assert [kernel.grids for kernel in triton_kernels] == [[ctas]]


def test_one_shot_is_not_for_calls_beside_other_work(kernels: list[FakeKernel]) -> None:
    asked = replace(request(residual_sharded=False), overlap_sms=1)
    assert Push(True).obstacle(asked, group()) and not Push(False).obstacle(asked, group())


@pytest.mark.parametrize("name", ["x", "residual", "bias", "weight"])
@EACH
def test_tensors_that_are_not_aligned_are_copied(
    kernels: list[FakeKernel], make: Callable[..., Algorithm], name: str
) -> None:
    asked = request()
    assert aligned(asked) is asked
    tensor = getattr(asked, name)
    shifted = torch.ones(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
    fields: dict[str, Any] = {name: shifted}
    bad = replace(asked, **fields)
    copied = getattr(aligned(bad), name)
    assert shifted.data_ptr() % 16 and copied.data_ptr() % 16 == 0 and torch.equal(copied, shifted)
    algorithm = make()
    algorithm.launch(bad, group(), slot_for(algorithm.needs(bad, WORLD_SIZE)), 0)
    ((params, _),) = kernels[0].launches
    assert getattr(params, name) % 16 == 0
