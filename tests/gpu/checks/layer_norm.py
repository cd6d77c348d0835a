"""Checks of LayerNorm behind the sum, with and without weight and bias of its own, by every algorithm."""

from __future__ import annotations

from dataclasses import replace

import torch

from gpu.checks.accuracy import accuracy
from gpu.checks.transports import ALGORITHMS, IN_SLOT, NEED_WHOLE_RESIDUALS, subject
from tw_compile.harness.problems import Context, Form, expect_right, make_problem
from tw_compile.kernels.collective.fields import LAYER_NORM

_FP32 = torch.float32
_PLAIN = Form(weight="plain", epilogue=LAYER_NORM)
_BIASED = replace(_PLAIN, norm_bias=True)
FORMS = {
    "olmo": replace(_PLAIN, weight="none", residual="none", out="sharded", residual_dtype=_FP32),
    "cohere": replace(_PLAIN, weight="cast", out="sharded"),
    "weight": replace(_PLAIN, residual="sharded", out="sharded", residual_dtype=_FP32),
    "phi": replace(_BIASED, bias=True),
    "starcoder2": replace(_BIASED, residual="sharded", out="sharded", residual_dtype=_FP32, bias=True),
    "nemotron": replace(_BIASED, dtype=torch.float16, weight="offset", out="none"),
    "bias_alone": replace(_BIASED, weight="none", residual="none"),
    "fp32": replace(_BIASED, dtype=_FP32, residual="sharded", out="replicated"),
    "fp8": replace(_BIASED, hidden_scale=0.02),
}
TOKENS = (1, 2, 5, 63, 64, 1025)
SHORT_ROWS = ("cohere", "phi")
"""Forms that are checked with rows of 2880, which do not fill the threads that they have; the others with rows of 4096."""
NAMES = [(name, form) for name in ALGORITHMS for form in FORMS]


def served(name: str, form: Form) -> bool:
    """Alone, a shard of the residual is nothing for one-shot."""
    return name not in NEED_WHOLE_RESIDUALS or form.residual != "sharded"


def layer_norm_accuracy(ctx: Context, transport: str, form: str) -> None:
    """Error budget, equal bits on all ranks, equal bits on a second run; odd token counts, and fewer tokens than ranks."""
    for tokens in TOKENS:
        accuracy(ctx, transport, tokens, 2880 if form in SHORT_ROWS else 4096, FORMS[form])


def layer_norm_of_rows_whose_mean_is_large(ctx: Context, transport: str) -> None:
    """``mean(h^2) - mean(h)^2`` would have no digits left."""
    form = replace(_BIASED, residual_dtype=_FP32)
    problem = make_problem(ctx, 63, 4096, form)
    problem.residual += 3000.0
    expect_right(ctx, problem, subject(transport).call(ctx, problem.request(ctx)), "with a mean of 3000")


def layer_norm_by_the_operators(ctx: Context, transport: str) -> None:
    """Calls of one form with vectors of their own: those behind the first take the short way, and get their own bias."""
    for form in (_BIASED, _PLAIN, _BIASED):
        for seed in range(3):
            problem = make_problem(ctx, 65, 4096, form, seed)
            results = subject(transport).call(ctx, problem.request(ctx), beside=lambda: None)
            expect_right(ctx, problem, results, f"of call {seed}, {'with' if form.norm_bias else 'without'} a bias")


def layer_norm_of_a_product(ctx: Context, transport: str) -> None:
    """The operator that multiplies, which may write its product to where peers read it."""
    problem = make_problem(ctx, 65, 4096, _BIASED)
    own = ctx.generator(65, ctx.rank + 1)
    a = torch.randn((65, 64), generator=own, device=ctx.device).to(problem.x.dtype)
    b = torch.randn((64, 4096), generator=own, device=ctx.device).to(problem.x.dtype)
    problem = replace(problem, x=a @ b)
    expect_right(ctx, problem, subject(transport).call(ctx, problem.request(ctx), (a, b)), "of a product")


OF_EVERY_ALGORITHM = (layer_norm_of_rows_whose_mean_is_large, layer_norm_of_a_product)
BY_THE_OPERATORS = [name for name in ALGORITHMS if name not in IN_SLOT]
