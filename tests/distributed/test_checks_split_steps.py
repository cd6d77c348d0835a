"""The check of a thousand split steps itself: fewer of them on gloo ranks, by a graph that is interpreted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from gpu.checks import split_steps
from torch._inductor.fx_passes.control_dependencies import ControlDeps

from tw_compile import Config, TWCompilePass, compat
from tw_compile.harness.problems import Context
from tw_compile.models.decoder import Decoder
from tw_compile.report import GraphReport, Split
from tw_compile.testing import GlooRanks

STEPS = 50
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
SMALL, SMALL_EXPERTS = split_steps.MODEL | SIZES, split_steps.EXPERTS | SIZES


Check = Callable[[Context, int], None]


def run_check(
    rank: int, compiled: bool, fault: str | None = None, check: Check = split_steps.thousand_split_steps
) -> Context:
    """``fault``: a "late" step of rank 1 has one wrong element, or its "first" one has, or "all" of both ranks are off."""
    assert dist.group.WORLD is not None
    ctx = Context(rank, 2, torch.device("cpu"), compat.group_name(dist.group.WORLD))
    real, calls = torch.compile, iter(range(1000))

    def interpreted(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        return compat.compile_post_grad(
            graph, inputs, TWCompilePass(Config(strict=True, split="16")), lambda graph: None
        )

    def compile_(decoder: Decoder, backend: str, dynamic: bool, options: dict[str, Any]) -> Any:
        assert backend == "tw_compile" and options["tw_compile.split"] == "16" and options["triton.cudagraphs"]
        model = real(decoder, backend=interpreted, dynamic=dynamic) if compiled else decoder

        def forward(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden, residual = model(ids)
            number = next(calls)
            if rank == 1 and (fault, number) in (("late", 30), ("first", 2)):
                hidden[0, -1, -1] += 1
            if fault == "all":
                residual[0, 0] += 0.1
            return hidden, residual

        return forward

    with (
        mock.patch.object(torch, "compile", compile_),
        # Inductor lowers it, so it has no kernel.
        mock.patch.object(ControlDeps, "__call__", lambda self, deps, run, *args, **named: run(*args, **named)),
        mock.patch.object(torch.cuda, "synchronize"),
        mock.patch.object(compat, "delay_stream") as delay,
        mock.patch.multiple(split_steps, MODEL=SMALL, EXPERTS=SMALL_EXPERTS, TOKENS=33, FIRST=16),
    ):
        check(ctx, STEPS)
    assert 0.2 * STEPS < delay.call_count < 0.6 * STEPS
    return ctx


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(split_steps.thousand_split_steps, id="dense"),
        pytest.param(split_steps.thousand_split_steps_of_experts, id="experts", marks=pytest.mark.full),
    ],
)
def test_fifty_steps_have_the_bits_of_the_first(gloo_ranks: GlooRanks, check: Check) -> None:
    contexts = gloo_ranks.run(run_check, True, None, check)
    assert [(ctx.failures, ctx.counts) for ctx in contexts] == [([], {"steps": STEPS})] * 2


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("late", "1 wrong elements"),
        ("first", "hidden of the first steps: differs from rank 0"),
        ("all", "residual of the first steps: error"),
    ],
)
def test_a_step_that_is_wrong_is_found(gloo_ranks: GlooRanks, fault: str, message: str) -> None:
    contexts = gloo_ranks.run(run_check, False, fault)
    assert any(failure.startswith(message) for failure in contexts[1].failures), contexts


def test_a_model_that_is_not_split_is_found(gloo_ranks: GlooRanks) -> None:
    contexts = gloo_ranks.run(run_check, False)
    assert [ctx.failures for ctx in contexts] == [["expected one graph, got 0"]] * 2


def test_a_graph_that_is_split_otherwise_is_found() -> None:
    ctx = Context(0, 2, torch.device("cpu"), "")
    split_steps.expect_split(ctx, [GraphReport(split=Split("160", "off", reason="no_tokens"))])
    unfused, otherwise = ctx.failures
    assert unfused.startswith("not all fused") and otherwise.startswith("split otherwise")
