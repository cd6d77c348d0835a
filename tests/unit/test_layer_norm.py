"""LayerNorm behind the sum: its definition, its row code in Triton, its operators, and what passes make of them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tw_compile import Config
from tw_compile.graph.predicates import operator_name
from tw_compile.kernels.collective import ops
from tw_compile.kernels.collective.reference import add_layer_norm
from tw_compile.kernels.collective.spec import FP8, NormSpec
from tw_compile.testing import Rewritten, assert_within_budget, count_ops, fake_process_group, rewrite

T, H, EPS = 5, 96, 1e-5
FP32, FP64 = torch.float32, torch.float64
DTYPES = [torch.bfloat16, torch.float16, FP32]
layer_norm = torch.nn.functional.layer_norm


def spec(dtype: torch.dtype, offset: float = 0.0, cast: torch.dtype | None = None) -> NormSpec:
    return NormSpec(EPS, offset, cast, dtype, dtype, epilogue="layer_norm")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FP64)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_weight", [False, True])
def test_float64_is_torchs_layer_norm(with_weight: bool, with_bias: bool) -> None:
    x, residual, bias, weight = normal(T, H), normal(T, H, seed=1), normal(H, seed=2), normal(H, seed=3)
    given_weight = weight if with_weight else None
    norm_bias = normal(H, seed=4) if with_bias else None
    hidden, h = add_layer_norm(x, residual, bias, given_weight, replace(spec(FP64), scale=0.5), None, norm_bias)
    torch.testing.assert_close(h, 0.5 * x + bias + residual, rtol=0, atol=0)
    torch.testing.assert_close(hidden, layer_norm(h, (H,), given_weight, norm_bias, EPS), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=40, deadline=None)
@given(mean=st.floats(-3e4, 3e4), deviation=st.floats(0.5, 20.0), seed=st.integers(0, 2**16))
def test_a_large_mean_costs_no_digits(dtype: torch.dtype, mean: float, deviation: float, seed: int) -> None:
    """As near to float64 as torch's own LayerNorm of the same rows, wherever the mean is."""
    x = (mean + deviation * normal(T, H, seed=seed)).to(dtype)
    weight = normal(H, seed=1).to(dtype)
    hidden, _ = add_layer_norm(x, None, None, weight, spec(dtype))
    want = layer_norm(x.double(), (H,), weight.double(), None, EPS)
    unfused = layer_norm(x.float(), (H,), weight.float(), None, EPS).to(dtype)
    if dtype == FP32:
        # Both have float32's error in the mean, in units of the deviation; which of the two is luckier differs from row to row.
        allowed = 4 * torch.finfo(FP32).eps * (1 + abs(mean) / deviation) * float(want.abs().max() + 1)
        assert float((hidden - want).abs().max()) <= allowed
    else:
        assert_within_budget(hidden, unfused, want)


def test_a_weight_is_rounded_to_as_rms_norms_is() -> None:
    x, weight = normal(T, H).bfloat16(), normal(H, seed=1).bfloat16()
    hidden, _ = add_layer_norm(x, None, None, weight, spec(torch.bfloat16, cast=torch.bfloat16))
    assert torch.equal(hidden, layer_norm(x.float(), (H,), None, None, EPS).bfloat16() * weight)
    shifted, _ = add_layer_norm(x, None, None, weight, spec(torch.bfloat16, offset=1.0))
    expected = layer_norm(x.float(), (H,), weight.float() + 1.0, None, EPS)
    torch.testing.assert_close(shifted, expected.bfloat16(), rtol=2**-7, atol=0)


def test_rows_of_one_value_are_zeros() -> None:
    hidden, _ = add_layer_norm(torch.full((T, H), 3.0), None, None, None, spec(FP32))
    assert not hidden.any()


def test_float8_results_are_scaled() -> None:
    x, scale = normal(T, H).float(), torch.tensor([0.02])
    hidden, _ = add_layer_norm(x, None, None, None, replace(spec(FP32), hidden_dtype=FP8), scale)
    expected = (layer_norm(x, (H,), None, None, EPS) / scale).clamp(-448, 448)
    torch.testing.assert_close(hidden.float(), expected, rtol=0.07, atol=0.01)


def test_operators_are_defined_with_the_schema_of_rms_norms() -> None:
    starts = [*ops.STARTS, *ops.MM_STARTS]
    assert [start._schema.name.removeprefix("tw_compile::") for start in starts] == [
        "all_reduce_rms_norm_start",
        "all_reduce_layer_norm_start",
        "all_reduce_rms_norm_quant_start",
        "all_reduce_layer_norm_quant_start",
        "mm_all_reduce_rms_norm_start",
        "mm_all_reduce_layer_norm_start",
        "mm_all_reduce_rms_norm_quant_start",
        "mm_all_reduce_layer_norm_quant_start",
    ]
    assert ops.STARTS[0] is ops.start and ops.MM_STARTS[0] is ops.mm_start
    x, residual, weight = normal(T, H).float(), normal(T, H, seed=1).float(), normal(H, seed=2).float()
    with fake_process_group(2):
        rest = (residual, None, weight, EPS, 0.0, None, FP32, FP32, False, "replicated", "0", "gloo", 0)
        results = ops.STARTS[1](x, *rest)
        ops.wait_(*results, [], "0", 0)
    hidden, h = results  # a fake group sums nothing
    torch.testing.assert_close(h, x + residual)
    torch.testing.assert_close(hidden, layer_norm(x + residual, (H,), weight, None, EPS))


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.down = nn.Linear(64, 64, bias=False)
        self.norm = norm

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        partial = self.down(x)
        dist.all_reduce(partial)
        residual = residual + partial
        return self.norm(residual), residual


def rewritten(norm: nn.Module, **options: Any) -> Rewritten:
    x = torch.empty(64, 64, dtype=torch.bfloat16)
    return rewrite(Block(norm).bfloat16(), (x, x), config=Config(**options))


@pytest.mark.parametrize("absorb_mm", ["never", "always"])
def test_a_fused_layer_norm_is_split_as_an_rms_norm_is(absorb_mm: Any) -> None:
    result = rewritten(nn.LayerNorm(64, bias=False), split=32, absorb_mm=absorb_mm)
    like = rewritten(nn.RMSNorm(64), split=32, absorb_mm=absorb_mm)
    assert count_ops(result.after.graph, "var_mean") == 0
    assert result.report.split is not None and like.report.split is not None
    assert result.report.split.joins == like.report.split.joins == {}
    operators = [operator_name(node).replace("layer_norm", "rms_norm") for node in result.after.graph.nodes]
    assert operators == [operator_name(node) for node in like.after.graph.nodes]
    assert any("layer_norm_start" in operator_name(node) for node in result.after.graph.nodes)


@pytest.mark.parametrize("elementwise_affine", [False, True])
def test_a_bias_of_its_own_is_an_operand(elementwise_affine: bool) -> None:
    """Which the wait keeps alive, too."""
    result = rewritten(nn.LayerNorm(64, elementwise_affine=elementwise_affine), absorb_mm="never")
    assert result.report.refusals == {} and count_ops(result.after.graph, "var_mean") == 0
    (start,) = (node for node in result.after.graph.nodes if node.target in ops.STARTS)
    (wait,) = (node for node in result.after.graph.nodes if node.target == ops.wait_)
    assert ("norm_bias" in start.kwargs) is elementwise_affine
    if elementwise_affine:
        weight, bias = start.args[3], start.kwargs["norm_bias"]
        assert weight.op == bias.op == "placeholder" and weight is not bias and {weight, bias} <= {*wait.args[2]}


@pytest.mark.parametrize("absorb_mm", ["never", "always"])
def test_a_layer_norm_with_a_bias_is_split_as_one_without(absorb_mm: Any) -> None:
    result, like = (rewritten(nn.LayerNorm(64, bias=bias), split=32, absorb_mm=absorb_mm) for bias in (True, False))
    assert result.report.split is not None and result.report.split.joins == {}
    names = (
        [operator_name(node) for node in each.after.graph.nodes if node.op != "placeholder"] for each in (result, like)
    )
    assert next(names) == next(names)
    starts = [node for node in result.after.graph.nodes if "norm_bias" in node.kwargs]
    assert starts and {node.kwargs["norm_bias"].op for node in starts} == {"placeholder"}


class TwoSums(nn.Module):
    """Attention and MLP beside each other, each with a bias that is added to its sum, as GPT-NeoX and Phi have them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(64, 64, bias=False) for _ in range(2))
        self.biases = nn.ParameterList(torch.randn(64) for _ in range(2))
        self.norm = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sums = []
        for linear, bias in zip((self.first, self.second), self.biases, strict=True):
            partial = linear(x)
            dist.all_reduce(partial)
            sums.append(partial + bias)
        h = sums[0] + sums[1] + residual
        return self.norm(h), h


def test_two_sums_with_biases_travel_as_one_message() -> None:
    x = torch.empty(64, 64, dtype=torch.bfloat16)
    result = rewrite(TwoSums().bfloat16(), (x, x), config=Config())
    assert [site.decision for site in result.report.sites] == ["fused", "fused"]
    assert result.report.sites[0].form == "all_reduce+all_reduce+bias+bias+residual+layer_norm[fp32+bias]"
    (start,) = (node for node in result.after.graph.nodes if node.target in ops.STARTS)
    assert start.args[2].meta["val"].dtype == FP32 and start.args[2].meta["val"].shape == (64,)
    assert count_ops(result.after.graph, "all_reduce.default") == 0


TRITON = """
import torch
from tw_compile.kernels.collective.norm_kernel import add_layer_norm_cuda
from tw_compile.kernels.collective.reference import add_layer_norm
from tw_compile.kernels.collective.spec import NormSpec

for weighted, biased in ((False, False), (True, False), (True, True), (False, True)):
    for mean in (0.0, 3000.0):
        x, residual = (torch.randn(3, 100) for _ in range(2))  # 100 columns of a block of 128
        x += mean
        weight = torch.randn(100) if weighted else None
        norm_bias = torch.randn(100) if biased else None
        norm = NormSpec(1e-5, 0.0, None, torch.float32, torch.float32, epilogue="layer_norm")
        hidden, h = torch.empty_like(x), torch.empty_like(x)
        add_layer_norm_cuda(x, residual, None, weight, norm, hidden, h, None, norm_bias)
        want_hidden, want_h = add_layer_norm(x, residual, None, weight, norm, None, norm_bias)
        torch.testing.assert_close(h, want_h)
        torch.testing.assert_close(hidden, want_hidden, rtol=1e-5, atol=1e-5 if not mean else 3e-3)
print("same")
"""


def test_triton_row_in_the_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", TRITON], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout == "same\n", done.stderr
