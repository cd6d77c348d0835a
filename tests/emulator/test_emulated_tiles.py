"""Clusters, tiles and wgmma in the emulator: they do what the PTX ISA says, and what is wrong is caught under some seed."""

from __future__ import annotations

import ctypes
from enum import IntEnum, auto
from pathlib import Path

import pytest
import torch

from emulator import EmulationError, Emulator, tensor_map

SOURCE = Path(__file__).with_name("tiles.cu")
SEEDS = range(20)
BOX = 64 * 64 * 2
INSIDE = (8, 3)  # of a tensor of ROWS x COLUMNS
ROWS, COLUMNS = 90, 200


class Broken(IntEnum):
    NOTHING = 0
    NO_TENSOR_MAP = auto()
    MISALIGNED = auto()
    NO_INIT_FENCE = auto()
    NO_SUCH_CTA = auto()
    NO_LAST_SYNC = auto()
    TOO_MANY_ARRIVALS = auto()
    LANES_DIFFER = auto()
    NO_SWIZZLE = auto()
    OUT_OF_BOUNDS = auto()
    ORDINARY_STORE = auto()
    NO_FENCE = auto()
    NO_COMMIT = auto()
    NO_WAIT = auto()
    WAITS_FOR_OTHERS = auto()


class Params(ctypes.Structure):
    _fields_ = (
        ("a", ctypes.c_uint8 * 128),
        ("b", ctypes.c_uint8 * 128),
        ("out", ctypes.c_uint64),
        ("column", ctypes.c_int32),
        ("row", ctypes.c_int32),
        ("broken", ctypes.c_uint32),
        ("unused", ctypes.c_uint32 * 11),
    )


def launch(
    entry: str,
    seed: int,
    out: torch.Tensor,
    *,
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    at: tuple[int, int] = (0, 0),
    broken: Broken = Broken.NOTHING,
    grid: int = 1,
    block: int = 32,
    shared_bytes: int = 0,
) -> None:
    """The kernel ``entry`` in one cluster of ``grid`` CTAs; ``at``: column and row."""
    emulator = Emulator(SOURCE, entry, 1, seed, stall_limit=100_000)
    params = Params(out=emulator.alloc(0, out, name="out"), column=at[0], row=at[1], broken=broken)
    for name, tensor in (("a", a), ("b", b)):
        if tensor is not None:
            address = emulator.alloc(0, tensor, name=name)
            encoded = tensor_map(address, *tensor.shape, tensor.stride(0) * 2, 64, 64)
            setattr(params, name, (ctypes.c_uint8 * 128).from_buffer_copy(encoded))
    emulator.launch(0, 0, grid, block, shared_bytes, params, cluster=grid)
    emulator.run()


# --- copies ----------------------------------------------------------------------------------------------------------


def swizzled(box: torch.Tensor) -> torch.Tensor:
    """``box`` [rows, 64] as it lies in shared memory: of eight chunks of 16 bytes in a row, ``c`` is at ``c ^ (row % 8)``."""
    rows, found = torch.arange(len(box)), torch.empty_like(box).view(len(box), 8, 8)
    for chunk in range(8):
        found[rows, chunk ^ (rows % 8)] = box[:, 8 * chunk : 8 * chunk + 8]
    return found.view_as(box)


def box_of(tensor: torch.Tensor, column: int, row: int) -> torch.Tensor:
    """[64, 64], zeros outside of ``tensor``."""
    whole = torch.nn.functional.pad(tensor, (200, 200, 200, 200))
    return whole[200 + row : 264 + row, 200 + column : 264 + column]


def load_boxes(seed: int, grid: int, at: tuple[int, int] = INSIDE, broken: Broken = Broken.NOTHING) -> None:
    tensor = torch.arange(ROWS * COLUMNS, dtype=torch.int16).view(ROWS, COLUMNS) + 1
    found = torch.full((grid, 2, 64, 64), -1, dtype=torch.int16)
    launch("load_boxes", seed, found, a=tensor, at=at, broken=broken, grid=grid, shared_bytes=2 * BOX + 16)
    both = torch.stack([swizzled(box_of(tensor, at[0] + 64 * one, at[1])) for one in range(2)])
    assert torch.equal(found, both.expand_as(found))


@pytest.mark.parametrize("grid", [1, 2])
@pytest.mark.parametrize("at", [INSIDE, (0, 60), (120, 0), (136, 80), (-72, -60), (200, 0), (0, 90)], ids=str)
def test_boxes_are_swizzled_and_zero_outside_of_the_tensor(at: tuple[int, int], grid: int) -> None:
    for seed in SEEDS:
        load_boxes(seed, grid, at)


@pytest.mark.parametrize(
    ("grid", "broken", "message"),
    [
        (1, Broken.NO_TENSOR_MAP, "^load_tile: .* its tensor map is none"),
        (1, Broken.MISALIGNED, "^load_tile: .* is not a multiple of 128"),
        (2, Broken.MISALIGNED, "^load_tile_to: .* is not a multiple of 128"),
        (1, Broken.NO_INIT_FENCE, "^load_tile: .* CTA 0 of the cluster has had no mbarrier_init_fence"),
        (2, Broken.NO_INIT_FENCE, r"^load_tile_to: .* CTA [01] of the cluster has had no mbarrier_init_fence"),
        (2, Broken.NO_SUCH_CTA, "^load_tile_to: .* CTA 2 of a cluster of 2"),
        (1, Broken.TOO_MANY_ARRIVALS, "more arrivals than mbarrier_init's 1 at shared memory"),
        (2, Broken.TOO_MANY_ARRIVALS, "more arrivals than mbarrier_init's 1 at shared memory"),
    ],
)
def test_broken_copies_are_told_under_every_seed(grid: int, broken: Broken, message: str) -> None:
    for seed in SEEDS:
        with pytest.raises(EmulationError, match=message):
            load_boxes(seed, grid, broken=broken)


@pytest.mark.parametrize(
    "message",
    ["of the cluster has ended", "ended while bulk loads still write its shared memory, or others arrive there"],
)
def test_a_cta_that_ends_too_early_is_told_under_some_seed(message: str) -> None:
    with pytest.raises(EmulationError, match=message):
        for seed in range(200):
            try:
                load_boxes(seed, 2, broken=Broken.NO_LAST_SYNC)
            except EmulationError as error:
                if message in str(error):
                    raise


# --- matmuls ---------------------------------------------------------------------------------------------------------


def whole_numbers(*shape: int) -> torch.Tensor:
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def multiply(seed: int, broken: Broken = Broken.NOTHING) -> bool:
    """Whether the sums are right; NaNs count as wrong."""
    a, b, found = whole_numbers(64, 64), whole_numbers(256, 64), torch.full((128, 128), float("nan"))
    launch("multiply", seed, found, a=a, b=b, broken=broken, block=128, shared_bytes=5 * BOX + 8)
    thread, n, below, odd = torch.meshgrid(*(torch.arange(count) for count in (128, 32, 2, 2)), indexing="ij")
    row, column = thread // 32 * 16 + thread % 32 // 4 + 8 * below, 8 * n + thread % 4 * 2 + odd
    return torch.equal(found, (2 * a.float() @ b.float().T)[row, column].view(128, 128))


def test_matmuls_read_what_descriptors_say_and_add_up() -> None:
    for seed in SEEDS:
        assert multiply(seed)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Broken.LANES_DIFFER, "^wgmma: .* other operands than those of the warp's other lanes"),
        (Broken.NO_SWIZZLE, "^wgmma: .* expected 128-byte swizzle"),
        (Broken.OUT_OF_BOUNDS, r"^wgmma.*: .* reads shared memory \+ 0x\w+, of which there are"),
        (
            Broken.ORDINARY_STORE,
            r"^wgmma.*: .* reads shared memory \+ 0x\w+, which an ordinary store wrote: not modelled",
        ),
        (Broken.NO_FENCE, "^wgmma: .* no wgmma_fence since its registers were accessed"),
    ],
)
def test_broken_matmuls_are_told_under_every_seed(broken: Broken, message: str) -> None:
    for seed in SEEDS:
        with pytest.raises(EmulationError, match=message):
            multiply(seed, broken)


@pytest.mark.parametrize("broken", [Broken.NO_COMMIT, Broken.NO_WAIT])
def test_matmuls_that_nobody_waited_for_are_told_under_some_seed(broken: Broken) -> None:
    with pytest.raises(EmulationError, match="ended without wgmma_wait of its last matmuls"):
        for seed in SEEDS:
            multiply(seed, broken)


def test_sums_are_there_when_they_have_been_waited_for_and_maybe_before() -> None:
    assert {multiply(seed, Broken.WAITS_FOR_OTHERS) for seed in SEEDS} == {True, False}


# --- lanes and arguments ---------------------------------------------------------------------------------------------


def test_lanes_have_each_others_values_and_their_ctas_rank() -> None:
    found = torch.zeros(3, 32, 4, dtype=torch.int32)
    for seed in SEEDS:
        launch("shuffles", seed, found.zero_(), grid=3)
        lanes, base = torch.arange(32).expand(3, 32), -(2**20)
        ranks = torch.arange(3).view(3, 1).expand(3, 32)
        assert torch.equal(found.long(), torch.stack((base + lanes, base + (lanes ^ 5), base + lanes * 0, ranks), 2))


def test_bad_clusters_are_named() -> None:
    emulator = Emulator(SOURCE, "shuffles", 1, 0, resident=4)
    for cluster in (0, 5):
        with pytest.raises(ValueError, match=rf"cluster: expected 1\.\.4, got {cluster}"):
            emulator.launch(0, 0, 20, 32, 0, Params(), cluster=cluster)
    with pytest.raises(ValueError, match="grid: expected at least 1 and a multiple of 2, got 3"):
        emulator.launch(0, 0, 3, 32, 0, Params(), cluster=2)
