"""Float8 made by kernels of their own behind a call of ours, on gloo ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tw_compile import compat
from tw_compile.benchmark import quantised_after
from tw_compile.benchmark.labels import QUANTISED_AFTER
from tw_compile.benchmark.ours import Operator
from tw_compile.benchmark.quantised_after import QuantisedAfter
from tw_compile.benchmark.spec import BenchSpec
from tw_compile.benchmark.variants import OURS_ON_CPU
from tw_compile.benchmark.worker import bench_size
from tw_compile.harness.problems import Context
from tw_compile.harness.ranks import Ranks
from tw_compile.testing import GlooRanks

SPEC = BenchSpec(2, "cpu", "bfloat16", (256,), (5,), calls=2, repeats=20)


def _over_gloo(label: str) -> QuantisedAfter:
    contender = QuantisedAfter(label)
    contender._call = Operator(next(variant for variant in OURS_ON_CPU if variant.label == "tw-gloo"))
    contender.residual_sharded = False
    return contender


def _bench(rank: int, unwritten: bool) -> dict[str, tuple[str, str, bool, bool]]:
    world = dist.group.WORLD
    assert world is not None
    ranks = Ranks(Context(rank, 2, torch.device("cpu"), compat.group_name(world)), world)
    (size,) = SPEC.sizes()

    def scales_of(*args: Any) -> torch.Tensor:
        scales = real(*args)
        # The memory may hold the right scales, of an earlier call.
        return torch.empty_like(scales.zero_()) if unwritten else scales

    real = quantised_after.scales_of
    with torch.no_grad(), mock.patch.object(quantised_after, "scales_of", scales_of):
        rows = bench_size(SPEC, ranks, [_over_gloo(label) for label in QUANTISED_AFTER], size, 2**20, lambda what: None)
    return {row.label: (row.outcome, row.numerics, row.quantises, row.gives_what_peers_give) for row in rows}


def test_codes_and_scales_are_those_of_the_unfused_way_and_no_speed_up_is_claimed(gloo_ranks: GlooRanks) -> None:
    first, second = gloo_ranks.run(_bench, False)
    assert first == second == dict.fromkeys(QUANTISED_AFTER, ("timed", "ok", True, False))


def test_scales_that_nobody_writes_are_seen(gloo_ranks: GlooRanks) -> None:
    for rows in gloo_ranks.run(_bench, True):
        assert {row[0] for row in rows.values()} == {"numerics failed"}


@pytest.mark.parametrize("label", QUANTISED_AFTER)
def test_the_call_is_the_one_that_the_rest_is_behind(label: str) -> None:
    contender = QuantisedAfter(label)
    assert contender.residual_sharded is label.startswith("tw+quantise")
    assert contender._call.label == ("tw-push-two-shot" if contender.residual_sharded else "tw-push-one-shot")
    assert label.endswith(contender.scales)
