"""reduce_scatter + norm + all_gather on gloo ranks, and NCCL's collectives alone as parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from tw_compile import compat
from tw_compile.benchmark.contenders import contenders
from tw_compile.benchmark.labels import IF_NAMED
from tw_compile.benchmark.scattered import ReduceScatterNormAllGather
from tw_compile.benchmark.spec import BenchSpec, MessageSize
from tw_compile.benchmark.worker import bench_size
from tw_compile.harness.problems import Context
from tw_compile.harness.ranks import Ranks
from tw_compile.testing import GlooRanks

SPEC = BenchSpec(2, "cpu", "bfloat16", (64,), (6,), calls=2, repeats=20)


class _Wrong(ReduceScatterNormAllGather):
    """Takes the rows of the other rank."""

    label = "wrong"

    def prepare(self, ranks: Ranks, problem: Any) -> Any:
        call = super().prepare(ranks, problem)

        def flipped() -> tuple[torch.Tensor, torch.Tensor]:
            hidden, residual = call()
            return hidden.flip(0), residual

        return flipped


def _bench(rank: int) -> dict[str, tuple[str, str, str, bool]]:
    world = dist.group.WORLD
    assert world is not None
    ranks = Ranks(Context(rank, 2, torch.device("cpu"), compat.group_name(world)), world)
    (size,) = SPEC.sizes()
    with torch.no_grad():
        rows = bench_size(SPEC, ranks, [ReduceScatterNormAllGather(), _Wrong()], size, 2**20, lambda what: None)
    return {row.label: (row.outcome, row.numerics, row.residual_form, row.p50_us is not None) for row in rows}


def test_rows_of_all_ranks_are_those_of_the_unfused_way(gloo_ranks: GlooRanks) -> None:
    first, second = gloo_ranks.run(_bench)
    assert first == second
    assert first["nccl-reduce-scatter+norm+all-gather"] == ("timed", "ok", "sharded bfloat16", True)
    assert first["wrong"][:2] == ("numerics failed", "failed")


def test_rows_that_do_not_share_out_are_not_served() -> None:
    odd = MessageSize(5, 64, "bfloat16")
    assert ReduceScatterNormAllGather().obstacle(odd, 2) == "5 rows can't be shared out evenly to 2 ranks"
    named = contenders(replace(SPEC, device="cuda", only=IF_NAMED[:4]))
    assert [one.obstacle(odd, 2) is None for one in named] == [False, True, False, False]


def test_they_take_part_where_they_are_named() -> None:
    spec = replace(SPEC, device="cuda")
    assert not {*IF_NAMED} & {one.label for one in contenders(spec)}
    named = contenders(replace(spec, only=("nccl-all-gather-alone",)))
    assert [(one.label, one.kind, one.reduces) for one in named] == [("nccl-all-gather-alone", "bound", False)]
