"""grouped_mm.cu in the emulator, to the bit: sums of whole numbers are the same in any order."""

from __future__ import annotations

from itertools import accumulate
from random import Random
from typing import Any

import pytest
import torch

from emulator.grouped import check, expected, multiply, whole_numbers
from tw_compile.kernels.gemm.grouped_mm import _STAGES, _TILE_DEPTH

SEEDS = range(3)
GROUPS = {
    "one row": [1],
    "one tile of rows": [128],
    "a tile and a row": [129],
    "two tiles of rows": [256],
    "three tiles of rows": [384],
    "no group has rows but the last": [0, 0, 0, 7],
    "groups without rows between others": [0, 3, 0, 0, 130, 0],
    "tiles over each other and beside each other": [257, 1, 512, 127, 383],
    "many small groups": [5, 1, 16, 2, 7, 0, 31, 1],
}


@pytest.mark.parametrize("wide", [1, 2, 3])
@pytest.mark.parametrize("rows", GROUPS.values(), ids=GROUPS)
def test_each_group_is_multiplied_by_its_matrix(rows: list[int], wide: int) -> None:
    """An odd number of tiles of columns leaves a CTA without one of its own; if it is one, all pairs beside each other do."""
    for seed in SEEDS:
        check(rows, 256 * wide, _TILE_DEPTH, seed, sms=2 + 2 * seed)


@pytest.mark.parametrize("steps", [1, 2, _STAGES - 1, _STAGES, _STAGES + 1, 2 * _STAGES + 3])
def test_every_depth_goes_round_the_ring(steps: int) -> None:
    """With several pairs a cluster, so that a pair begins at any of the stages."""
    for seed in SEEDS:
        check([130, 5, 256], 768, steps * _TILE_DEPTH, seed, sms=2 + 2 * seed)


@pytest.mark.parametrize(
    ("sms", "reserved_sms"),
    [(2, 0), (3, 0), (4, 0), (10, 0), (40, 0), (10, 1), (10, 5), (10, 9), (4, 4)],
)
def test_any_number_of_sms_computes_all_pairs(sms: int, reserved_sms: int) -> None:
    """Ten pairs, of which a cluster computes all, a few, one or none."""
    for seed in SEEDS:
        check([257, 128, 1], 512, 2 * _TILE_DEPTH, seed, sms=sms, reserved_sms=reserved_sms)


@pytest.mark.parametrize("resident", [2, 3, 4])
def test_clusters_need_not_run_at_the_same_time(resident: int) -> None:
    for seed in SEEDS:
        check([257, 128, 1], 512, 2 * _TILE_DEPTH, seed, sms=10, resident=resident)


def test_it_takes_more_groups_than_threads() -> None:
    rows = [0] * 500
    rows[0], rows[383], rows[384], rows[499] = 1, 2, 3, 129
    check(rows, 256, _TILE_DEPTH, 0)


@pytest.mark.few(8)
@pytest.mark.parametrize("seed", range(25))
def test_random_groups_on_random_devices(seed: int) -> None:
    random = Random(seed)
    rows = [random.choice((0, 1, 2, 100, 127, 128, 129, 200, 256, 300)) for _ in range(random.randint(1, 6))]
    options: dict[str, Any] = {"sms": random.randint(2, 12), "resident": random.randint(2, 8)}
    columns, steps = random.randint(1, 4), random.choice((1, 2, 3, 5, 6, 9))
    check([*rows, 1], 256 * columns, steps * _TILE_DEPTH, seed, **options)


def test_what_a_group_does_not_own_does_not_reach_it() -> None:
    """Tiles reach into the rows of the groups behind; matrices lie next to each other."""
    rows, columns, depth = [3, 130, 5, 129], 256, 2 * _TILE_DEPTH
    ends = torch.tensor(list(accumulate(rows)), dtype=torch.int32)
    for seed in SEEDS:
        a = whole_numbers(sum(rows), depth, seed=seed)
        weights = whole_numbers(len(rows), columns, depth, seed=seed + 100).transpose(1, 2)
        a[3 + 130 :][:5] = float("nan")
        weights[2] = float("inf")
        found, want = multiply(a, weights, ends, seed), expected(a, weights, ends)
        assert found[133:138].isnan().all()
        assert torch.equal(found[:133], want[:133]) and torch.equal(found[138:], want[138:])


def test_results_are_rounded_to_the_nearest() -> None:
    """Sums with more bits than bfloat16 has, ties among them."""
    a, weights = torch.zeros(256, _TILE_DEPTH).bfloat16(), torch.zeros(1, 256, _TILE_DEPTH).bfloat16()
    a[:, 0], a[:, 1] = 1.0, torch.arange(256) - 128.0
    weights[0, :, 0], weights[0, :, 1] = (torch.arange(256.0) + 256.0) * 64, 1.0
    ends = torch.tensor([256], dtype=torch.int32)
    found = multiply(a, weights.transpose(1, 2), ends, 0)
    exact = a.double() @ weights[0].double().T
    assert torch.equal(found, exact.bfloat16()) and not torch.equal(found.double(), exact)
