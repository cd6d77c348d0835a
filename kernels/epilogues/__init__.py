"""Epilogues: what a kernel does with a row once it is summed.

A new epilogue needs a reference, row code, and an entry here.

An epilogue gets ``h = scale * sum + bias + residual`` in float32 and computes ``hidden`` from it, with the numbers of
:class:`~tw_compile.kernels.collective.spec.NormSpec`. A norm may have a weight and a bias of its own, both ``[hidden]``.
``ops.operators_of`` defines the operators of an epilogue. Users pass entries of their own to ``EPILOGUES.register``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tw_compile.kernels.registry import Registry

_RUNTIME = Path(__file__).parents[1] / "runtime"


@dataclass(frozen=True)
class EpilogueEntry:
    """One epilogue.

    Attributes:
        reference: ``module:attribute`` of the eager definition, with the arguments and results of
            :func:`~tw_compile.kernels.collective.reference.add_rms_norm`.
        local_kernel: ``module:attribute`` of a kernel for rows that are summed already, such as
            ``norm_kernel.add_rms_norm_cuda``; None: the reference serves GPUs too.
        triton_row: ``module:attribute`` of a Triton function with the arguments of ``row.normalise_row``; None: no Triton
            kernel supports the epilogue.
        header: ``<name>_row.cuh``, which defines what ``rms_norm_row.cuh`` defines for ``row.cuh``; None: no CUDA kernel
            supports the epilogue.
        statistics_bytes: Size of ``RowStatistics`` in that header, or the largest if it depends on the row.
    """

    name: str
    reference: str
    local_kernel: str | None = None
    triton_row: str | None = None
    header: Path | None = None
    statistics_bytes: int = 4


EPILOGUES: Registry[EpilogueEntry] = Registry(
    "epilogue",
    (
        EpilogueEntry(
            "rms_norm",
            "tw_compile.kernels.collective.reference:add_rms_norm",
            "tw_compile.kernels.collective.norm_kernel:add_rms_norm_cuda",
            "tw_compile.kernels.collective.row:normalise_row",
            _RUNTIME / "rms_norm_row.cuh",
        ),
        EpilogueEntry(
            "layer_norm",
            "tw_compile.kernels.collective.reference:add_layer_norm",
            "tw_compile.kernels.collective.norm_kernel:add_layer_norm_cuda",
            "tw_compile.kernels.collective.row:layer_normalise_row",
            _RUNTIME / "layer_norm_row.cuh",
            statistics_bytes=12,
        ),
    ),
)
