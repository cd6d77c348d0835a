"""A matmul that leaves some SMs to a kernel that runs beside it.

    mm_leaving_sms(a, b, reserved_sms) -> a @ b

``a`` [tokens, k], ``b`` [k, n], any dtype of ``torch.mm``; ``reserved_sms``: how many, 0 for none. On a CPU it is ``torch.mm``.

A GEMM of cuBLAS on Hopper takes whole SMs, and is planned for all of them. When a kernel beside it holds some, the CTAs meant
for those wait until they are free and then run a wave of their own, so that both together take as long as one after the
other. Planned for the SMs that are left, the GEMM's waves are full and nothing waits.

It is cuBLASLt's heuristic that is told how many SMs there are (``torch._C._set_sm_carveout_experimental``); PyTorch's other way
to cuBLAS does not pass it on, so the call takes cuBLASLt. Both are settings of the process: the op sets them for the time of
the call on the host, a matmul that another thread enqueues meanwhile may be planned for fewer SMs too.
"""

from __future__ import annotations

import torch
from torch.library import Library

from tw_compile import compat

_library = Library("tw_compile", "FRAGMENT")
_library.define("mm_leaving_sms(Tensor a, Tensor b, int reserved_sms) -> Tensor")


def _cuda(a: torch.Tensor, b: torch.Tensor, reserved_sms: int) -> torch.Tensor:
    _check(reserved_sms)
    with compat.sm_carveout(reserved_sms):
        return torch.mm(a, b)


def _anywhere(a: torch.Tensor, b: torch.Tensor, reserved_sms: int) -> torch.Tensor:
    _check(reserved_sms)
    return torch.mm(a, b)


def _check(reserved_sms: int) -> None:
    """ValueError for a number that no device can reserve."""
    if reserved_sms < 0:
        raise ValueError(f"reserved_sms: expected 0 or more SMs, got {reserved_sms}")


_library.impl("mm_leaving_sms", _cuda, "CUDA")
_library.impl("mm_leaving_sms", _anywhere, "CPU")
torch.library.register_fake("tw_compile::mm_leaving_sms", _anywhere, lib=_library)

mm_leaving_sms = torch.ops.tw_compile.mm_leaving_sms.default
