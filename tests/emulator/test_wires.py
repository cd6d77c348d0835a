"""Rows in codes: wire.cuh against its definition, and push.cu and host_rows.cu with wires, in the emulator."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from emulator import Emulator
from emulator.kernels import BF16, FP8, FP16, FP32, Form, PushMachine, partial_sums
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
    return torch.cat([rows, any_bits, lost])


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


# --- push ------------------------------------------------------------------------------------------------------------


def push(world_size: int, hidden_size: int, form: Form, wire: str, seed: int, **options: object) -> PushMachine:
    options.setdefault("threads", 32 * max(1, hidden_size // 512))
    form = form.on(wire)
    return PushMachine(
        world_size, hidden_size, form, one_shot=False, most_tokens=MOST_TOKENS, seed=seed, **options
    )


def test_push_with_wires() -> None:
    """A quick sibling of those below."""
    for seed, (world_size, wire) in enumerate([(2, "int8"), (3, "int6"), (2, "int4")]):
        machine = push(world_size, 256, LLAMA, wire, seed, resident=1 + seed)
        for tokens, max_sms in ((3, 2), (1, 2), (7, 3), (2, 1)):
            machine.call(tokens, max_sms)
        machine.run()
