"""The emulator lets right protocols pass under every seed, and catches each wrong one under some."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from enum import IntEnum, auto
from pathlib import Path

import pytest
import torch

from emulator import EmulationError, Emulator

SOURCE = Path(__file__).with_name("protocols.cu")
SEEDS = range(50)
WORLD_SIZE = 3


class Broken(IntEnum):
    NOTHING = 0
    FLAG_BEFORE_DATA = auto()
    NO_BARRIER = auto()
    SILENT_PEER = auto()
    OUT_OF_BOUNDS = auto()
    PRIVATE_OF_PEER = auto()
    NO_FENCE = auto()
    NO_WAIT_READ = auto()
    NO_WAIT = auto()
    NO_EMPTY_WAIT = auto()
    MISALIGNED = auto()
    ENDS_EARLY = auto()
    DIVERGED_SHUFFLE = auto()
    TOO_FEW_BUFFERS = auto()
    NO_RECEIVER_BARRIER = auto()
    NO_DEPENDENCY_WAIT = auto()
    NO_STAGING_FENCE = auto()
    WAITS_FOR_ALL = auto()
    SHUFFLE_FOR_BARRIER = auto()
    RELAXED_COUNT = auto()


class Params(ctypes.Structure):
    _fields_ = (
        ("buffers", ctypes.c_uint64 * 8),
        ("pads", ctypes.c_uint64 * 8),
        ("input", ctypes.c_uint64),
        ("output", ctypes.c_uint64),
        ("rank", ctypes.c_uint32),
        ("world_size", ctypes.c_uint32),
        ("launch", ctypes.c_uint32),
        ("rows", ctypes.c_uint32),
        ("broken", ctypes.c_uint32),
    )


class WrongValues(AssertionError):
    pass


class Ranks:
    """Buffers and pads of all ranks, and launches of one kernel on them."""

    def __init__(
        self, entry: str, seed: int, buffers: list[torch.Tensor], *, resident: int = 16, portable: bool = False
    ) -> None:
        self.emulator = Emulator(
            SOURCE, entry, len(buffers), seed, resident=resident, stall_limit=100_000, portable=portable
        )
        self.params = Params(world_size=len(buffers))
        for rank, buffer in enumerate(buffers):
            self.params.buffers[rank] = self.emulator.alloc(rank, buffer, symmetric=True, name="buffer")
            pad = torch.zeros(32 * 8, dtype=torch.int32)
            self.params.pads[rank] = self.emulator.alloc(rank, pad, symmetric=True, name="pad")

    def launch(
        self,
        rank: int,
        x: torch.Tensor | None,
        out: torch.Tensor,
        *,
        grid: int,
        block: int,
        stream: int = 0,
        shared_bytes: int = 0,
        programmatic: bool = False,
        **fields: int,
    ) -> None:
        params = Params.from_buffer_copy(self.params)
        params.rank, params.output = rank, self.emulator.alloc(rank, out, name="output")
        params.input = 0 if x is None else self.emulator.alloc(rank, x, name="input")
        for name, value in fields.items():
            setattr(params, name, value)
        self.emulator.launch(rank, stream, grid, block, shared_bytes, params, programmatic=programmatic)


def inputs(*shape: int) -> torch.Tensor:
    """Small integers, whose sums are exact; no zeros."""
    return torch.randint(1, 100, shape, generator=torch.Generator().manual_seed(0)).float()


def require_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.equal(actual, expected):
        raise WrongValues(f"{int((actual != expected).sum())} of {actual.numel()} values are wrong")


def run_push(seed: int, broken: Broken = Broken.NOTHING, *, resident: int = 16, portable: bool = False) -> None:
    launches, grid, block = 5, 2, 64
    x = inputs(launches, WORLD_SIZE, grid * block * 4)
    out = torch.zeros_like(x)
    buffers = [torch.full((3, WORLD_SIZE, grid * block * 4), -0.0) for _ in range(WORLD_SIZE)]
    ranks = Ranks("push", seed, buffers, resident=resident, portable=portable)
    programmatic = broken == Broken.NO_DEPENDENCY_WAIT or seed % 2 == 1
    for launch in range(launches):
        for rank in range(WORLD_SIZE):
            arguments = rank, x[launch, rank], out[launch, rank]
            ranks.launch(*arguments, grid=grid, block=block, programmatic=programmatic, launch=launch, broken=broken)
    ranks.emulator.run()
    require_equal(out, x.sum(1, keepdim=True).expand_as(x))


def run_flags(seed: int, broken: Broken = Broken.NOTHING) -> None:
    launches, grid, block = 2, 2, 32 if broken == Broken.SHUFFLE_FOR_BARRIER else 96  # one warp runs the shuffle
    x = inputs(launches, WORLD_SIZE, grid * block * 4)
    out = torch.zeros_like(x)
    # The second halves are memory that kernels may not access.
    buffers = [torch.zeros(2, WORLD_SIZE, grid * block * 4)[0] for _ in range(WORLD_SIZE)]
    ranks = Ranks("flags", seed, buffers)
    for launch in range(launches):
        for rank in range(WORLD_SIZE):
            arguments = rank, x[launch, rank], out[launch, rank]
            ranks.launch(*arguments, grid=grid, block=block, shared_bytes=8, launch=launch, broken=broken)
    ranks.emulator.run()
    rows = x.sum(1, keepdim=True).reshape(launches, 1, -1, 128)
    expected = (rows / rows.square().sum(-1, keepdim=True).sqrt()).reshape(launches, 1, -1).expand_as(x)
    if not torch.allclose(out, expected, rtol=1e-5):
        raise WrongValues("beyond the tolerance")


def run_relay(seed: int, broken: Broken = Broken.NOTHING) -> None:
    x = inputs(WORLD_SIZE, 13, 512)
    out = torch.zeros_like(x)
    buffers = [torch.zeros(2, *x.shape[1:]) for _ in range(WORLD_SIZE)]
    ranks = Ranks("relay", seed, buffers)
    for rank in range(WORLD_SIZE):
        arguments = rank, x[rank], out[rank]
        ranks.launch(*arguments, grid=2, block=160, shared_bytes=4 * 2048 + 48, rows=x.shape[1], broken=broken)
    ranks.emulator.run()
    require_equal(out, x.sum(0).expand_as(x))


def run_counts(seed: int, broken: Broken = Broken.NOTHING) -> None:
    grid, block = 4, 64
    x = inputs(WORLD_SIZE, (grid - 1) * block * 4)
    out = torch.zeros_like(x)
    ranks = Ranks("counts", seed, [torch.zeros(x.shape[1]) for _ in range(WORLD_SIZE)])
    for rank in range(WORLD_SIZE):
        ranks.launch(rank, x[rank], out[rank], grid=grid, block=block, broken=broken)
    ranks.emulator.run()
    require_equal(out, x.roll(1, 0))


Run = Callable[..., None]


@pytest.mark.parametrize("run", [run_push, run_flags, run_relay, run_counts])
def test_right_protocol_passes_under_every_seed(run: Run) -> None:
    for seed in SEEDS:
        run(seed)


@pytest.mark.parametrize(
    ("run", "broken", "message"),
    [
        (run_flags, Broken.OUT_OF_BOUNDS, r"^store_global: rank \d, launch 0, CTA \d, thread \d+: 16 bytes at rank"),
        (run_flags, Broken.PRIVATE_OF_PEER, "^store_global: rank .* 'output' .* is private to its rank"),
        (run_flags, Broken.DIVERGED_SHUFFLE, "while other lanes of the warp wait in"),
        (
            run_flags,
            Broken.SILENT_PEER,
            r"(?s)^deadlock: .* 1 threads in load_acquire_sys, thread 1 at rank 0 'pad' \+ 0x4",
        ),
        (run_relay, Broken.NO_FENCE, "^bulk_store: .* with no fence_proxy_async"),
        (run_relay, Broken.NO_STAGING_FENCE, "^bulk_load: .* with no fence_proxy_async"),
        (run_relay, Broken.NO_BARRIER, "^bulk_store: .* with no barrier"),
        (run_relay, Broken.NO_EMPTY_WAIT, "more arrivals"),
        (run_relay, Broken.MISALIGNED, "^bulk_load: .* is not a multiple of 16"),
        (run_relay, Broken.ENDS_EARLY, "ended without bulk_wait"),
    ],
)
def test_misuse_is_named_under_every_seed(run: Run, broken: Broken, message: str) -> None:
    for seed in SEEDS[::5]:
        with pytest.raises(EmulationError, match=message):
            run(seed, broken)


@pytest.mark.parametrize(
    ("run", "broken"),
    [
        (run_push, Broken.TOO_FEW_BUFFERS),
        (run_push, Broken.NO_DEPENDENCY_WAIT),
        (run_flags, Broken.FLAG_BEFORE_DATA),
        (run_flags, Broken.NO_BARRIER),
        (run_flags, Broken.NO_RECEIVER_BARRIER),
        (run_flags, Broken.SHUFFLE_FOR_BARRIER),
        (run_relay, Broken.NO_WAIT_READ),
        (run_relay, Broken.NO_WAIT),
        (run_counts, Broken.RELAXED_COUNT),
    ],
)
def test_broken_protocol_fails_under_some_seed(run: Run, broken: Broken) -> None:
    with pytest.raises((WrongValues, EmulationError), match=r"values are wrong|beyond the tolerance|deadlock"):
        for seed in SEEDS:
            run(seed, broken)


def outcome(seed: int) -> str:
    try:
        run_relay(seed, Broken.NO_WAIT_READ)
    except WrongValues as error:
        return str(error)
    return "right"


def test_seed_decides_the_run() -> None:
    first = [outcome(seed) for seed in SEEDS[:10]]
    assert first == [outcome(seed) for seed in SEEDS[:10]]
    assert len(set(first)) > 1


@pytest.mark.full
def test_ucontext_does_what_the_written_out_switch_does() -> None:
    run_push(0, portable=True)
    with pytest.raises((WrongValues, EmulationError)):
        for seed in SEEDS:
            run_push(seed, Broken.TOO_FEW_BUFFERS, portable=True)


def test_ctas_beyond_the_resident_ones_start_as_others_end() -> None:
    for seed in SEEDS[:10]:
        run_push(seed, resident=1)


def run_tickets(streams: list[int], grid: int, resident: int, broken: Broken) -> torch.Tensor:
    out = torch.zeros(len(streams), 4)
    ranks = Ranks("tickets", 0, [torch.zeros(4, dtype=torch.int32)], resident=resident)
    for row, stream in zip(out, streams, strict=True):
        ranks.launch(
            0, None, row, stream=stream, grid=grid, block=64, shared_bytes=16, rows=len(streams) * grid, broken=broken
        )
    ranks.emulator.run()
    return out.view(torch.int32)


def test_ctas_that_wait_for_those_not_resident_deadlock() -> None:
    assert run_tickets([0], 3, 3, Broken.WAITS_FOR_ALL)[0, 0] == 3
    with pytest.raises(EmulationError, match=r"(?s)deadlock.*1 of 3 CTAs have not started"):
        run_tickets([0], 3, 2, Broken.WAITS_FOR_ALL)


def test_launches_of_different_streams_overlap_and_of_one_stream_do_not() -> None:
    assert run_tickets([0, 1], 1, 2, Broken.WAITS_FOR_ALL)[:, 0].sum() == 2
    assert run_tickets([0, 0], 1, 2, Broken.NOTHING)[:, 0].tolist() == [0, 2]
    with pytest.raises(EmulationError, match=r"(?s)deadlock.*launch 1: 1 of 1 CTAs have not started"):
        run_tickets([0, 0], 1, 2, Broken.WAITS_FOR_ALL)


def test_shared_memory_starts_as_nan() -> None:
    assert run_tickets([0], 1, 1, Broken.NOTHING)[0].view(torch.float32)[1:].isnan().all()


def convert(x: torch.Tensor) -> torch.Tensor:
    """``x`` float32 ``[pairs, 2]`` to what the kernel ``convert`` makes of it, int32 ``[pairs, 4]``."""
    out = torch.zeros(x.shape[0], 4, dtype=torch.int32)
    ranks = Ranks("convert", 0, [torch.zeros(4)])
    ranks.launch(0, x, out, grid=x.shape[0] // 1024, block=1024)
    ranks.emulator.run()
    return out


def every_kind_of_float() -> torch.Tensor:
    """Random bit patterns, all fp16 values and their ties, values around the ends of the formats; ``[pairs, 2]``."""
    random = torch.randint(-(2**31), 2**31, (2**16,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    below_the_tie = (halves.view(torch.int32) | 0xFFF).view(torch.float32)
    ties = (halves.view(torch.int32) | 0x1000).view(torch.float32)
    e4m3_ties = (halves.view(torch.int32) & ~0xFFFFF | 0x80000).view(torch.float32)
    bf16_ties = (random & ~0xFFFF | 0x8000).view(torch.float32)
    scaled = torch.randn(2**16, generator=torch.Generator().manual_seed(1)).mul(
        2.0 ** torch.arange(-24, 8).repeat(2**11)
    )
    return torch.cat(
        [random.view(torch.float32), halves, halves.roll(1), below_the_tie, ties, e4m3_ties, bf16_ties, scaled]
    ).view(-1, 2)


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal bits; all NaNs are one."""
    nan = actual.float().isnan() & expected.float().isnan()
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[actual.itemsize]
    return bool((nan | (actual.view(bits) == expected.view(bits))).all())


def test_conversions_round_as_torch_does() -> None:
    x = every_kind_of_float()
    bf16, fp16, e4m3, widened = convert(x).unbind(1)
    assert same(bf16.contiguous().view(torch.bfloat16).view_as(x), x.bfloat16())
    assert same(fp16.contiguous().view(torch.float16).view_as(x), x.half())
    assert same(e4m3.short().view(torch.float8_e4m3fn).view_as(x), x.clamp(-448, 448).to(torch.float8_e4m3fn))
    assert same(widened.contiguous().view(torch.float32), x[:, 0].half().float())


def test_bad_arguments_are_named() -> None:
    emulator = Emulator(SOURCE, "push", 2, 0)
    buffer = torch.zeros(16)
    emulator.alloc(0, buffer)
    with pytest.raises(ValueError, match="buffer: expected memory of its own"):
        emulator.alloc(1, buffer[4:])
    with pytest.raises(ValueError, match="buffer: expected a contiguous one"):
        emulator.alloc(1, torch.zeros(4, 4).T)
    with pytest.raises(ValueError, match=r"rank: expected 0\.\.1, got 2"):
        emulator.alloc(2, buffer)
    with pytest.raises(ValueError, match=r"block: .*got 33"):
        emulator.launch(0, 0, 1, 33, 0, Params())
    with pytest.raises(ValueError, match=r"params: expected the kernel's \d+ bytes, got 3"):
        emulator.launch(0, 0, 1, 32, 0, b"abc")
