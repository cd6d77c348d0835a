"""Calls whose rows a GEMM is to be fed: how they begin, and how they end where no GEMM was."""

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
    """``call``, launched on ``stream``, in flight; the arguments are those of :meth:`Call.enqueue`."""
    hidden, residual = call.enqueue(operands, outputs, stream, prefetch)
    if call.fed is None:
        return Started(hidden, residual, call=call)
    return Started(hidden, residual, partial(collect, call.fed, hidden), call=call, fed=call.fed)


def collect(fed: FedRows, hidden: torch.Tensor) -> None:
    """Copy all rows to ``hidden``, as if the call had not been fed.

    They come to who multiplies by them. So this multiplies by a matrix of few columns, of whatever numbers.
    """
    from tw_compile.kernels.gemm.joint_mm import fed_joint_mm

    with torch.cuda.device(hidden.device):
        fed_joint_mm(fed, [fed.rows.new_empty(_LEAST_COLUMNS, fed.rows.shape[1]).t()], [])
        hidden.copy_(fed.rows)
