"""The definition every kernel is tested against, tested against what models compute."""

from __future__ import annotations

import pytest
import torch

from tw_compile.kernels.collective.reference import add_rms_norm
from tw_compile.kernels.collective.spec import NormSpec
from tw_compile.testing import assert_within_budget

T, H, EPS = 7, 96, 1e-5
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(T, H, generator=generator).to(dtype) for _ in range(2)]
    vectors = [torch.randn(H, generator=generator).to(dtype) for _ in range(2)]
    return rows[0], rows[1], vectors[0], vectors[1]


def spec(dtype: torch.dtype, offset: float = 0.0, cast: torch.dtype | None = None) -> NormSpec:
    return NormSpec(EPS, offset, cast, dtype, dtype)


def exact(*tensors: torch.Tensor | None, offset: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """``(hidden, h)`` in float64, written down independently."""
    reduced, residual, bias, weight = (None if one is None else one.double() for one in tensors)
    assert reduced is not None
    h = sum((one for one in (residual, bias) if one is not None), start=reduced)
    hidden = h / torch.sqrt((h * h).sum(-1, keepdim=True) / H + EPS)
    return (hidden if weight is None else hidden * (weight + offset)), h


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["no_weight", "fp32", "gemma", "hf"])
def test_error_is_that_of_rounding(form: str, dtype: torch.dtype) -> None:
    reduced, residual, weight, bias = inputs(dtype)
    offset, cast = float(form == "gemma"), dtype if form == "hf" else None
    given = None if form == "no_weight" else weight
    hidden, h = add_rms_norm(reduced, residual, bias, given, spec(dtype, offset, cast))
    expected, expected_h = exact(reduced, residual, bias, given, offset=offset)
    # Against one rounding of the exact result: float32 rounds a few times more, and so does the cast before the weight.
    factor = 4.0 if dtype == torch.float32 else (2.0 if form == "hf" else 1.1)
    assert_within_budget(h, expected_h.to(dtype), expected_h)
    assert_within_budget(hidden, expected.to(dtype), expected, factor=factor)


def test_float64_is_computed_in_float64() -> None:
    reduced, residual, weight, bias = (one.double() for one in inputs(torch.float32))
    hidden, h = add_rms_norm(reduced, residual, bias, weight, spec(torch.float64))
    expected, expected_h = exact(reduced, residual, bias, weight)
    torch.testing.assert_close((hidden, h), (expected, expected_h), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", DTYPES)
def test_hugging_face_llama(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    reduced, _, weight, _ = inputs(dtype)
    module = LlamaRMSNorm(H, EPS).to(dtype)
    module.weight.data = weight
    hidden, _ = add_rms_norm(reduced, None, None, weight, spec(dtype, cast=dtype))
    torch.testing.assert_close(hidden, module(reduced), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_rms_norm(dtype: torch.dtype) -> None:
    reduced, _, weight, _ = inputs(dtype)
    expected = torch.nn.functional.rms_norm(reduced.float(), [H], weight.float(), EPS).to(dtype)
    hidden, _ = add_rms_norm(reduced, None, None, weight, spec(dtype))
    torch.testing.assert_close(hidden, expected, rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gemma(dtype: torch.dtype) -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    reduced, _, weight, _ = inputs(dtype)
    module = GemmaRMSNorm(H, EPS).to(dtype)
    module.weight.data = weight
    hidden, _ = add_rms_norm(reduced, None, None, weight, spec(dtype, offset=1.0))
    torch.testing.assert_close(hidden, module(reduced), rtol=torch.finfo(dtype).eps, atol=0)


def test_residual_is_rounded_to_its_own_dtype() -> None:
    reduced, residual, weight, _ = inputs(torch.bfloat16)
    norm = NormSpec(EPS, 0.0, None, torch.bfloat16, torch.float32)
    _, h = add_rms_norm(reduced, residual, None, weight, norm)
    assert torch.equal(h, reduced.float() + residual.float())


FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [0.01, 3.3])
def test_fp8_error_is_within_that_of_quantising_the_rounded_norm(dtype: torch.dtype, scale: float) -> None:
    """The smaller scale saturates, in the exact result as well; the larger one has subnormal results."""
    reduced, residual, weight, bias = inputs(dtype)
    step = torch.tensor([scale])
    hidden, h = add_rms_norm(reduced, residual, bias, weight, NormSpec(EPS, 0.0, None, FP8, dtype), step)
    rounded, rounded_h = add_rms_norm(reduced, residual, bias, weight, spec(dtype))
    assert hidden.dtype == FP8 and torch.equal(h, rounded_h)
    unfused = (rounded.float() * (1.0 / step)).clamp(-448, 448).to(FP8)
    want = exact(reduced, residual, bias, weight)[0].clamp(-448 * scale, 448 * scale)
    assert_within_budget(hidden.float() * step, unfused.float() * step, want)


def test_fp8_saturates_rounds_to_even_and_multiplies_by_the_inverse() -> None:
    """Rows of equal numbers have the norm 1 (-1): what comes out is the weight, quantised."""
    scale = torch.tensor([0.3])
    steps = torch.tensor([1.0, 17.0, 19.0, 17.5, 448.0, 460.0, 1e6, 2.0**-9, 2.0**-10, 3 * 2.0**-10])
    weight = steps * scale
    reduced = torch.ones(2, len(weight))
    reduced[1] = -1
    norm = NormSpec(0.0, 0.0, None, FP8, torch.float32)
    hidden, _ = add_rms_norm(reduced, None, None, weight, norm, scale)
    wanted = (weight * (1.0 / scale)).clamp(-448, 448).to(FP8)
    assert torch.equal(hidden[0].view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(hidden[1].float(), -wanted.float())
    assert hidden[0].float().tolist()[1:7] == [16, 20, 18, 448, 448, 448]


def test_zero_rows() -> None:
    norm = spec(torch.bfloat16)
    hidden, h = add_rms_norm(torch.empty(0, H, dtype=torch.bfloat16), None, None, None, norm)
    assert hidden.shape == h.shape == (0, H)
