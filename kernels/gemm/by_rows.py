"""GEMMs of one input that use our kernel for the numbers of rows at which our kernel is faster.

    joint_mm_by_rows(a, matrices, biases, turns) -> [a @ one for one in matrices], each with its bias if there are any
    gated_mm_by_rows(a, gate, up, turns) -> silu(a @ gate) * (a @ up)

``a`` [rows, depth], matrices [depth, columns], biases [columns]. A compiled graph may serve any number of rows. Which kernel is
faster changes with this number more than once, because the kernels' waves of tiles are full at different numbers of rows.
``turns`` are the ascending numbers of rows at which the choice changes. The first change is from the library's GEMMs to our
kernel: ``[0]`` means our kernel always, ``[64, 2048]`` means our kernel from 64 to 2047 rows. They are measured
(``autotune/turns.py``). Our kernel is ``joint_mm.cu``, or, for few rows and matrices that are not gated, ``split_k_mm.cu``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import torch

from tw_compile.kernels.gemm import joint_mm, split_k_mm
from tw_compile.kernels.gemm.mm_leaving_sms import one_by_one
from tw_compile.kernels.runtime.operator import define


def is_ours(rows: int, turns: Sequence[int]) -> bool:
    """Whether ``turns`` gives ``rows`` rows to our kernel."""
    return bool(bisect_right(turns, rows) % 2)


def joint_mm_on_cuda(
    a: torch.Tensor, matrices: Sequence[torch.Tensor], biases: Sequence[torch.Tensor], turns: Sequence[int]
) -> list[torch.Tensor]:
    if is_ours(len(a), turns) and joint_mm.multiplies(a, matrices, biases):
        joint_mm.load(a.device, "biased" if biases else "plain")  # both: a call of other rows may be in a capture
        split_k_mm.load(a.device, bool(biases))
        tiles = split_k_mm.tiles_of(a, matrices)
        if tiles is not None:
            return split_k_mm.joint_mm(a, matrices, biases, tiles)
        return joint_mm.joint_mm(a, matrices, biases, 0)
    return one_by_one(a, matrices, biases, 0)


def gated_mm_on_cuda(a: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, turns: Sequence[int]) -> torch.Tensor:
    if is_ours(len(a), turns) and gate.shape == up.shape and joint_mm.multiplies(a, (gate, up)):
        return joint_mm.gated_mm(a, gate, up, 0)
    return gated_one_by_one(a, gate, up)


def gated_one_by_one(a: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The library's GEMMs, then a kernel for ``silu(gate) * up``. One GEMM if both matrices are halves of one matrix."""
    from tw_compile.kernels.gemm.silu_mul import silu_mul

    both = _as_one(gate, up)
    if both is None:
        return silu_mul(torch.mm(a, gate), torch.mm(a, up))
    product = torch.mm(a, both)
    return silu_mul(product[:, : gate.shape[1]], product[:, gate.shape[1] :])


def _as_one(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor | None:
    """``[gate, up]`` side by side as one matrix, if they lie like this in one tensor's memory; else None."""
    depth, columns = gate.shape
    if gate.stride() != (1, depth) or up.stride() != (1, depth) or up.shape != gate.shape:
        return None
    if up.untyped_storage().data_ptr() != gate.untyped_storage().data_ptr():
        return None
    if up.storage_offset() != gate.storage_offset() + depth * columns:
        return None
    return gate.as_strided((depth, 2 * columns), (1, depth))


def _joint_fake(
    a: torch.Tensor, matrices: Sequence[torch.Tensor], biases: Sequence[torch.Tensor], turns: Sequence[int]
) -> list[torch.Tensor]:
    return [a.new_empty((a.shape[0], one.shape[1])) for one in matrices]


def _gated_fake(a: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, turns: Sequence[int]) -> torch.Tensor:
    return a.new_empty((a.shape[0], gate.shape[1]))


joint_mm_by_rows = define(
    "joint_mm_by_rows(Tensor a, Tensor[] matrices, Tensor[] biases, int[] turns) -> Tensor[]",
    joint_mm_on_cuda,
    _joint_fake,
)
gated_mm_by_rows = define(
    "gated_mm_by_rows(Tensor a, Tensor gate, Tensor up, int[] turns) -> Tensor", gated_mm_on_cuda, _gated_fake
)
