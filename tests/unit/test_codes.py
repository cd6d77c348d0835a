"""The codes of wires: what they say, what they cost, and what no code may be."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tw_compile.kernels.collective.codes import encode, round_trip
from tw_compile.kernels.collective.wires import INT4, INT8, WIRES, Codes

ALL_CODES = pytest.mark.parametrize("codes", (INT8, INT4), ids=("int8", "int4"))
HIDDEN = 256


def rows_of_bits(bits: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(dtype).reshape(1, -1)


def groups_of(values: torch.Tensor, codes: Codes) -> torch.Tensor:
    return values.float().reshape(-1, codes.group)


@ALL_CODES
@given(bits=st.lists(st.integers(0, 65535), min_size=128, max_size=128), fp16=st.booleans())
def test_no_word_says_that_it_has_not_arrived(codes: Codes, bits: list[int], fp16: bool) -> None:
    packed = encode(rows_of_bits(bits, torch.float16 if fp16 else torch.bfloat16), codes)
    assert packed.shape[1] == codes.row_bytes(128)
    assert not (packed.view(torch.int32) == -(2**31)).any()


@ALL_CODES
@given(bits=st.lists(st.integers(0, 65535), min_size=128, max_size=128))
def test_a_group_is_finite_only_if_all_of_it_was(codes: Codes, bits: list[int]) -> None:
    rows = rows_of_bits(bits, torch.bfloat16)
    before, after = groups_of(rows, codes), groups_of(round_trip(rows, codes), codes)
    lost = ~before.isfinite().all(-1) | ~(before.amax(-1) - before.amin(-1)).isfinite()
    assert after[lost].isnan().all()
    # A range of nearly all that float32 holds may be lost as well, when its offset is rounded.
    ordinary = ~lost & (before.abs().amax(-1) < 1e38)
    assert after[ordinary].isfinite().all()


@ALL_CODES
@given(numbers=st.lists(st.floats(-1e6, 1e6, width=32), min_size=128, max_size=128), fp16=st.booleans())
def test_a_value_is_off_by_half_a_step_at_most(codes: Codes, numbers: list[float], fp16: bool) -> None:
    rows = torch.tensor([numbers], dtype=torch.float32)
    rows = rows.clamp(-60000, 60000).to(torch.float16) if fp16 else rows.to(torch.bfloat16)
    before, after = groups_of(rows, codes), groups_of(round_trip(rows, codes), codes)
    low, high = before.amin(-1), before.amax(-1)
    # An offset and a scale have 8 bits: the offset is lower by 1/128 of itself at most, the scale larger by 1/128.
    step = ((high - low) + low.abs() / 128) / codes.levels * (1 + 1 / 128) + 2.0**-126
    assert ((before - after).abs().amax(-1) <= step * 0.5001 + low.abs() * 1e-6).all()


@ALL_CODES
def test_zeros_stay_zeros_and_equal_values_stay_nearly_equal(codes: Codes) -> None:
    zeros = torch.zeros(2, HIDDEN, dtype=torch.bfloat16)
    assert torch.equal(round_trip(zeros, codes), zeros.float())
    assert torch.equal(round_trip(-zeros, codes), zeros.float())
    equal = torch.full((1, HIDDEN), 7.3, dtype=torch.bfloat16)
    assert torch.equal(round_trip(equal, codes), equal.float())


def test_codes_are_these_bytes() -> None:
    row = torch.arange(128, dtype=torch.float32).reshape(1, -1) * 2  # 0 to 254: the scale is 1
    packed = encode(row, INT8)[0]
    assert packed[:128].view(torch.int8).tolist() == [2 * column - 127 for column in range(128)]
    assert packed[128:].tolist() == [0, 0, 0x80, 0x3F]
    row = torch.tensor([0.0, 14.0] + [1.0] * 30).reshape(1, -1)
    packed = encode(row, INT4)[0]
    assert packed[:2].tolist() == [0x79, 0xAA]  # -7 and 7; -6 and -6
    assert packed[16:].tolist() == [0, 0, 0x80, 0x3F]


def test_the_smallest_numbers_have_a_scale() -> None:
    tiny = torch.tensor([[2.0**-133 * (column % 3) for column in range(128)]])
    decoded = round_trip(tiny, INT8)
    assert decoded.isfinite().all() and float((decoded - tiny).abs().max()) <= 2.0**-126


@pytest.mark.parametrize(("codes", "ceiling"), ((INT8, 0.0065), (INT4, 0.09)), ids=("int8", "int4"))
def test_gaussian_rows_cost_what_the_bits_allow(codes: Codes, ceiling: float) -> None:
    rows = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    error = (round_trip(rows, codes) - rows.float()).square().mean().sqrt() / rows.float().square().mean().sqrt()
    assert ceiling / 2 < error < ceiling


def test_outlier_channels_cost_less_than_with_symmetric_codes() -> None:
    rows = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0))
    rows[:, ::512] = rows[:, ::512].abs() * 30
    groups = rows.reshape(-1, 128)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    symmetric = (groups / scale).round() * scale
    assert (round_trip(rows, INT8) - rows).square().mean() < 0.5 * (symmetric.reshape_as(rows) - rows).square().mean()


def test_a_row_that_is_no_whole_number_of_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="hidden size that is a multiple of 128, got 96"):
        encode(torch.zeros(1, 96), INT8)


def test_a_wire_names_its_codes() -> None:
    assert {name: (wire.group, wire.sums, wire.results) for name, wire in WIRES.items()} == {
        "exact": (1, None, None),
        "int8": (128, INT8, INT8),
        "int6": (128, INT4, INT8),
        "int4": (32, INT4, INT4),
    }
    assert INT8.row_bytes(1024) == 1056 and INT4.row_bytes(1024) == 640
    assert math.log2(INT8.levels + 2) == 8
