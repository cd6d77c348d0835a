"""The matmul that leaves SMs to others: what it computes, and what it tells cuBLAS."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tw_compile import compat
from tw_compile.kernels.collective import ops
from tw_compile.kernels.gemm import grouped_mm, joint_mm
from tw_compile.kernels.gemm import mm_leaving_sms as module
from tw_compile.kernels.gemm.mm_leaving_sms import (
    addmm_leaving_sms,
    gated_mm_leaving_sms,
    grouped_mm_leaving_sms,
    joint_mm_leaving_sms,
    mm_leaving_sms,
)
from tw_compile.testing import fake_process_group

LT = torch._C._BlasBackend.Cublaslt


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, object]]:
    """``(SMs reserved, library)`` at each matmul; the process's settings are those of this fixture."""
    state: dict[str, object] = {"reserved": None, "library": "before"}
    seen: list[tuple[object, object]] = []

    def mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        seen.append((state["reserved"], state["library"]))
        if a.isnan().any():
            raise RuntimeError("no such GEMM")
        return a @ b

    monkeypatch.setattr(torch._C, "_get_sm_carveout_experimental", lambda: state["reserved"])
    monkeypatch.setattr(torch._C, "_set_sm_carveout_experimental", lambda count: state.update(reserved=count))
    monkeypatch.setattr(torch._C, "_get_blas_preferred_backend", lambda: state["library"])
    monkeypatch.setattr(torch._C, "_set_blas_preferred_backend", lambda library: state.update(library=library))
    monkeypatch.setattr(torch, "mm", mm)
    return seen


def factors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(5, 3), torch.randn(3, 7)


@pytest.mark.parametrize("reserved_sms", [0, 16])
def test_it_is_a_matmul(reserved_sms: int) -> None:
    a, b = factors()
    assert torch.equal(mm_leaving_sms(a, b, reserved_sms), torch.mm(a, b))


def test_fake_tensors_have_its_shape() -> None:
    with torch.device("meta"):
        result = mm_leaving_sms(*factors(), 16)
    assert result.shape == (5, 7)


def test_it_is_kept_in_compiled_graphs() -> None:
    a, b = factors()
    found = torch.compile(lambda a, b: mm_leaving_sms(a, b, 8) + 1, fullgraph=True)(a, b)
    torch.testing.assert_close(found, a @ b + 1)


def test_a_negative_number_of_sms_is_refused() -> None:
    with pytest.raises(ValueError, match="reserved_sms: expected 0 or more SMs, got -1"):
        mm_leaving_sms(*factors(), -1)


def test_the_gemm_is_planned_without_the_reserved_sms(settings: list[tuple[object, object]]) -> None:
    a, b = factors()
    module.mm(a, b, 16)
    module.mm(a, b, 0)
    assert settings == [(16, LT), (None, "before")], "and others are as before"


def test_a_gemm_with_a_bias_is_planned_without_them_too(settings: list[tuple[object, object]]) -> None:
    a, b = factors()
    bias = torch.randn(7)
    assert torch.equal(addmm_leaving_sms(bias, a, b, 16), torch.addmm(bias, a, b))
    expected = torch.addmm(bias, a, b)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "addmm", lambda bias, a, b: torch.mm(a, b) + bias)
        torch.testing.assert_close(module.addmm_on_cuda(bias, a, b, 16), expected)
    assert settings == [(16, LT)]


def grouped_factors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of three groups, one of which has no rows."""
    a, weights = torch.randn(5, 16).bfloat16(), torch.randn(3, 8, 16).bfloat16().transpose(1, 2)
    return a, weights, torch.tensor([2, 2, 5], dtype=torch.int32)


@pytest.mark.parametrize("reserved_sms", [0, 16])
def test_a_grouped_gemm_multiplies_each_group_by_its_matrix(reserved_sms: int) -> None:
    a, weights, ends = grouped_factors()
    found = grouped_mm_leaving_sms(a, weights, ends, reserved_sms)
    torch.testing.assert_close(found, torch.cat((a[:2] @ weights[0], a[2:] @ weights[2])))
    with pytest.raises(ValueError, match="reserved_sms: expected 0 or more SMs, got -1"):
        grouped_mm_leaving_sms(a, weights, ends, -1)


def test_a_grouped_gemm_is_launched_without_them_too(
    settings: list[tuple[object, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, weights, ends = grouped_factors()
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", lambda a, weights, offs: torch.mm(a, weights[0]))
    for reserved_sms in (16, 0):
        assert torch.equal(module.grouped_mm_on_cuda(a, weights, ends, reserved_sms), a @ weights[0])
    assert settings == [(16, LT), (None, "before")]


@pytest.mark.parametrize("reserved_sms", [0, 16])
def test_a_grouped_gemm_is_our_own_where_that_can(
    settings: list[tuple[object, object]], monkeypatch: pytest.MonkeyPatch, reserved_sms: int
) -> None:
    a, weights, ends = grouped_factors()
    calls: list[tuple[object, ...]] = []

    def ours(*arguments: object) -> torch.Tensor:
        calls.append(arguments)
        return torch.mm(a, weights[1])

    monkeypatch.setattr(
        grouped_mm, "multiplies", lambda *given: given[0] is a and given[1] is weights and given[2] is ends
    )
    monkeypatch.setattr(grouped_mm, "grouped_mm", ours)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", lambda a, weights, offs: torch.mm(a, weights[0]))
    assert torch.equal(module.grouped_mm_on_cuda(a, weights, ends, reserved_sms), a @ weights[1])
    assert settings == [(None, "before")], "it is told how many SMs, and no library is"
    ((*operands, passed_on),) = calls
    assert all(one is other for one, other in zip(operands, (a, weights, ends), strict=True))
    assert passed_on == reserved_sms


@pytest.mark.parametrize("reserved_sms", [0, 16])
def test_other_grouped_gemms_are_torchs(
    settings: list[tuple[object, object]], monkeypatch: pytest.MonkeyPatch, reserved_sms: int
) -> None:
    a, weights, ends = grouped_factors()
    monkeypatch.setattr(grouped_mm, "multiplies", lambda a, weights, ends: False)
    monkeypatch.setattr(grouped_mm, "grouped_mm", lambda *arguments: pytest.fail("it is not for these operands"))
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", lambda a, weights, offs: torch.mm(a, weights[0]))
    assert torch.equal(module.grouped_mm_on_cuda(a, weights, ends, reserved_sms), a @ weights[0])
    assert settings == [(16, LT) if reserved_sms else (None, "before")]


def test_our_own_grouped_gemm_is_asked_for_no_negative_number_of_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_mm, "multiplies", lambda a, weights, ends: True)
    monkeypatch.setattr(grouped_mm, "grouped_mm", lambda *arguments: pytest.fail("it was called"))
    with pytest.raises(ValueError, match="reserved_sms: expected 0 or more SMs, got -1"):
        module.grouped_mm_on_cuda(*grouped_factors(), -1)


def test_a_grouped_gemm_is_kept_in_compiled_graphs() -> None:
    factors = grouped_factors()
    found = torch.compile(lambda *factors: grouped_mm_leaving_sms(*factors, 8) + 1, fullgraph=True)(*factors)
    torch.testing.assert_close(found, grouped_mm_leaving_sms(*factors, 0) + 1)


def joint_factors() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Rows, and matrices that lie as a linear layer's do; the first two are of one shape."""
    a = torch.randn(5, 16).bfloat16()
    return a, [torch.randn(columns, 16).bfloat16().t() for columns in (8, 8, 24)]


def biases_of(matrices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.randn(matrix.shape[1]).bfloat16() for matrix in matrices]


@pytest.mark.parametrize("reserved_sms", [0, 16])
def test_a_joint_gemm_multiplies_by_each_matrix(reserved_sms: int) -> None:
    a, matrices = joint_factors()
    biases = biases_of(matrices)
    for count in (1, 2, 3):
        found = joint_mm_leaving_sms(a, matrices[:count], [], reserved_sms)
        assert len(found) == count
        assert all(torch.equal(one, torch.mm(a, matrix)) for one, matrix in zip(found, matrices, strict=False))
        found = joint_mm_leaving_sms(a, matrices[:count], biases[:count], reserved_sms)
        want = [torch.addmm(*operands) for operands in zip(biases, [a] * count, matrices, strict=False)]
        assert len(found) == count and all(map(torch.equal, found, want))
    with pytest.raises(ValueError, match="reserved_sms: expected 0 or more SMs, got -1"):
        joint_mm_leaving_sms(a, matrices, [], -1)
    with pytest.raises(ValueError, match="biases: expected none or one for each of 3 matrices, got 1"):
        joint_mm_leaving_sms(a, matrices, biases[:1], 0)


@pytest.mark.parametrize("reserved_sms", [0, 16])
def test_a_gated_gemm_is_silu_of_one_product_times_the_other(reserved_sms: int) -> None:
    a, (gate, up, _) = joint_factors()
    found = gated_mm_leaving_sms(a, gate, up, reserved_sms)
    assert torch.equal(found, torch.nn.functional.silu(torch.mm(a, gate)) * torch.mm(a, up))
    with pytest.raises(ValueError, match="reserved_sms: expected 0 or more SMs, got -1"):
        gated_mm_leaving_sms(a, gate, up, -1)


def test_fake_tensors_of_joint_and_gated_gemms_have_their_shapes_and_dtypes() -> None:
    a, matrices = joint_factors()
    a, matrices = a.to("meta"), [one.to("meta") for one in matrices]
    products = [*joint_mm_leaving_sms(a, matrices, [], 16), gated_mm_leaving_sms(a, *matrices[:2], 16)]
    assert [one.shape for one in products] == [(5, 8), (5, 8), (5, 24), (5, 8)]
    assert all(one.dtype == torch.bfloat16 and one.is_meta and one.is_contiguous() for one in products)


def test_joint_and_gated_gemms_are_kept_in_compiled_graphs() -> None:
    a, matrices = joint_factors()

    def all_of(a: torch.Tensor, *matrices: torch.Tensor) -> list[torch.Tensor]:
        joint = joint_mm_leaving_sms(a, matrices, [], 8) + joint_mm_leaving_sms(a, matrices, biases, 8)
        return [*joint, gated_mm_leaving_sms(a, *matrices[:2], 8) + 1]

    biases = biases_of(matrices)
    for found, want in zip(torch.compile(all_of, fullgraph=True)(a, *matrices), all_of(a, *matrices), strict=True):
        torch.testing.assert_close(found, want)


@pytest.mark.parametrize("reserved_sms", [0, 16])
@pytest.mark.parametrize("form", ["plain", "biased", "gated"])
def test_joint_and_gated_gemms_are_our_own_where_those_can(
    settings: list[tuple[object, object]], monkeypatch: pytest.MonkeyPatch, form: str, reserved_sms: int
) -> None:
    a, matrices = joint_factors()
    gated = form == "gated"
    matrices = matrices[: 2 if gated else 3]
    biases = biases_of(matrices) if form == "biased" else []
    asked: list[tuple[torch.Tensor, ...]] = []
    calls: list[tuple[object, ...]] = []
    result = torch.zeros(5, 8) if gated else [torch.zeros(5, 8)]

    def multiplies(a: torch.Tensor, matrices: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] = ()) -> bool:
        asked.append((a, *matrices, *biases))
        return True

    def joint(
        a: torch.Tensor, matrices: Sequence[torch.Tensor], biases: Sequence[torch.Tensor], reserved_sms: int
    ) -> object:
        calls.append((a, *matrices, *biases, reserved_sms))
        return result

    def not_this(*arguments: object) -> None:
        pytest.fail("it is the other's")

    monkeypatch.setattr(joint_mm, "multiplies", multiplies)
    monkeypatch.setattr(joint_mm, "joint_mm", not_this if gated else joint)
    monkeypatch.setattr(
        joint_mm, "gated_mm", (lambda a, gate, up, sms: joint(a, (gate, up), (), sms)) if gated else not_this
    )
    sms = reserved_sms
    run = module.gated_mm_on_cuda(a, *matrices, sms) if gated else module.joint_mm_on_cuda(a, matrices, biases, sms)
    assert run is result and settings == [], "no other GEMM ran"
    ((*operands, passed_on),) = calls
    for given in (operands, *asked):
        assert all(one is other for one, other in zip(given, (a, *matrices, *biases), strict=True))
    assert passed_on == reserved_sms and len(asked) == 1


@pytest.fixture
def no_joint_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("joint_mm", "gated_mm"):
        monkeypatch.setattr(joint_mm, name, lambda *arguments: pytest.fail("it was called"))


@pytest.mark.parametrize("reserved_sms", [0, 16])
def test_other_joint_and_gated_gemms_are_torchs_one_by_one(
    settings: list[tuple[object, object]],
    monkeypatch: pytest.MonkeyPatch,
    no_joint_kernel: None,
    reserved_sms: int,
) -> None:
    monkeypatch.setattr(joint_mm, "multiplies", lambda *operands: False)
    a, matrices = joint_factors()
    found = module.joint_mm_on_cuda(a, matrices, [], reserved_sms)
    assert all(torch.equal(one, a @ matrix) for one, matrix in zip(found, matrices, strict=True))
    gated = module.gated_mm_on_cuda(a, *matrices[:2], reserved_sms)
    assert torch.equal(gated, torch.nn.functional.silu(a @ matrices[0]) * (a @ matrices[1]))
    assert settings == [(16, LT) if reserved_sms else (None, "before")] * 5
    added: list[object] = []
    monkeypatch.setattr(module, "addmm_on_cuda", lambda *given: added.append(given[-1]))
    module.joint_mm_on_cuda(a, matrices, biases_of(matrices), reserved_sms)
    assert added == [reserved_sms] * 3


def test_matrices_of_two_shapes_are_not_for_the_gated_kernel(
    settings: list[tuple[object, object]], monkeypatch: pytest.MonkeyPatch, no_joint_kernel: None
) -> None:
    """One column for all is what torch would spread; the kernel's tiles have as many columns of both."""
    monkeypatch.setattr(joint_mm, "multiplies", lambda *operands: True)
    a, (gate, up, wider) = joint_factors()
    found = module.gated_mm_on_cuda(a, gate, up[:, :1], 16)
    assert torch.equal(found, torch.nn.functional.silu(a @ gate) * (a @ up[:, :1])) and settings == [(16, LT)] * 2
    with pytest.raises(RuntimeError, match="size of tensor"):
        module.gated_mm_on_cuda(a, gate, wider, 16)


def test_our_own_joint_gemms_are_asked_for_no_negative_number_of_sms(
    monkeypatch: pytest.MonkeyPatch, no_joint_kernel: None
) -> None:
    monkeypatch.setattr(joint_mm, "multiplies", lambda *operands: True)
    a, matrices = joint_factors()
    with pytest.raises(ValueError, match="reserved_sms: expected 0 or more SMs, got -1"):
        module.joint_mm_on_cuda(a, matrices, [], -1)
    with pytest.raises(ValueError, match="reserved_sms: expected 0 or more SMs, got -1"):
        module.gated_mm_on_cuda(a, *matrices[:2], -1)


def test_the_gemm_of_a_fused_call_is_planned_without_them_too(settings: list[tuple[object, object]]) -> None:
    a, b = factors()
    rest = (None, None, None, 1e-6, 0.0, None, torch.float32, torch.float32, False, "none", "0", "gloo", 0)
    with fake_process_group(2):
        for reserved in ({}, {"reserved_sms": 16}):
            ops.wait_(*ops.mm_start(a, b, *rest, **reserved), [], "0", 0)
        with pytest.raises(ValueError, match="reserved_sms: expected 0 or more SMs, got -1"):
            ops.mm_start(a, b, *rest, reserved_sms=-1)
    assert settings == [(None, "before"), (16, LT)]


def test_an_error_leaves_the_settings_as_they_were(settings: list[tuple[object, object]]) -> None:
    a, b = factors()
    with pytest.raises(RuntimeError, match="no such GEMM"):
        module.mm(a * float("nan"), b, 16)
    module.mm(a, b, 0)
    assert settings[-1] == (None, "before")


def test_torch_has_the_settings() -> None:
    """In 2.11 to 2.15; without a device they can be set and read all the same."""
    before = torch._C._get_sm_carveout_experimental(), torch.backends.cuda.preferred_blas_library()
    with compat.SmCarveout(8):
        assert torch._C._get_sm_carveout_experimental() == 8
        assert "cublaslt" in str(torch.backends.cuda.preferred_blas_library()).lower()
    assert (torch._C._get_sm_carveout_experimental(), torch.backends.cuda.preferred_blas_library()) == before
