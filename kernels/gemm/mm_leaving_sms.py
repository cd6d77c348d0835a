"""Matmuls that leave some SMs to a kernel that runs beside them.

    mm_leaving_sms(a, b, reserved_sms) -> a @ b
    addmm_leaving_sms(bias, a, b, reserved_sms) -> bias + a @ b
    joint_mm_leaving_sms(a, matrices, biases, reserved_sms) -> [a @ one for one in matrices], with its bias if any
    gated_mm_leaving_sms(a, gate, up, reserved_sms) -> silu(a @ gate) * (a @ up)
    grouped_mm_leaving_sms(a, weights, ends, reserved_sms) -> a[ends[i - 1] : ends[i]] @ weights[i], for all groups i

``a`` [tokens, k], ``b`` [k, n], ``bias`` [n] or [tokens, n], any dtype of ``torch.mm``; ``biases`` [n] one for each matrix, or
none; ``weights`` [groups, k, n], ``ends`` [groups] int32, as in ``torch.nn.functional.grouped_mm``; ``reserved_sms``: how many
SMs to leave, 0 for none. On a CPU the operators are ``torch.mm``, ``torch.addmm`` and ``grouped_mm``.

A cuBLAS GEMM on Hopper takes whole SMs, and is planned for all SMs. If a kernel beside it holds some SMs, the CTAs meant for
those SMs wait until they are free, and then run a wave of their own. Then both together take as long as one after the other. If
the GEMM is planned for the SMs that are left, its waves are full and nothing waits. The same holds for PyTorch's grouped GEMM,
because each of its CTAs has a fixed share of the tiles.

The number of SMs is passed to cuBLASLt's heuristic (``torch._C._set_sm_carveout_experimental``). PyTorch's other way to cuBLAS
does not pass it on, so the call uses cuBLASLt. The grouped GEMM is launched with ``reserved_sms`` CTAs fewer. Both are settings
of the process. The operator sets them during its call on the host. So a matmul that another thread enqueues meanwhile may be
planned for fewer SMs, too. Joint and grouped matmuls use our own kernels where these support the operands (``joint_mm.py``,
``grouped_mm.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from tw_compile import compat
from tw_compile.kernels.gemm import grouped_mm, joint_mm
from tw_compile.kernels.runtime.operator import define


def mm(a: torch.Tensor, b: torch.Tensor, reserved_sms: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """``a @ b``, leaving ``reserved_sms`` SMs. ``out`` [tokens, n]: the tensor for the result; None: a new one."""
    check_reserved_sms(reserved_sms)
    if not reserved_sms:
        return torch.mm(a, b, out=out)
    with compat.SmCarveout(reserved_sms):
        return torch.mm(a, b, out=out)


def addmm_on_cuda(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, reserved_sms: int) -> torch.Tensor:
    check_reserved_sms(reserved_sms)
    if not reserved_sms:
        return torch.addmm(bias, a, b)
    with compat.SmCarveout(reserved_sms):
        return torch.addmm(bias, a, b)


def joint_mm_on_cuda(
    a: torch.Tensor, matrices: Sequence[torch.Tensor], biases: Sequence[torch.Tensor], reserved_sms: int
) -> list[torch.Tensor]:
    check_reserved_sms(reserved_sms)
    if joint_mm.multiplies(a, matrices, biases):
        return joint_mm.joint_mm(a, matrices, biases, reserved_sms)
    return one_by_one(a, matrices, biases, reserved_sms)


def one_by_one(
    a: torch.Tensor, matrices: Sequence[torch.Tensor], biases: Sequence[torch.Tensor], reserved_sms: int
) -> list[torch.Tensor]:
    """Multiply by the matrices one after the other, with the library's GEMMs."""
    if not biases:
        return [mm(a, one, reserved_sms) for one in matrices]
    if len(biases) != len(matrices):
        raise ValueError(f"biases: expected none or one for each of {len(matrices)} matrices, got {len(biases)}")
    return [addmm_on_cuda(bias, a, one, reserved_sms) for bias, one in zip(biases, matrices, strict=False)]


def gated_mm_on_cuda(a: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, reserved_sms: int) -> torch.Tensor:
    check_reserved_sms(reserved_sms)
    if joint_mm.multiplies(a, (gate, up)) and gate.shape == up.shape:
        return joint_mm.gated_mm(a, gate, up, reserved_sms)
    return _gated_one_by_one(a, gate, up, reserved_sms)


def _gated_one_by_one(a: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, reserved_sms: int) -> torch.Tensor:
    return F.silu(mm(a, gate, reserved_sms)) * mm(a, up, reserved_sms)


def grouped_mm_on_cuda(a: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor, reserved_sms: int) -> torch.Tensor:
    check_reserved_sms(reserved_sms)
    if grouped_mm.multiplies(a, weights, ends):
        return grouped_mm.grouped_mm(a, weights, ends, reserved_sms)
    return _torchs_grouped_mm(a, weights, ends, reserved_sms)


def _torchs_grouped_mm(a: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor, reserved_sms: int) -> torch.Tensor:
    check_reserved_sms(reserved_sms)
    if not reserved_sms:
        return F.grouped_mm(a, weights, offs=ends)
    with compat.SmCarveout(reserved_sms):
        return F.grouped_mm(a, weights, offs=ends)


def check_reserved_sms(reserved_sms: int) -> None:
    """ValueError for a number that no device can reserve."""
    if reserved_sms < 0:
        raise ValueError(f"reserved_sms: expected 0 or more SMs, got {reserved_sms}")


mm_leaving_sms = define("mm_leaving_sms(Tensor a, Tensor b, int reserved_sms) -> Tensor", mm, mm)
addmm_leaving_sms = define(
    "addmm_leaving_sms(Tensor bias, Tensor a, Tensor b, int reserved_sms) -> Tensor", addmm_on_cuda, addmm_on_cuda
)
joint_mm_leaving_sms = define(
    "joint_mm_leaving_sms(Tensor a, Tensor[] matrices, Tensor[] biases, int reserved_sms) -> Tensor[]",
    joint_mm_on_cuda,
    one_by_one,
)
gated_mm_leaving_sms = define(
    "gated_mm_leaving_sms(Tensor a, Tensor gate, Tensor up, int reserved_sms) -> Tensor",
    gated_mm_on_cuda,
    _gated_one_by_one,
)
grouped_mm_leaving_sms = define(
    "grouped_mm_leaving_sms(Tensor a, Tensor weights, Tensor ends, int reserved_sms) -> Tensor",
    grouped_mm_on_cuda,
    _torchs_grouped_mm,
)
