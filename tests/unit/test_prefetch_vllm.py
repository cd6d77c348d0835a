"""Weights of vLLM's quantised matmuls, handed to the fused calls before them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.fx as fx
from test_rules_vllm_operators import HIDDEN, TOKENS, Graph, vllm_operators

from tw_compile.kernels.collective import ops
from tw_compile.passes.prefetch import prefetch_weights
from tw_compile.testing import fake_process_group

__all__ = ["vllm_operators"]  # a fixture
FP32 = torch.float32


def cutlass(b: Graph, hidden: fx.Node) -> fx.Node:
    return b.scaled_mm(*b.by_token(hidden))


def cutlass_by_one_scale(b: Graph, hidden: fx.Node) -> fx.Node:
    scale, codes = b.input(1), b.empty(TOKENS, HIDDEN, dtype=torch.float8_e4m3fn)
    made = b.writes("static_scaled_fp8_quant", result=codes, input=hidden, scale=scale, group_shape=None)
    return b.scaled_mm(b.part(made, 1), scale)


def marlin(b: Graph, hidden: fx.Node) -> fx.Node:
    return b.marlin(hidden)


@pytest.mark.parametrize("matmul", [cutlass, cutlass_by_one_scale, marlin])
def test_the_weight_of_a_quantised_matmul_is_prefetched(matmul: Callable[[Graph, fx.Node], fx.Node]) -> None:
    with fake_process_group(2):
        b = Graph()
        given = (1e-5, 0.0, None, FP32, FP32, False, "none", "0", "p2p", 0)
        start = b.call(ops.start, b.x, None, None, b.weight, *given)
        others = set(b.inputs)
        b.graph.output((matmul(b, b.part(start, 0)),))
        assert prefetch_weights(b.graph, 1000, None) == {"prefetching": 1}
    b.graph.lint()
    (weight,) = start.kwargs["prefetch"]  # type: ignore[misc]
    assert isinstance(weight, fx.Node) and weight not in others
    assert tuple(weight.meta["val"].shape) == (HIDDEN, HIDDEN)
