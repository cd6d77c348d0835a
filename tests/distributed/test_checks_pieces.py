"""The check of pieces in graphs of their own itself: on gloo ranks, without CUDA graphs."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from gpu.checks import pieces

from tw_compile import compat
from tw_compile.harness.problems import Context
from tw_compile.kernels.collective import residual_seam
from tw_compile.testing import GlooRanks

STEPS = 20


def run_check(rank: int, fault: str = "") -> Context:
    assert dist.group.WORLD is not None
    ctx = Context(rank, 2, torch.device("cpu"), compat.group_name(dist.group.WORLD))
    real, entered = residual_seam._enter_residual, iter(range(10_000))

    def enter(left: torch.Tensor, name: str, rows_dtype: torch.dtype | None = None) -> torch.Tensor:
        residual = real(left, name, rows_dtype)
        if rows_dtype is not None and (fault, rank) == ("rows", 1):
            residual[0, 0] += 1
        if rows_dtype is not None and fault == "late" and next(entered) == 60:
            residual[0, 0] += 1
        return residual

    with (
        mock.patch.object(residual_seam.enter_residual, "direct", enter),
        mock.patch.object(compat, "delay_stream"),
        mock.patch.multiple(
            pieces, HIDDEN=64, LAYERS=3, SIZES=((33, "16", False), (7, "off", False), (7, "off", True))
        ),
    ):
        if fault == "whole":
            with mock.patch("tw_compile.passes.fusion.fuse.find_seam", return_value=None):
                pieces.pieces_in_graphs_of_their_own(ctx, STEPS, "gloo")
        else:
            pieces.pieces_in_graphs_of_their_own(ctx, STEPS, "gloo")
    return ctx


def test_pieces_have_the_bits_of_the_first_step(gloo_ranks: GlooRanks) -> None:
    contexts = gloo_ranks.run(run_check)
    assert [(ctx.failures, ctx.counts) for ctx in contexts] == [([], {"steps": STEPS})] * 2


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "message"),
    [("rows", "7 tokens, split off: error"), ("late", "wrong elements"), ("whole", "pieces enter otherwise")],
)
def test_a_wrong_residual_is_found(gloo_ranks: GlooRanks, fault: str, message: str) -> None:
    contexts = gloo_ranks.run(run_check, fault)
    assert any(message in failure for ctx in contexts for failure in ctx.failures), contexts
