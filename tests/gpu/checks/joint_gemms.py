"""Checks of GEMMs of one input that our kernel computes for some numbers of rows, and the library for the others."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist
import torch.nn.functional as F

from gpu.checks.producer import joint_product
from gpu.checks.stress import capture, new_counter
from tw_compile import collect_reports
from tw_compile.autotune.turns import Gemms, measured_turns, rows_to_measure
from tw_compile.harness.problems import Context, expect_within_budget
from tw_compile.kernels.gemm import split_k_mm
from tw_compile.kernels.gemm.by_rows import gated_mm_by_rows, is_ours, joint_mm_by_rows
from tw_compile.kernels.gemm.joint_mm import sms_of
from tw_compile.kernels.gemm.mm_leaving_sms import gated_mm_leaving_sms, joint_mm_leaving_sms
from tw_compile.planning.split_k_tiles import candidates

_TURNS = [100, 700]
_FEW_ROWS = [
    (rows, depth, columns)
    for rows, depth in ((1, 256), (16, 4096), (64, 1024), (65, 4096), (128, 8192), (200, 4096), (384, 1088))
    for columns in ((520, 264, 8), (256, 256))
]
"""Numbers of rows, depths, and columns of matrices."""


def gemms_by_rows_are_as_near_as_matmuls(ctx: Context) -> None:
    """On both sides of each turn; matrices apart, and as halves of one."""
    for rows in (1, 99, 100, 699, 700, 1025):
        ours = is_ours(rows, _TURNS)
        a, (gate, up) = joint_product(ctx, rows, (520, 520))
        halves = torch.cat((gate.t(), up.t())).split(520)
        for first, second in ((gate, up), (halves[0].t(), halves[1].t())):
            exact = F.silu(a.double() @ first.double()) * (a.double() @ second.double())
            found = gated_mm_by_rows(a, first, second, _TURNS)
            expect_within_budget(ctx, f"gated, {rows} rows", found, F.silu(a @ first) * (a @ second), exact)
            if ours:
                same = torch.equal(found, gated_mm_leaving_sms(a, first, second, 0))
                ctx.expect(same, f"gated, {rows} rows: not our kernel's bits")
        for found, matrix in zip(joint_mm_by_rows(a, [gate, up], [], _TURNS), (gate, up), strict=True):
            if ours:
                expect_within_budget(ctx, f"joint, {rows} rows", found, a @ matrix, a.double() @ matrix.double())
                if split_k_mm.tiles_of(a, [gate, up]) is None:
                    (whole,) = joint_mm_leaving_sms(a, [matrix], [], 0)
                    ctx.expect(torch.equal(found, whole), f"joint, {rows} rows: not our kernel's bits")
            else:
                ctx.expect(torch.equal(found, a @ matrix), f"joint, {rows} rows: not the library's bits")


def gemms_of_few_rows_are_as_near_as_matmuls(ctx: Context) -> None:
    """With their depth split, in tiles of all widths and both numbers of parts."""
    for rows, depth, columns in _FEW_ROWS:
        a, matrices = joint_product(ctx, rows, columns, depth)
        addends = torch.randn(sum(columns), generator=ctx.generator(rows, depth), device=ctx.device).bfloat16()
        for biases in ([], list(addends.split(columns))):
            for tiles in candidates(rows, depth, columns, sms_of(ctx.device)):
                found = split_k_mm.joint_mm(a, matrices, biases, tiles)
                for number, (got, matrix) in enumerate(zip(found, matrices, strict=True)):
                    base, exact = a @ matrix, a.double() @ matrix.double()
                    if biases:
                        base, exact = torch.addmm(biases[number], a, matrix), exact + biases[number].double()
                    expect_within_budget(ctx, f"{rows} rows, {len(biases)} biases, {tiles}", got, base, exact)


def gemms_of_few_rows_give_the_same_bits(ctx: Context) -> None:
    """Two hundred calls of each tiling, in turn with others, with a cold cache now and then; and replays of a CUDA graph."""
    products = []
    for rows, depth, columns in _FEW_ROWS:
        a, matrices = joint_product(ctx, rows, columns, depth)
        joined = torch.cat([one.t() for one in matrices])
        views = [one.t() for one in joined.split(columns)]  # as vLLM has matrices: in one storage
        for tiles in candidates(rows, depth, columns, sms_of(ctx.device)):
            products.append((a, views, tiles, split_k_mm.joint_mm(a, matrices, [], tiles)))
    wrong, order = new_counter(ctx), random.Random(0)
    cold = torch.empty(2**27, dtype=torch.int8, device=ctx.device)
    for _ in range(ctx.calls(200) * len(products)):
        a, matrices, tiles, expected = order.choice(products)
        if order.random() < 0.02:
            cold.zero_()
        for got, want in zip(split_k_mm.joint_mm(a, matrices, [], tiles), expected, strict=True):
            wrong.add_((got != want).sum())
    kept: list[list[torch.Tensor]] = []

    def enqueue() -> list[tuple[torch.Tensor, torch.Tensor]]:
        kept[:] = [split_k_mm.joint_mm(a, matrices, [], tiles) for a, matrices, tiles, _ in products]
        return []

    graph, _ = capture(enqueue)
    for _ in range(20):
        for results in kept:
            for result in results:
                result.fill_(torch.nan)
        graph.replay()
        for results, (_, _, _, expected) in zip(kept, products, strict=True):
            for got, want in zip(results, expected, strict=True):
                wrong.add_((got != want).sum())
    ctx.expect(int(wrong) == 0, f"{int(wrong)} wrong elements")
    a, matrices = joint_product(ctx, 64, (2048, 512, 512), 4096)
    chosen = split_k_mm.tiles_of(a, matrices)
    ctx.expect(chosen is not None, "64 rows of queries, keys and values don't split their depth")
    if chosen is not None:
        pairs = zip(joint_mm_by_rows(a, matrices, [], [0]), split_k_mm.joint_mm(a, matrices, [], chosen), strict=True)
        ctx.expect(all(torch.equal(got, want) for got, want in pairs), "the operator of few rows has other bits")
    empty = joint_mm_by_rows(a[:0], matrices, [], [0])
    ctx.expect([one.shape for one in empty] == [(0, 2048), (0, 512), (0, 512)], "no rows: other shapes")


def turns_are_measured(ctx: Context) -> None:
    """Ranks take turns: on one GPU the trials of two would not be repeatable."""
    for rank in range(ctx.world_size):
        if rank == ctx.rank:
            rows = rows_to_measure(1, 1024)
            for gemms in (
                Gemms(4096, (7168, 7168), gated=True, halves=True),
                Gemms(4096, (2048, 512, 512), biased=True),
            ):
                turns = measured_turns(gemms, rows, ctx.device)
                ctx.expect(turns is not None, f"{gemms}: not measured")
                ctx.expect(list(turns or ()) == sorted(set(turns or ())), f"{gemms}: turns {turns} don't ascend")
            torch.cuda.synchronize(ctx.device)
        dist.barrier()


class _Mlp(torch.nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        made = {"bias": False, "device": device, "dtype": torch.bfloat16}
        self.gate, self.up = (torch.nn.Linear(4096, 7168, **made) for _ in range(2))  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.gate(x)) * self.up(x)


def compiled_gemms_are_joined(ctx: Context) -> None:
    """One graph for any number of rows: it has our kernel, and its results are as near as Inductor's."""
    torch.manual_seed(ctx.rank)
    for rank in range(ctx.world_size):
        if rank == ctx.rank:
            model = _Mlp(ctx.device).requires_grad_(False)
            with collect_reports() as reports:
                ours = torch.compile(model, backend="tw_compile", dynamic=True)
                theirs = torch.compile(model, dynamic=True)
                for rows in (640, 1, 17, 1024, 4096):
                    a = torch.randn(rows, 4096, generator=ctx.generator(rows, rank), device=ctx.device).bfloat16()
                    gate, up = (linear.weight.double().t() for linear in (model.gate, model.up))
                    exact = F.silu(a.double() @ gate) * (a.double() @ up)
                    expect_within_budget(ctx, f"{rows} rows", ours(a), theirs(a), exact)
            joined = [each.counts["gated"] for report in reports for each in report.passes if each.name == "join_gemms"]
            ctx.expect(1 in joined, f"expected a graph with a gated GEMM, got {joined}")
            torch.cuda.synchronize(ctx.device)
        dist.barrier()
