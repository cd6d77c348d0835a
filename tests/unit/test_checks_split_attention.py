"""The check of cut attention itself, by kernels of the CPU: right alignment passes, the wrong corner does not."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from gpu.checks.split_attention import CUTS, KERNELS, Kernel, compare, sliding_window

from tw_compile.harness.problems import Context
from tw_compile.passes.split.rules import attention as rules_attention
from tw_compile.planning.suffix import pays

aten = torch.ops.aten
ON_CPU = aten._scaled_dot_product_flash_attention_for_cpu.default
SIZES = (16, 4, 32)  # so many numbers a token that the errors of one token are no matter of chance
FEW = (4, 1, 32)  # enough for halves of 100 tokens and more


def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return ON_CPU(query, key, value, 0.0, True)[0]


def windowed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return ON_CPU(query, key, value, attn_mask=sliding_window(query))[0]


def context() -> Context:
    return Context(0, 1, torch.device("cpu"), "")


@pytest.mark.full
@pytest.mark.parametrize(("first", "tokens"), CUTS[:-1])
def test_prefix_and_suffix_are_within_the_budget(first: int, tokens: int) -> None:
    ctx = context()
    sizes = FEW if min(first, tokens - first) >= 100 else SIZES
    for dtype in (torch.bfloat16, torch.float32):
        compare(ctx, Kernel(causal), dtype, sizes, first, tokens)
        compare(ctx, Kernel(windowed, window=100), dtype, sizes, first, tokens)
    assert ctx.failures == [] and ctx.counts == {"cuts": 4}


@pytest.mark.full
@pytest.mark.usefixtures("cudnn_on_cpu")
@pytest.mark.parametrize(("first", "tokens"), CUTS)
def test_two_roundings_of_cudnn_are_within_the_budget(first: int, tokens: int) -> None:
    ctx = context()
    for dtype in KERNELS["cudnn"].dtypes:
        compare(ctx, KERNELS["cudnn"], dtype, (4, 2, 64), first, tokens)
    assert ctx.failures == [] and ctx.counts == {"cuts": 2}


def test_cuts_cover_our_own_kernel_in_blocks_of_both_sizes_and_the_merge() -> None:
    from tw_compile.kernels.attention.suffix_kernel import SMALL, WIDE, blocks_for

    found = set()
    for (heads, _), (first, tokens) in product(KERNELS["cudnn"].heads, CUTS):
        for rows, keys in ((first, first), (tokens - first, tokens)):
            found.add((blocks_for(rows, keys, heads) if pays(keys, 128) else None, keys > rows))
    assert found == {(SMALL, False), (SMALL, True), (WIDE, False), (WIDE, True), (None, True)}


def test_a_suffix_that_is_aligned_to_the_wrong_corner_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules_attention, "suffix_of", lambda call: rules_attention.suffix_by_itself)
    ctx = context()
    compare(ctx, Kernel(causal), torch.bfloat16, SIZES, 30, 63)
    (failure,) = ctx.failures
    assert "suffix: error" in failure


def test_a_join_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules_attention, "suffix_of", lambda call: None)
    ctx = context()
    compare(ctx, Kernel(causal), torch.bfloat16, SIZES, 30, 63)
    (failure,) = ctx.failures
    assert "attention_kernel" in failure
