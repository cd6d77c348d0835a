"""What counts as an RMSNorm, node by node."""

from __future__ import annotations

import pytest
import torch
from graph_builder import GraphBuilder, aten, prims

from tw_compile.passes.fusion.norm import NormMatch, match_norm
from tw_compile.passes.reasons import Refusal, Refused


def matched(found: NormMatch | Refused | None) -> NormMatch:
    assert isinstance(found, NormMatch), found
    return found


def test_interior_runs_from_the_square_to_the_output() -> None:
    b = GraphBuilder()
    h, weight = b.input(3, 8, dtype=torch.bfloat16), b.input(8, dtype=torch.bfloat16)
    normed = b.rms_norm(h, weight, "torch")
    b.output(normed)
    norm = matched(match_norm(h))
    nodes = list(b.graph.nodes)
    assert norm.interior == tuple(nodes[nodes.index(h) + 3 : nodes.index(normed) + 1])
    assert norm.interior[-1] is norm.output is normed


def test_cast_before_the_weight_is_kept() -> None:
    b = GraphBuilder()
    h, weight = b.input(3, 8, dtype=torch.bfloat16), b.input(8, dtype=torch.bfloat16)
    b.output(b.rms_norm(h, weight, "hf"))
    assert matched(match_norm(h)).cast_before_weight == torch.bfloat16


def test_offset_is_taken_out_of_a_float32_weight_only() -> None:
    for dtype, offset in ((torch.float32, 1.0), (torch.bfloat16, 0.0)):
        b = GraphBuilder()
        h, weight = b.input(3, 8, dtype=torch.bfloat16), b.input(8, dtype=dtype)
        shifted = b.add(weight, 1.0)
        b.output(b.cast(b.call(aten.mul.Tensor, b.scale(h), shifted), torch.bfloat16))
        norm = matched(match_norm(h))
        assert norm.weight_offset == offset
        assert norm.weight is (weight if offset else shifted)


def test_upcast_of_the_weight_is_left_to_the_operator() -> None:
    b = GraphBuilder()
    h, weight = b.input(3, 8, dtype=torch.bfloat16), b.input(8, dtype=torch.bfloat16)
    upcast = b.call(prims.convert_element_type.default, weight, torch.float32)
    b.output(b.cast(b.call(aten.mul.Tensor, b.scale(h), upcast), torch.bfloat16))
    assert matched(match_norm(h)).weight is weight


def test_elementwise_factor_is_not_the_weight() -> None:
    b = GraphBuilder()
    h, gate = b.input(3, 8), b.input(3, 8)
    y = b.scale(h)
    b.output(b.call(aten.mul.Tensor, y, gate))
    norm = matched(match_norm(h))
    assert norm.weight is None and norm.output is y


def test_factor_of_one_element_is_not_the_weight() -> None:
    b = GraphBuilder(fake=False)
    h = b.input(3, 8)
    b.rms_norm(h, b.input(1), "torch")
    match = match_norm(h)
    assert isinstance(match, NormMatch) and match.weight is None and match.output is match.interior[-1]


def test_values_normalised_must_be_those_that_were_squared() -> None:
    b = GraphBuilder()
    h, other = b.input(3, 8), b.input(3, 8)
    variance = b.call(aten.mean.dim, b.call(aten.pow.Tensor_Scalar, h, 2), [-1], True)
    b.output(b.call(aten.mul.Tensor, other, b.call(aten.rsqrt.default, b.add(variance, 1e-5))))
    assert match_norm(h) is None


def test_broadcast_between_ranks_of_view_is_no_norm() -> None:
    """``[2, 1, 8] * [2, 1]`` is ``[2, 2, 8]``: not one scale per row."""
    b = GraphBuilder()
    h = b.input(2, 8)
    variance = b.call(aten.mean.dim, b.call(aten.pow.Tensor_Scalar, h, 2), [-1], True)
    inverse = b.call(aten.rsqrt.default, b.add(variance, 1e-5))
    b.output(b.call(aten.mul.Tensor, b.view(h, 2, 1, 8), inverse))
    assert match_norm(h) is None


@pytest.mark.parametrize("power", [3, 1.5, -2])
def test_other_powers_are_no_norm(power: float) -> None:
    b = GraphBuilder()
    h = b.input(3, 8)
    variance = b.call(aten.mean.dim, b.call(aten.pow.Tensor_Scalar, h, power), [-1], True)
    b.output(b.call(aten.mul.Tensor, h, b.call(aten.rsqrt.default, b.add(variance, 1e-5))))
    assert match_norm(h) is None


def test_nothing_that_looks_like_a_norm() -> None:
    b = GraphBuilder()
    h = b.input(3, 8)
    b.output(b.call(aten.relu.default, h))
    assert match_norm(h) is None


@pytest.mark.parametrize("first", [False, True])
def test_the_product_of_two_tensors_is_no_square(first: bool) -> None:
    b = GraphBuilder()
    h, other = b.input(3, 8), b.input(3, 8)
    product = b.call(aten.mul.Tensor, *((h, other) if first else (other, h)))
    variance = b.call(aten.mean.dim, product, [-1], True)
    b.output(b.call(aten.mul.Tensor, h, b.call(aten.rsqrt.default, b.add(variance, 1e-5))))
    assert match_norm(h) is None


@pytest.mark.parametrize("power", [-1, 0.5])
def test_other_powers_of_the_variance_are_no_norm(power: float) -> None:
    b = GraphBuilder()
    h = b.input(3, 8)
    variance = b.call(aten.mean.dim, b.call(aten.pow.Tensor_Scalar, h, 2), [-1], True)
    b.output(b.call(aten.mul.Tensor, h, b.call(aten.pow.Tensor_Scalar, b.add(variance, 1e-5), power)))
    assert match_norm(h) is None


@pytest.mark.parametrize(
    ("dtype", "device", "known"),
    [(torch.float64, "cpu", True), (torch.int64, "cpu", False), (torch.float64, "meta", False)],
)
def test_eps_may_be_a_number_that_the_host_gives(dtype: torch.dtype, device: str, known: bool) -> None:
    b = GraphBuilder(fake=False)
    h, eps = b.input(3, 8), b.input(dtype=dtype, device=device)
    variance = b.call(aten.mean.dim, b.call(aten.pow.Tensor_Scalar, h, 2), [-1], True)
    b.output(b.call(aten.mul.Tensor, h, b.call(aten.rsqrt.default, b.add(variance, eps))))
    found = match_norm(h)
    if known:
        assert matched(found).eps is eps
    else:
        assert isinstance(found, Refused) and found.reason == Refusal.EPS_NOT_CONSTANT


def test_a_wider_copy_of_the_result_is_no_part_of_the_norm() -> None:
    b = GraphBuilder()
    h, weight = b.input(3, 8, dtype=torch.bfloat16), b.input(8, dtype=torch.bfloat16)
    normed = b.rms_norm(h, weight, "hf")
    b.output(b.cast(normed, torch.float32))
    assert matched(match_norm(h)).output is normed


def test_offset_behind_a_cast_stays_in_the_weight() -> None:
    """The operator adds no offset to what it multiplies rounded values by."""
    b = GraphBuilder()
    h, weight = b.input(3, 8, dtype=torch.bfloat16), b.input(8)
    shifted = b.add(weight, 1.0)
    b.output(b.call(aten.mul.Tensor, b.cast(b.scale(h), torch.bfloat16), shifted))
    norm = matched(match_norm(h))
    assert (norm.weight, norm.weight_offset, norm.cast_before_weight) == (shifted, 0.0, torch.bfloat16)


@pytest.mark.parametrize("offset", [False, True])
def test_a_rounding_of_the_weight_is_not_left_out(offset: bool) -> None:
    b = GraphBuilder()
    h, weight = b.input(3, 8), b.input(8, dtype=torch.float64)
    rounded = b.cast(weight, torch.float32)
    b.output(b.call(aten.mul.Tensor, b.scale(h), b.add(rounded, 1.0) if offset else rounded))
    norm = matched(match_norm(h))
    assert norm.weight is rounded and norm.weight_offset == float(offset)


def test_a_weight_that_widens_the_rows_is_refused() -> None:
    b = GraphBuilder()
    h = b.input(3, 1)
    b.output(b.rms_norm(h, b.input(8), "torch"))
    found = match_norm(h)
    assert isinstance(found, Refused) and found.reason == Refusal.WEIGHT_NOT_PROVABLE
