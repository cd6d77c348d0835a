"""Calls whose rows are meant for a fed GEMM: how they begin, and how they end if no GEMM was fed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from tw_compile.kernels.collective.call import Call, Outputs
from tw_compile.kernels.collective.spec import Operands
from tw_compile.kernels.collective.transport import Started
from tw_compile.kernels.gemm.fed import FedRows

_LEAST_COLUMNS = 8


def started_by(
    call: Call,
    operands: Operands,
    outputs: Outputs | None,
    stream: int,
    prefetch: Sequence[torch.Tensor] | None = None,
) -> Started:
    """Launch ``call`` on ``stream`` and return it as in flight. The arguments are those of :meth:`Call.enqueue`."""
    hidden, residual = call.enqueue(operands, outputs, stream, prefetch)
    if call.fed is None:
        return Started(hidden, residual, call=call)
    return Started(hidden, residual, partial(collect, call.fed, hidden), call=call, fed=call.fed)


def collect(fed: FedRows, hidden: torch.Tensor) -> None:
    """Copy all rows to ``hidden``, as a call does whose rows are not meant for a GEMM.

    Only a fed GEMM exchanges the rows between ranks. So this runs a GEMM with a matrix of few columns. The matrix may
    hold any numbers.
    """
    from tw_compile.kernels.gemm.joint_mm import fed_joint_mm

    with torch.cuda.device(hidden.device):
        fed_joint_mm(fed, [fed.rows.new_empty(_LEAST_COLUMNS, fed.rows.shape[1]).t()], [])
        hidden.copy_(fed.rows)
