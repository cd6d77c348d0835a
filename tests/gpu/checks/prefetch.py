"""Checks of calls that prefetch weights: the same bits as without, whatever is asked for, in CUDA graphs, too."""

from __future__ import annotations

from dataclasses import replace

import torch

from gpu.checks.stress import capture
from gpu.checks.transports import subject
from tw_compile.harness.problems import Context, Form, Results, expect_right, make_problem
from tw_compile.kernels.algorithms import ALGORITHMS as REGISTRY
from tw_compile.kernels.collective.prefetch import MOST_TOKENS
from tw_compile.kernels.collective.spec import Request

KERNELS = [checked.name for entry in REGISTRY if entry.prefetches for checked in entry.checked]
TOKENS = (1, 2, 5, 63, MOST_TOKENS, MOST_TOKENS + 1)
BUDGETS = (16, 5000, 8 * 2**20, 64 * 2**20)
"""Less than a piece, no multiple of one, what a profile may say, and more than L2 and the weights have."""
REPLAYS = 40


def make_weights(ctx: Context, seed: int) -> list[torch.Tensor]:
    """By rows, and by columns as float8 weights are; 24 and 8 MiB, other ones on each rank."""
    generator = ctx.generator(seed, ctx.rank)
    rows = torch.randn((3072, 4096), generator=generator, device=ctx.device).bfloat16()
    columns = torch.randn((1024, 4096), generator=generator, device=ctx.device).bfloat16().t()
    return [rows, columns]


def same_bits(ctx: Context, got: Results, want: Results, what: str) -> None:
    for name, left, right in zip(("hidden", "residual"), got, want, strict=True):
        equal = torch.equal(left.view(torch.uint8), right.view(torch.uint8))
        ctx.expect(equal, f"{name} {list(right.shape)}: other bits {what}")


def prefetch_changes_no_bit(ctx: Context, transport: str) -> None:
    """Calls of one form with weights of their own: those behind the first take the short way. Weights stay as they were."""
    used, nothing = subject(transport), lambda: None
    weights = [make_weights(ctx, seed) for seed in range(3)]
    before = [[one.clone() for one in of_call] for of_call in weights]
    for tokens in TOKENS:
        problem = make_problem(ctx, tokens, 4096, Form())
        request = problem.request(ctx)
        want = used.call(ctx, request, beside=nothing)
        expect_right(ctx, problem, want, f"of {tokens} tokens without prefetch")
        for budget in BUDGETS:
            for of_call in weights:
                asked = replace(request, prefetch=of_call, prefetch_bytes=budget)
                same_bits(ctx, used.call(ctx, asked, beside=nothing), want, f"with {budget} bytes prefetched")
    for of_call, kept in zip(weights, before, strict=True):
        ctx.expect(all(map(torch.equal, of_call, kept)), "a weight has changed")


def prefetch_captured_and_replayed(ctx: Context, transport: str) -> None:
    """Calls, each before the matmul that reads what it prefetches, in a graph: as the same without prefetch."""
    used = subject(transport)
    problems = [make_problem(ctx, tokens, 4096, Form(), tokens) for tokens in (1, 5, 64)]
    weights = [make_weights(ctx, seed)[0] for seed in range(3)]

    def enqueue(budget: int) -> list[Results]:
        found: list[Results] = []
        for problem, weight in zip(problems, weights, strict=True):
            request: Request = problem.request(ctx)
            if budget:
                request = replace(request, prefetch=[weight], prefetch_bytes=budget)
            hidden, residual = used.start(ctx, request, beside=lambda: None)
            found.append((hidden @ weight.t(), residual))
        return found

    want = enqueue(0)
    torch.cuda.synchronize()
    enqueue(BUDGETS[-2])  # what it needs is made before the capture
    graph, results = capture(lambda: enqueue(BUDGETS[-2]))
    for _ in range(REPLAYS):
        for result in results:
            for tensor in result:
                tensor.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for result, expected in zip(results, want, strict=True):
            same_bits(ctx, result, expected, "of a replay")


def prefetch_of_weights_that_are_given_back(ctx: Context, transport: str) -> None:
    """Nobody keeps them for the call: their memory may be another tensor's when it is asked for."""
    used = subject(transport)
    problem = make_problem(ctx, 5, 4096, Form())
    request = problem.request(ctx)
    want = used.call(ctx, request, beside=lambda: None)
    for seed in range(REPLAYS):
        asked = replace(request, prefetch=make_weights(ctx, seed), prefetch_bytes=BUDGETS[-1])
        results = used.start(ctx, asked, beside=lambda: None)
        del asked
        torch.full((4096, 4096), float(seed), device=ctx.device)
        same_bits(ctx, results, want, "where weights were given back")


OF_EVERY_KERNEL = (
    prefetch_changes_no_bit,
    prefetch_captured_and_replayed,
    prefetch_of_weights_that_are_given_back,
)
