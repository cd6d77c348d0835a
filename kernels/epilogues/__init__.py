"""Epilogues: what becomes of a row once it is summed. A new one is its reference, its row code, and an entry here.

An epilogue gets ``h = scale * sum + bias + residual`` in float32 and makes ``hidden`` of it, with or without a weight and a
bias of the norm's own, both ``[hidden]``, by the numbers of :class:`~tw_compile.kernels.collective.spec.NormSpec`.
``ops.operators_of`` makes its operators. Users give theirs to ``EPILOGUES.register``.
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
        local_kernel: The same for a kernel of rows that are summed already, as ``norm_kernel.add_rms_norm_cuda``; None: the
            reference serves GPUs too.
        triton_row: The same for a Triton function with the arguments of ``row.normalise_row``; None: no Triton kernel has it.
        header: ``<name>_row.cuh``, which has what ``rms_norm_row.cuh`` has for ``row.cuh``; None: no CUDA kernel has it.
        statistics_bytes: Size of ``RowStatistics`` in that header.
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
