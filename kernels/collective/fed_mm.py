"""GEMMs that read a fused call's result between ``start`` and ``wait_``, and wait for its rows themselves.

    fed_joint_mm(hidden, matrices, biases, turns, group_name, slot) -> [hidden @ one for one in matrices], each with its bias
    fed_gated_mm(hidden, gate, up, turns, group_name, slot) -> silu(hidden @ gate) * (hidden @ up)

``hidden`` [tokens, hidden] is the first result of a call that is in flight on ``(group_name, slot)``, and that no ``wait_``
has completed. All other readers of such a result must come after ``wait_``; these GEMMs need not. Matrices, biases and
``turns`` are those of ``kernels/gemm/by_rows.py``; there may be no biases. CUDA and CPU, any dtype.

If the call was begun with ``feed_from``, its kernel may leave it to a GEMM to send rows to the other ranks. Then our GEMM
(``joint_mm.py``) does that, and begins with the rows that are there. In all other cases the call is completed as by ``wait_``,
and the GEMMs are those of ``by_rows.py``. This is the reference. Afterwards ``wait_`` has nothing left to do. The results have
the same bits as those of the same kernel behind ``wait_``.

Raises RuntimeError where no call with this result is in flight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tw_compile.environment import spin_limit
from tw_compile.kernels.collective import ops
from tw_compile.kernels.gemm import by_rows, joint_mm
from tw_compile.kernels.gemm.fed import FedRows
from tw_compile.kernels.runtime.operator import define
from tw_compile.kernels.runtime.wgmma import has_instructions


def _fed_joint_mm(
    hidden: torch.Tensor,
    matrices: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    turns: Sequence[int],
    group_name: str,
    slot: int,
) -> list[torch.Tensor]:
    fed = _fed_rows(hidden, group_name, slot)
    if fed is not None and joint_mm.multiplies(fed.rows, matrices, biases):
        products = joint_mm.fed_joint_mm(fed, matrices, biases)
        _note_fed(group_name, slot)
        return products
    _complete(hidden, group_name, slot)
    _load(hidden.device, "biased" if biases else "plain")
    return by_rows.joint_mm_on_cuda(hidden, matrices, biases, turns)


def _fed_gated_mm(
    hidden: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, turns: Sequence[int], group_name: str, slot: int
) -> torch.Tensor:
    fed = _fed_rows(hidden, group_name, slot)
    if fed is not None and gate.shape == up.shape and joint_mm.multiplies(fed.rows, (gate, up)):
        product = joint_mm.fed_gated_mm(fed, gate, up)
        _note_fed(group_name, slot)
        return product
    _complete(hidden, group_name, slot)
    _load(hidden.device, "gated")
    return by_rows.gated_mm_on_cuda(hidden, gate, up, turns)


def _fed_rows(hidden: torch.Tensor, group_name: str, slot: int) -> FedRows | None:
    """The rows of ``hidden``, if a GEMM may take them as they arrive; else None."""
    if not ops.is_in_flight(hidden, group_name, slot):
        raise RuntimeError(
            f"fed matmul: no call with this result is in flight on group {group_name!r}, slot {slot}; it comes between a "
            "start and its wait_"
        )
    return None if ops.is_complete(hidden, group_name, slot) else ops.in_flight[group_name, slot].fed


def _note_fed(group_name: str, slot: int) -> None:
    """Note that the call is complete: the fed GEMM has put all rows where later GEMMs find them."""
    ops.in_flight[group_name, slot].finish = None


def _complete(hidden: torch.Tensor, group_name: str, slot: int) -> None:
    """Complete the call whose result is ``hidden``, unless the slot's next start has done that."""
    if not ops.is_complete(hidden, group_name, slot):
        ops.complete_earlier(group_name, slot)


_loaded: set[tuple[torch.device, joint_mm.Form]] = set()


def _load(device: torch.device, form: joint_mm.Form) -> None:
    """Load the kernels of fed GEMMs now. The first fed call may come while a CUDA graph is captured, when loading may fail."""
    if device.type != "cuda" or (device, form) in _loaded or torch.cuda.is_current_stream_capturing():
        return
    if has_instructions(device):
        joint_mm.fed_kernels(device, form, spin_limit())
    _loaded.add((device, form))


def _fed_joint_fake(
    hidden: torch.Tensor,
    matrices: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    turns: Sequence[int],
    group_name: str,
    slot: int,
) -> list[torch.Tensor]:
    return [hidden.new_empty((hidden.shape[0], one.shape[1])) for one in matrices]


def _fed_gated_fake(
    hidden: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, turns: Sequence[int], group_name: str, slot: int
) -> torch.Tensor:
    return hidden.new_empty((hidden.shape[0], gate.shape[1]))


fed_joint_mm = define(
    "fed_joint_mm(Tensor hidden, Tensor[] matrices, Tensor[] biases, int[] turns, str group_name, int slot) -> Tensor[]",
    _fed_joint_mm,
    _fed_joint_fake,
)
fed_gated_mm = define(
    "fed_gated_mm(Tensor hidden, Tensor gate, Tensor up, int[] turns, str group_name, int slot) -> Tensor",
    _fed_gated_mm,
    _fed_gated_fake,
)
