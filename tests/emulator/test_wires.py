"""Rows in codes: wire.cuh against its definition, and push.cu and host_rows.cu with wires, in the emulator."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from emulator import Emulator
from emulator.broken import broken_copy, check_caught
from emulator.host_kernels import RowsMachine
from emulator.kernels import ALGORITHMS, BF16, FP8, FP16, FP32, Form, PushMachine, partial_sums
from emulator.test_host_kernels import rows
from tw_compile.kernels.collective.codes import decode, encode
from tw_compile.kernels.collective.slot import NOT_ARRIVED
from tw_compile.kernels.collective.wires import INT4, INT8, Codes

NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}
LLAMA = Form(residual="sharded", residual_out="sharded", residual_dtype=FP32, cast=BF16)
FORMS = {
    "llama": LLAMA,
    "first": Form(residual=None, residual_out="sharded", residual_dtype=FP32),
    "last": Form(residual="sharded", residual_out="none", residual_dtype=FP32),
    "whole": Form(bias=True, scale=0.5),
    "gemma": Form(weight_offset=1.0, weight_dtype=FP32),
    "fp16": Form(FP16, residual_dtype=FP16, weight_dtype=FP16, cast=FP16),
    "fp32": Form(FP32, residual_dtype=FP32, weight_dtype=FP32),
    "fp8_whole": Form(hidden_dtype=FP8),
}
WIRES = pytest.mark.parametrize("wire", ["int8", "int6", "int4"])
MOST_TOKENS = 33


# --- codes -----------------------------------------------------------------------------------------------------------


class CodesParams(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("x", "packed", "decoded")]


def kernel_codes(x: torch.Tensor, codes: Codes, source: Path | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """What wire.cuh makes of ``x [rows, hidden]``: packed rows as ``encode`` has them, and what becomes of those."""
    rows, hidden_size = x.shape
    row_bytes = -(-codes.row_bytes(hidden_size) // 32) * 32
    packed = torch.full((rows, row_bytes // 4), NOT_ARRIVED, dtype=torch.int32)
    decoded = torch.full((rows, hidden_size), float("nan"))
    wire = "int8" if codes == INT8 else "int4"
    defines = {"HIDDEN": hidden_size, "X_TYPE": NAMES[x.dtype], "HIDDEN_TYPE": "bf16", "WIRE": wire, "THREADS": 64}
    emulator = Emulator(source or Path(__file__).with_name("codes.cu"), "codes", 1, 0, defines=defines)
    addresses = [emulator.alloc(0, tensor) for tensor in (x, packed, decoded)]
    emulator.launch(0, 0, rows, 64, 0, CodesParams(*addresses))
    emulator.run()
    found = packed.view(torch.uint8)[:, : codes.row_bytes(hidden_size)]
    assert not (found.contiguous().view(torch.int32) == NOT_ARRIVED).any(), "a word that says that it has not arrived"
    return found, decoded


def all_kinds_of_rows(dtype: torch.dtype, hidden_size: int) -> torch.Tensor:
    """Ordinary rows, rows of every size that the type has, and rows with values that are hard to encode."""
    generator = torch.Generator().manual_seed(hidden_size)
    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal

    def random() -> torch.Tensor:
        return torch.randn(hidden_size, generator=generator)

    finite = [random(), random() + 100, random() - 100, random().abs(), -random().abs(), random() * smallest]
    finite += [random().clamp(-1, 1) * largest, random().sign() * largest, random() * smallest * 2**-10]
    finite += [torch.zeros(hidden_size), -torch.zeros(hidden_size), torch.full((hidden_size,), 3.14159)]
    finite += [torch.arange(hidden_size).float() % 255, torch.arange(hidden_size).float() % 15 - 7, random() * 0 - 1e-6]
    finite += [random() * 2.0 ** int(exponent) for exponent in torch.arange(-140, 127, 9)]
    finite += [torch.where(random() > 0, 0.0, -0.0), torch.where(random() > 2, random() * 1000, random())]
    rows = torch.stack(finite).to(dtype)
    whole_bits = torch.randint(-(2**31), 2**31, (16, hidden_size), generator=generator).to(torch.int32)
    any_bits = whole_bits.view(torch.float32) if dtype == FP32 else whole_bits.to(torch.int16).view(dtype)
    lost = random().repeat(6, 1).to(dtype)
    lost[0, 1], lost[1, 2], lost[2, 3] = float("nan"), float("inf"), -float("inf")
    lost[3, 4], lost[3, 5] = float("inf"), -float("inf")
    lost[4], lost[5] = float("nan"), float("inf")
    return torch.cat([rows, any_bits, lost, *([edges_of_scales(hidden_size)] if dtype == FP32 else [])])


def edges_of_scales(hidden_size: int) -> torch.Tensor:
    """Groups as wide as all levels of a scale, and the next float wider or narrower, for every bf16 mantissa."""
    scales = torch.arange(0x3F80, 0x4000, dtype=torch.int32).to(torch.int16).view(BF16).float()
    widths = torch.cat(
        [scales * (codes.levels * 2.0**exponent) for codes in (INT8, INT4) for exponent in (0, -60, 100)]
    )
    high = torch.cat([widths, *(torch.nextafter(widths, torch.tensor(to)) for to in (torch.inf, 0.0))])
    each = hidden_size // INT8.group
    groups = torch.zeros(-(-len(high) // each) * each, INT8.group)
    groups[: len(high), -1] = high
    groups[:, 0] = 0
    return groups.reshape(-1, hidden_size)


def check_codes(dtype: torch.dtype, codes: Codes, hidden_size: int, source: Path | None = None) -> None:
    x = all_kinds_of_rows(dtype, hidden_size)
    packed, decoded = kernel_codes(x, codes, source)
    wanted = encode(x, codes)
    wrong = (packed != wanted).any(1).nonzero().flatten().tolist()
    assert not wrong, f"rows {wrong} have other bytes"
    values = decode(wanted, codes, hidden_size)
    assert torch.equal(decoded.isnan(), values.isnan())
    assert torch.equal(decoded.nan_to_num(), values.nan_to_num())


@pytest.mark.parametrize("codes", [INT8, INT4], ids=["int8", "int4"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_kernels_have_the_codes_of_the_definition(dtype: torch.dtype, codes: Codes) -> None:
    """The last warp of a row is half full."""
    check_codes(dtype, codes, 640)


# --- kernels ---------------------------------------------------------------------------------------------------------


def push(world_size: int, hidden_size: int, form: Form, seed: int, **options: Any) -> PushMachine:
    options.setdefault("threads", 32 * -(-hidden_size // 512))
    return PushMachine(world_size, hidden_size, form, one_shot=False, most_tokens=MOST_TOKENS, seed=seed, **options)


def host(world_size: int, hidden_size: int, form: Form, seed: int, **options: Any) -> RowsMachine:
    """With depth 0 rows are loaded when they are needed, as on GPUs that can't do anything meanwhile."""
    depth = options.pop("depth", 2 * (seed % 2))
    return rows(world_size, hidden_size, form, False, seed, threads=32 * -(-hidden_size // 512), depth=depth, **options)


Make = Callable[..., PushMachine | RowsMachine]
KERNELS = pytest.mark.parametrize("make", [push, host], ids=["push", "host_rows"])


@KERNELS
def test_kernels_with_wires(make: Make) -> None:
    """A quick sibling of those below."""
    for seed, (world_size, wire) in enumerate([(2, "int8"), (3, "int6"), (2, "int4")]):
        machine = make(world_size, 256, LLAMA.on(wire), seed, resident=2 + seed)
        for tokens, max_sms in ((3, 2), (1, 2), (7, 3), (2, 1)):
            machine.call(tokens, max_sms)
        machine.run()


@pytest.mark.full
@KERNELS
@pytest.mark.parametrize(
    ("form", "wire"),
    [
        *((form, wire) for form in FORMS for wire in ("int8", "int6")),
        *((form, "int4") for form in ("llama", "whole", "fp8_whole")),
    ],
)
def test_every_form_with_wires(make: Make, form: str, wire: str) -> None:
    """Of 640 columns the last warp of the threads has half of its vectors."""
    sizes = [(2, 640), (3, 256)]
    for seed, (world_size, hidden_size) in enumerate(sizes if wire == "int8" else sizes[:1]):
        machine = make(world_size, hidden_size, FORMS[form].on(wire), seed)
        for tokens, max_sms in ((5, 2), (1, 2), (MOST_TOKENS, 3), (2, 1)):
            machine.call(tokens, max_sms)
        machine.run()


SIZES_BY_WIRE = {
    "int8": [(2, 256), (2, 1024), (2, 2048), (3, 1152), (4, 256), (4, 1024), (8, 256)],
    "int6": [(2, 256), (2, 2048), (3, 1152), (4, 1024), (8, 256)],
    "int4": [(2, 1024), (4, 256)],
}
"""World sizes and hidden sizes. Wires share all code but that of a word of codes; int4 is there to show what a paper did."""


@pytest.mark.full
@KERNELS
@pytest.mark.parametrize(
    ("world_size", "hidden_size", "wire"), [(*size, wire) for wire, sizes in SIZES_BY_WIRE.items() for size in sizes]
)
def test_calls_with_wires_follow_each_other(make: Make, world_size: int, hidden_size: int, wire: str) -> None:
    for seed in range(2 if world_size * hidden_size > 2048 else 4):
        form = (LLAMA, FORMS["whole"])[seed % 2].on(wire)
        machine = make(world_size, hidden_size, form, seed, resident=world_size // 2 + seed % 5)
        for tokens in (1, 2, 3, 33, 5, 1)[: 6 if hidden_size <= 1024 else 4]:
            machine.call(tokens, 1 + seed % 3)
        machine.run()


@pytest.mark.parametrize("wire", ["int8", "int6"])
def test_words_do_not_gather_beside_other_work(wire: str) -> None:
    for seed, overlap_sms in enumerate((0, 8)):
        machine = host(2, 1024, LLAMA.on(wire), seed, depth=2, overlap_sms=overlap_sms)
        assert (machine.shape.gathered.results > 0) == (overlap_sms == 0)
        for tokens, max_sms in ((5, 2), (1, 2), (MOST_TOKENS, 3), (2, 1)):
            machine.call(tokens, max_sms)
        machine.run()


@KERNELS
def test_wires_on_two_slots_at_once(make: Make) -> None:
    for seed in range(3):
        machine = make(3, 256, FORMS["whole"].on("int8"), seed, slots=2, resident=8)
        for number, tokens in enumerate((3, 1, 7, 2, 5)):
            machine.call(tokens, 2, slot=number % 2)
        machine.run()


@pytest.mark.few(2)
@KERNELS
@WIRES
def test_what_is_not_finite_stays_so(make: Make, wire: str) -> None:
    """A NaN or an infinity takes its group with it, and the row; other rows are what they are without it."""
    form = Form(residual=None, residual_dtype=FP32, wire=wire)
    xs = partial_sums(3, 9, 256, BF16, 3)
    xs[0][1, 70], xs[1][4, 71], xs[2][7, 72] = float("nan"), float("inf"), -float("inf")
    xs[0][8, 5], xs[1][8, 5] = float("inf"), -float("inf")
    xs[0][2], xs[1][3] = 0.0, -0.0
    machine = make(3, 256, form, 1)
    calls = [machine.call(9, 2, xs=xs) for _ in range(4)]
    machine.run()
    for call in calls:
        for own in call.ranks:
            assert own.hidden[[1, 4, 7, 8]].isnan().any(1).all()
            assert own.hidden[[0, 2, 3, 5, 6]].isfinite().all()
            assert (
                not own.residual_out[[1, 4, 7], 70:73].isfinite().all(1).any() and not own.residual_out[8, 5].isfinite()
            )


@KERNELS
@pytest.mark.parametrize("silent", [0, 2])
def test_a_rank_that_does_not_launch_is_reported(make: Make, silent: int) -> None:
    machine = make(3, 256, LLAMA.on("int6"), 0, spin_limit=200)
    machine.call(MOST_TOKENS, 2)
    machine.call(MOST_TOKENS, 2, skip=[silent])
    machine.emulator.run()
    for rank, status in enumerate(machine.slots[0].status):
        if rank == silent:
            assert not status.any()
        else:
            assert (status[:2, silent] > 0).all(), "every CTA misses its rows"
            assert not status[2:].any() and not status[:, rank].any()
    machine.check_margins()


# --- broken copies ---------------------------------------------------------------------------------------------------


def run_codes(source: Path, seed: int) -> None:
    for dtype, codes in ((BF16, INT8), (BF16, INT4), (FP32, INT8)):
        check_codes(dtype, codes, 640, source)


def run_kernel(
    source: Path,
    seed: int,
    *,
    make: Make,
    wire: str = "int6",
    hidden_size: int = 640,
    world_size: int = 3,
    form: str = "whole",
) -> None:
    options = {"sources": source.parent, "resident": 2 + seed % 5, "stall_limit": 20_000}
    machine = make(world_size, hidden_size, FORMS[form].on(wire), seed, **options)
    for tokens in (3, 1, 7, 2, 5):
        machine.call(tokens, 2)
    machine.run()


CODES = Path(__file__).with_name("codes.cu")
PUSH, HOST = ALGORITHMS / "push" / "push.cu", ALGORITHMS / "host" / "host_rows.cu"
RUN_PUSH, RUN_HOST = partial(run_kernel, make=push), partial(run_kernel, make=host)
IN_ORDER = partial(RUN_PUSH, form="fp32")
"""With values of float32, whose sums show their order."""
BROKEN: dict[str, tuple[Callable[[Path, int], None], Path, str, str, str]] = {
    "code 0x80 is allowed": (run_codes, CODES, "wire.cuh", "BITS == 8 ? 126 : 14;", "BITS == 8 ? 127 : 15;"),
    "scale rounded down": (
        run_codes,
        CODES,
        "wire.cuh",
        "as_bits(multiply_up(width, INVERSE_LEVELS)) + 0xffffu",
        "as_bits(multiply_up(width, INVERSE_LEVELS))",
    ),
    "offset rounded towards zero": (run_codes, CODES, "wire.cuh", "(low_bits >> 31) * 0xffffu + low_bits", "low_bits"),
    "scale may be zero": (run_codes, CODES, "wire.cuh", "(uint32_t)larger((int32_t)up, 0x00800000)", "up"),
    "NaNs are not seen": (run_codes, CODES, "wire.cuh", "if (has_nan) high = infinite;", ""),
    "infinities are numbers": (
        run_codes,
        CODES,
        "wire.cuh",
        "const bool lost = !(width < as_float(0x7f800000u));",
        "const bool lost = false;",
    ),
    "a group is as wide as a warp": (run_codes, CODES, "wire.cuh", "int mask = LANES / 2", "int mask = 16"),
    "a group is half as wide": (run_codes, CODES, "wire.cuh", "int mask = LANES / 2", "int mask = LANES / 4"),
    "groups share a word": (run_codes, CODES, "wire.cuh", "column / COLUMNS * 4,", "column / (2 * COLUMNS) * 4,"),
    "codes are cut, not rounded": (
        run_codes,
        CODES,
        "wire.cuh",
        "multiply_rounded(x - scaling.offset, scaling.inverse)",
        "(multiply_rounded(x - scaling.offset, scaling.inverse) - 0.5f)",
    ),
    "codes in another order": (run_codes, CODES, "wire.cuh", "0x0040u), 0x5410u)", "0x0040u), 0x1054u)"),
    "every other column is left out": (run_codes, CODES, "wire.cuh", "high, 0x7632u)", "high, 0x5410u)"),
    "a scale from a product that is rounded to nearest": (
        run_codes,
        CODES,
        "wire.cuh",
        "multiply_up",
        "multiply_rounded",
    ),
    "a scale from a product that is too large": (run_codes, CODES, "wire.cuh", "0.00393700786f", "0.00393700814f"),
    "codes of groups without codes": (
        run_codes,
        CODES,
        "wire.cuh",
        "(scaling.lost & ZEROS) | (~scaling.lost & (word ^ FLIPPED))",
        "word ^ FLIPPED",
    ),
    "of two parts one": (
        partial(RUN_PUSH, world_size=2),
        PUSH,
        "wire.cuh",
        "if (PEERS == 1 || place == i) add(h, own);",
        "",
    ),
    "a word speaks for its codes": (
        partial(RUN_PUSH, wire="int8"),
        PUSH,
        "wire.cuh",
        "for (uint32_t word : piece.codes) all = all && word != NOT_ARRIVED;",
        "",
    ),
    "codes speak for their word": (
        RUN_PUSH,
        PUSH,
        "wire.cuh",
        "bool all = piece.word[0] != NOT_ARRIVED;",
        "bool all = true;",
    ),
    "rows overlap": (
        RUN_PUSH,
        PUSH,
        "wire.cuh",
        "(WORDS_OFFSET + HIDDEN / COLUMNS * 4 + 31) / 32 * 32",
        "WORDS_OFFSET",
    ),
    "a peer's part in the place of its own": (
        RUN_PUSH,
        PUSH,
        "wire.cuh",
        "add(h, own)",
        "add(h, received<T>(others[0]))",
    ),
    "its own part near the begin": (IN_ORDER, PUSH, "wire.cuh", "place == i", "i == 1"),
    "peers by their distance": (IN_ORDER, PUSH, "wire.cuh", "rank_of(i) == place + (place >= rank)", "i == place"),
    "host: one peer stands for others": (
        RUN_HOST,
        HOST,
        "host_rows.cu",
        "(peer < p.rank ? PEERS : 0)",
        "(p.rank - peer)",
    ),
    "its own part through codes": (
        RUN_PUSH,
        PUSH,
        "push.cu",
        "        add_up(h[v], own[v], got, rank);",
        "        const auto through = SumRow::encoded(own[v]);\n"
        "        add_up(h[v], received<X_TYPE>(through), got, rank);",
    ),
    "the owner keeps exact values": (
        RUN_PUSH,
        PUSH,
        "push.cu",
        "ResultRow::encoded_and_received(result)",
        "ResultRow::encoded(result)",
    ),
    "what an early look finds is taken as it is": (
        partial(RUN_PUSH, wire="int8", hidden_size=256, world_size=2),
        PUSH,
        "push.cu",
        "      call.receive(got, normalised, local - p.begin, column, 2, computed);\n",
        "",
    ),
    "sums that an early look finds are taken as they are": (
        partial(RUN_PUSH, wire="int8", hidden_size=256, world_size=2),
        PUSH,
        "push.cu",
        "        call.receive(got, sums, local - p.begin, column, 1, all);\n",
        "",
    ),
    "the next row is not loaded": (
        partial(RUN_PUSH, wire="int8", hidden_size=256, world_size=2),
        PUSH,
        "push.cu",
        "    if constexpr (EARLY) load_next(ahead + stride);\n",
        "",
    ),
    "lanes beyond the row send": (RUN_PUSH, PUSH, "push.cu", "if (in_row) call.push(sums", "call.push(sums"),
    "host: the owner keeps exact values": (
        RUN_HOST,
        HOST,
        "host_rows.cu",
        "encode_and_receive(pieces, results)",
        "encode(pieces, results)",
    ),
    "host: words are not copied": (
        partial(RUN_HOST, wire="int8", hidden_size=256),
        HOST,
        "wire.cuh",
        "copy_to_shared<4>(to + (first + thread) * 4, Row::word_at(row, first + thread));",
        "",
    ),
    "host: lanes beyond the row send": (
        RUN_HOST,
        HOST,
        "host_rows.cu",
        "Sent::each(thread, [&](int v, Column column) {\n      store_gathering",
        "Sent::each_with<true>(thread, [&](int v, Column column, bool) {\n      store_gathering",
    ),
    "host: words that a turn sends stay": (
        partial(RUN_HOST, wire="int8"),
        HOST,
        "host_rows.cu",
        "if (sends(turn, step)) store_words<SumRow>",
        "if (false) store_words<SumRow>",
    ),
    "host: words of the last results stay": (
        partial(RUN_HOST, wire="int8"),
        HOST,
        "host_rows.cu",
        "if (computes(computed))",
        "if (computes(computed) && computed + 1 < cta.turns)",
    ),
    "host: words are read before all threads have them": (
        partial(RUN_HOST, wire="int8"),
        HOST,
        "host_rows.cu",
        "if (GATHERS && computing >= 0) {",
        "if (false) {",
    ),
    "host: turns are counted before their words are stored": (
        partial(RUN_HOST, wire="int8"),
        HOST,
        "host_rows.cu",
        "store_gathered(turn, computing - 1)",
        "store_gathered(turn - 1, computing - 1)",
    ),
    "host: words of results with narrow sums stay": (
        partial(RUN_HOST, wire="int6"),
        HOST,
        "host_rows.cu",
        "if constexpr (RESULTS_LEAVING > 0)\n      if (computes(computed))",
        "if constexpr (false)\n      if (computes(computed))",
    ),
    "host: words of results with narrow sums are read before all threads have them": (
        partial(RUN_HOST, wire="int6"),
        HOST,
        "host_rows.cu",
        "if (GATHERS && computing >= 0) {",
        "if (SUMS_LEAVING > 0 && computing >= 0) {",
    ),
    "the extremes of the first vector for all": (
        partial(RUN_HOST, wire="int8", hidden_size=1024),
        HOST,
        "wire.cuh",
        "Scaling::of(T{}, found[v])",
        "Scaling::of(T{}, found[0])",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", BROKEN)
def test_broken_kernels_are_caught(tmp_path: Path, name: str) -> None:
    run, source, file, old, new = BROKEN[name]
    check_caught(run, broken_copy(tmp_path, source, file, ((old, new),)), range(12))
